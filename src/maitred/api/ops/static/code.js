// Blocks of code: in colours, and to be copied.

import { fill, h } from "./dom.js";

const LIBRARY = "./highlight.min.js"; // not asked for before the first block that needs it
let library = null; // a promise of it
let highlighter = null; // once it is there

/** `text` under its language's name, with a button that copies it. */
export function codeBlock(text, language = "", { isColoured = Boolean(language) } = {}) {
  const code = h("code", {}, text);
  if (isColoured) colour(code, text, language);
  const head = h("div", { class: "code-head" }, h("span", { class: "lang" }, language), copyButton("Copy the code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0", dir: "ltr" }, code));
}

export function copyButton(label, textOf) {
  const button = h("button", { type: "button", class: "tool copy", "aria-label": label, title: label });
  button.addEventListener("click", async () => {
    const done = (await copy(textOf())) ? "done" : "failed";
    button.classList.add(done);
    setTimeout(() => button.classList.remove(done), 1500);
  });
  return button;
}

/** The clipboard is there under https and on this machine alone; elsewhere a selection is copied, as pages used to. */
async function copy(text) {
  try {
    if (navigator.clipboard) return await navigator.clipboard.writeText(text), true;
  } catch { /* not allowed; try the old way */ }
  const field = h("textarea", { class: "sr" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

function colour(code, text, language) {
  if (highlighter) paint(code, text, language);
  else {
    library ??= import(LIBRARY).then((module) => (highlighter = module.default));
    library.then(() => paint(code, text, language), () => {}); // without it the code stays as it is
  }
}

function paint(code, text, language) {
  if (!highlighter.getLanguage(language)) return;
  try {
    // The tree of scopes, not the HTML that the library would make of it: nothing here parses HTML.
    fill(code, spans(highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode));
  } catch { /* nested too deep for it, or for us: the code stays as it is */ }
}

function spans({ children }) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    const scope = /^[a-z_-]+/.exec(child.scope ?? "")?.[0];
    return h("span", scope ? { class: `hl-${scope}` } : {}, spans(child));
  });
}
