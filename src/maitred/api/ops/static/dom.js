// Building nodes. Text only ever becomes a text node; nothing here, or anywhere on the page, parses HTML.

export const $ = (id) => document.getElementById(id);

/** h("p", {class: "muted", onclick: f}, "text", node, [nodes], ...). Of lists, for a call takes only so many arguments. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  return fill(node, children.flat());
}

/** Puts `nodes`, however many, in place of what is in `node`. */
export function fill(node, nodes) {
  const all = document.createDocumentFragment();
  for (const child of nodes) all.append(child);
  node.replaceChildren(all);
  return node;
}

/** Sets text only where it changed, so that screen readers and layout are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
