// Inside a block: code, emphasis, links, line breaks. One pass; what has no end stays as it was written.

import { h } from "./dom.js";

const MAX_DEPTH = 5;
const MAX_LINK = 2000;
const SPECIAL = /[\\`*_~[!\nh]/g;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const BARE_URL = /https?:\/\/[^\s<>"'`]{1,2000}/y;

/** How many more elements a message may be made of, and characters of code coloured; what comes after them is plain. */
export const budget = { left: 0, code: 0 };

/** Nodes for one block's text. */
export function inlines(text, depth = 0) {
  return new Inline(text, depth).nodes();
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.known = new Map(); // mark -> where it comes next, so that hostile text is not searched again and again
    this.found = [];
    this.plain = "";
  }

  nodes() {
    let at = 0;
    while (at < this.text.length && budget.left > 0) {
      SPECIAL.lastIndex = at;
      const next = SPECIAL.exec(this.text);
      if (!next) break;
      this.plain += this.text.slice(at, next.index);
      at = next.index + this.take(next.index);
    }
    this.plain += this.text.slice(at);
    this.flush();
    return this.found;
  }

  /** How many characters from `at` were understood and used. */
  take(at) {
    const sign = this.text[at];
    if (sign === "\\") return this.escaped(at);
    if (sign === "`") return this.code(at) || this.literally(at);
    if (sign === "\n") return this.push(h("br"), 1);
    if (sign === "h") return this.bare(at) || this.literally(at);
    if (sign === "[") return this.link(at) || this.literally(at);
    if (sign === "!") return (this.text[at + 1] === "[" && this.link(at + 1, 1)) || this.literally(at);
    return this.marked(at) || this.literally(at);
  }

  escaped(at) {
    const next = this.text[at + 1] ?? "";
    const known = /[!-/:-@[-`{-~]/.test(next);
    this.plain += known ? next : "\\";
    return known ? 2 : 1;
  }

  code(at) {
    const ticks = /`+/y;
    ticks.lastIndex = at;
    const fence = ticks.exec(this.text)[0];
    const end = this.next(fence, at + fence.length);
    if (end < 0) return this.literally(at, fence.length);
    const inside = this.text.slice(at + fence.length, end).replace(/\n/g, " ");
    return this.push(h("code", { dir: "ltr" }, inside.trim() || inside), end + fence.length - at);
  }

  marked(at) {
    if (this.depth >= MAX_DEPTH) return 0;
    for (const [mark, tag] of MARKS) {
      if (!this.text.startsWith(mark, at)) continue;
      const start = at + mark.length;
      if (/\s/.test(this.text[start] ?? " ")) continue;
      if (mark[0] === "_" && /\w/.test(this.text[at - 1] ?? " ")) continue; // snake_case
      const end = this.closing(mark, start + 1);
      if (end < 0 || /\s/.test(this.text[end - 1])) continue;
      if (mark[0] === "_" && /\w/.test(this.text[end + mark.length] ?? " ")) continue;
      return this.push(h(tag, {}, inlines(this.text.slice(start, end), this.depth + 1)), end + mark.length - at);
    }
    return 0;
  }

  /** Where `mark` comes next; a single one is not half of a double one, as far as a few tries tell. */
  closing(mark, from) {
    let end = this.next(mark, from);
    for (let tries = 0; mark.length === 1 && tries < 8 && end >= 0 && this.text[end + 1] === mark; tries += 1) {
      end = this.text.indexOf(mark, end + 2);
    }
    return end;
  }

  /** [words](address); an image is a link too, because nothing is fetched for a model. */
  link(at, before = 0) {
    if (this.depth >= MAX_DEPTH) return 0;
    const middle = this.next("](", at + 1);
    if (middle < 0 || middle - at > MAX_LINK) return 0;
    const end = this.next(")", middle + 2);
    if (end < 0 || end - middle > MAX_LINK) return 0;
    const words = this.text.slice(at + 1, middle);
    const address = this.text.slice(middle + 2, end).trim().split(/\s/)[0];
    this.push(anchor(address, inlines(words, MAX_DEPTH)), 0);
    return before + end + 1 - at;
  }

  bare(at) {
    BARE_URL.lastIndex = at;
    const found = BARE_URL.exec(this.text);
    if (!found || /\w/.test(this.text[at - 1] ?? " ")) return 0;
    let length = found[0].length;
    while (".,;:!?)]*_~".includes(found[0][length - 1])) length -= 1;
    const address = found[0].slice(0, length);
    return this.push(anchor(address, [address]), address.length);
  }

  next(what, from) {
    let at = this.known.get(what);
    if (at === undefined || (at >= 0 && at < from)) {
      at = this.text.indexOf(what, from);
      this.known.set(what, at);
    }
    return at;
  }

  literally(at, length = 1) {
    this.plain += this.text.slice(at, at + length);
    return length;
  }

  push(node, length) {
    budget.left -= 1;
    this.flush();
    this.found.push(node);
    return length;
  }

  flush() {
    if (this.plain) this.found.push(document.createTextNode(this.plain));
    this.plain = "";
  }
}

/** A link that shows where it leads; anything but http and https stays text. */
function anchor(address, words) {
  let url = null;
  try {
    url = new URL(address);
  } catch { /* relative or broken: no link */ }
  if (!url || !["http:", "https:"].includes(url.protocol) || url.username || url.password) {
    return h("span", {}, words, ` (${address})`);
  }
  const link = h("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", title: url.href }, words);
  const told = link.textContent.includes(url.host) ? [] : [h("span", { class: "host" }, ` ↗ ${url.host}`)];
  return h("span", {}, link, told);
}
