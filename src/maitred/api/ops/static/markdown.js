// Markdown to nodes, blocks first: paragraphs, headings, lists, quotes, code, tables. Made for text nobody vouches for:
// every step moves forward, nesting is bounded, and a link can only be http or https.

import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { inert } from "./inert.js";
import { budget, inlines } from "./inline.js";

const MAX_DEPTH = 6;
export const MAX_CHARS = 100_000; // of one message that are shown
const MAX_ELEMENTS = 8000; // of one message, about
const MAX_COLOURED = 20_000; // characters of code in one message: for some texts a highlighter's time grows with their square
const CODE_ELEMENTS = 6; // of a block of code, before it is coloured

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]{0,30})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^[ :|-]+$/;

/** A list of nodes for `text` that is JSON and nothing else. */
export function jsonBlock(text) {
  const shown = inert(text.slice(0, MAX_CHARS));
  return [codeBlock(shown, "json", { isColoured: text.length < MAX_COLOURED })];
}

/** A list of nodes for `text`. */
export function markdown(text) {
  budget.left = MAX_ELEMENTS;
  budget.code = MAX_COLOURED;
  const shown = inert(text.length > MAX_CHARS ? text.slice(0, MAX_CHARS) : text);
  const nodes = blocks(shown.split("\n"), 0);
  if (text.length > MAX_CHARS) {
    nodes.push(h("p", { class: "muted" }, `… ${(text.length - MAX_CHARS).toLocaleString("en")} more characters are not shown.`));
  }
  return nodes;
}

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    budget.left -= 1;
    if (budget.left <= 0) {
      nodes.push(h("p", { class: "plain" }, lines.slice(at).join("\n")));
      break;
    }
    const taken = code(lines, at, nodes) || heading(line, nodes) || rule(line, nodes)
      || (depth < MAX_DEPTH && (quote(lines, at, nodes, depth) || list(lines, at, nodes, depth)))
      || table(lines, at, nodes) || paragraph(lines, at, nodes, depth);
    at += taken;
  }
  return nodes;
}

// Each takes a block that begins at `at`, appends its node, and gives the number of lines it took, 0 for "not mine".

function code(lines, at, nodes) {
  const mark = FENCE.exec(lines[at]);
  if (!mark) return 0;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark[1]) && !lines[end].trim().slice(mark[1].length).trim())) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  budget.left -= CODE_ELEMENTS;
  budget.code -= text.length;
  nodes.push(codeBlock(text, mark[2], { isColoured: Boolean(mark[2]) && budget.code > 0 }));
  return Math.min(end + 1, lines.length) - at;
}

function heading(line, nodes) {
  const found = HEADING.exec(line);
  if (!found) return 0;
  const level = Math.min(2 + found[1].length, 5); // the page has its own h1 and h2
  nodes.push(h(`h${level}`, { dir: "auto" }, inlines(found[2].trim())));
  return 1;
}

function rule(line, nodes) {
  if (!RULE.test(line)) return 0;
  nodes.push(h("hr"));
  return 1;
}

function quote(lines, at, nodes, depth) {
  if (!QUOTE.test(lines[at])) return 0;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  nodes.push(h("blockquote", { dir: "auto" }, blocks(inside, depth + 1)));
  return end - at;
}

function list(lines, at, nodes, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return 0;
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (mark && mark[1].length <= indent + 1 && mark[1].length >= indent) {
      if (/\d/.test(mark[2]) !== ordered || RULE.test(lines[end])) break;
      items.push([lines[end].slice(mark[0].length)]);
    } else if (!lines[end].trim()) {
      const next = lines[end + 1] ?? "";
      if (!/^\s+\S/.test(next) && !ITEM.test(next)) break;
      items.at(-1).push("");
    } else if (/^\s/.test(lines[end])) {
      items.at(-1).push(lines[end].slice(Math.min(indent + 2, lines[end].search(/\S/))));
    } else if (!mark && lines[end - 1].trim() && !FENCE.test(lines[end]) && !HEADING.test(lines[end])) {
      items.at(-1).push(lines[end]); // a paragraph goes on without indent
    } else break;
    end += 1;
  }
  const node = h(ordered ? "ol" : "ul", { dir: "auto" }, items.map((inside) => h("li", {}, tight(blocks(inside, depth + 1)))));
  const start = Number.parseInt(first[2], 10);
  if (ordered && start !== 1) node.setAttribute("start", String(start));
  nodes.push(node);
  return end - at;
}

/** An item that is one paragraph needs no paragraph. */
function tight(nodes) {
  if (nodes.length && nodes[0].tagName === "P") return [...nodes[0].childNodes, ...nodes.slice(1)];
  return nodes;
}

function table(lines, at, nodes) {
  const divider = lines[at + 1] ?? "";
  if (!lines[at].includes("|") || !DIVIDER.test(divider) || !divider.includes("|") || !divider.includes("-")) return 0;
  const head = cells(lines[at]);
  const sides = cells(divider).map(sideOf);
  let end = at + 2;
  const most = at + 2 + budget.left / head.length;
  while (end < lines.length && end < most && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => cells(line).slice(0, head.length));
  const row = (names, tag) => h("tr", {}, names.map((text, column) => h(tag, { dir: "auto", ...sides[column] }, inlines(text))));
  budget.left -= rows.length * head.length;
  const body = h("tbody", {}, rows.map((names) => row(names, "td")));
  nodes.push(h("div", { class: "table" }, h("table", {}, h("thead", {}, row(head, "th")), body)));
  return end - at;
}

/** `:-:` and `--:` of the divider, as a class. */
function sideOf(mark) {
  if (!mark.endsWith(":")) return {};
  return { class: mark.startsWith(":") ? "centre" : "end" };
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").slice(0, 40).map((cell) => cell.trim());
}

function paragraph(lines, at, nodes, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end], depth)) end += 1;
  nodes.push(h("p", { dir: "auto" }, inlines(lines.slice(at, end).join("\n"))));
  return end - at;
}

function begins(line, depth) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line)));
}
