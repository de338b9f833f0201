// Building nodes. Text only ever becomes a text node; nothing here, or anywhere on the page, parses HTML.

export const $ = (id) => document.getElementById(id);

/** h("p", {class: "muted", onclick: f}, "text", node, ...) */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Sets text only where it changed, so that screen readers and layout are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
