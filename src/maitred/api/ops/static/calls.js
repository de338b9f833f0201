// A call of a tool as a card: what is called, with what, and its result, or a field for it.

import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { inert, inertLine } from "./inert.js";

const MAX_SHOWN = 20_000; // characters of arguments, and of a result

/** `result` is undefined until there is one; then `onResult`, if given, is told what the reader says it is. */
export function card(call, result, onResult) {
  const name = inertLine(call.name, 64) || "a tool";
  const parts = [h("p", { class: "call-name" }, "calls ", h("b", {}, name)), shown(call.arguments, "json")];
  if (result !== undefined) parts.push(h("p", { class: "call-name" }, "gives"), shown(result, ""));
  else if (onResult) parts.push(...question(name, onResult));
  return h("section", { class: "call", "aria-label": `Call of ${name}` }, parts);
}

function question(name, onResult) {
  const field = h("textarea", { rows: "2", "aria-label": `Result of ${name}`, placeholder: "What it gives…" });
  const send = h("button", { type: "button", class: "primary", onclick: () => onResult(field.value) }, "Send the result");
  return [field, h("div", { class: "row" }, send)];
}

function shown(text, language) {
  return codeBlock(inert(text.slice(0, MAX_SHOWN)), language);
}
