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

/** Says `text` beside the pointer, inside the window; nothing hides it. */
export function showTip(event, text) {
  const tip = $("tip");
  tip.hidden = !text;
  if (!text) return;
  say(tip, text);
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
}

/** Rows are kept, by key, and cells as long as their words are the same: so a button is not replaced under the finger. */
export function fillRows(place, titles, rows) {
  if (!place.tBodies.length)
    place.replaceChildren(h("thead", {}, h("tr", {}, titles.map((title) => h("th", {}, title)))), h("tbody", {}));
  const body = place.tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const kept = rows.map(([key, cells]) => {
    const row = old.get(key) ?? h("tr", { "data-key": key }, cells.map(() => h("td", {})));
    cells.forEach((cell, index) => {
      const made = h("td", {}, cell);
      if (!same(row.cells[index], made)) row.cells[index].replaceWith(made);
    });
    return row;
  });
  if (kept.length !== body.rows.length || kept.some((row, index) => body.rows[index] !== row)) body.replaceChildren(...kept);
}

function same(before, made) {
  const buttons = (cell) => [...cell.querySelectorAll("button")].map((button) => `${button.getAttribute("aria-label")}${button.disabled}`).join();
  return before.textContent === made.textContent && buttons(before) === buttons(made);
}
