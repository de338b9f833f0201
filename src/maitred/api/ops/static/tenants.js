// What each tenant has: slots, KV blocks, and of the tokens of the last half minute.

import { requestColour } from "./canvas.js";
import { $, h, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { percent, plural } from "./words.js";

const WINDOW_S = 30;
const SHOWN = 8;

export class Tenants {
  constructor() {
    this.seen = []; // {now, tokens}
    this.rows = new Map();
    this.nothing = h("p", { class: "muted" }, "Nobody has been served yet.");
    $("tenants").append(this.nothing);
  }

  take(frame) {
    const now = frame.engine.now;
    if (this.seen.length && now < this.seen.at(-1).now) this.seen = [];
    if (!this.seen.length || now - this.seen.at(-1).now >= 1) this.seen.push({ now, tokens: frame.tokens_by_tenant });
    while (this.seen.length > 1 && this.seen[0].now < now - WINDOW_S) this.seen.shift();
    const shares = sharesOf(frame, this.seen[0].tokens);
    this.nothing.hidden = shares.length > 0;
    const kept = new Set(shares.map((share) => share.name));
    for (const [name, row] of this.rows) if (!kept.has(name)) row.node.remove(), this.rows.delete(name);
    shares.forEach((share) => this.fill(share));
    const nodes = shares.map((share) => this.rows.get(share.name).node);
    if (nodes.some((node, index) => $("tenants").children[index + 1] !== node)) $("tenants").append(...nodes);
  }

  fill(share) {
    let row = this.rows.get(share.name);
    if (!row) {
      row = makeRow(share.name, this.rows.size);
      this.rows.set(share.name, row);
      $("tenants").append(row.node);
    }
    say(row.note, `${plural(share.slots, "slot", "slots")}${share.weight !== null && share.weight !== 1 ? `, weight ${share.weight}` : ""}`);
    row.tracks[0].style.width = `${share.slotShare}%`;
    row.tracks[1].style.width = `${share.blockShare}%`;
    row.tracks[2].style.width = `${share.tokenShare}%`;
    row.node.title = `${share.slotShare.toFixed(0)}% of the slots taken, ${share.blockShare.toFixed(0)}% of the blocks in use, ${share.tokenShare.toFixed(0)}% of the new tokens of the last ${WINDOW_S} s`;
    row.bars.setAttribute("aria-label", row.node.title);
  }
}

function sharesOf(frame, tokensBefore) {
  const held = new Map(frame.engine.tenants.map((tenant) => [tenant.name, tenant]));
  const tokens = Object.entries(frame.tokens_by_tenant).map(([name, all]) => [name, all - (tokensBefore[name] ?? 0)]);
  const names = new Set([...held.keys(), ...tokens.filter(([, grown]) => grown > 0).map(([name]) => name)]);
  const total = { slots: frame.engine.num_running, blocks: 0, tokens: 0 };
  for (const tenant of held.values()) total.blocks += tenant.num_blocks;
  for (const [, grown] of tokens) total.tokens += grown;
  const grown = new Map(tokens);
  const shares = [...names].map((name) => ({
    name,
    weight: held.get(name)?.weight ?? null,
    slots: held.get(name)?.num_running ?? 0,
    slotShare: percent(held.get(name)?.num_running ?? 0, total.slots),
    blockShare: percent(held.get(name)?.num_blocks ?? 0, total.blocks),
    tokenShare: percent(grown.get(name) ?? 0, total.tokens),
  }));
  return shares.sort((a, b) => a.name.localeCompare(b.name)).slice(0, SHOWN);
}

function makeRow(name, index) {
  const note = h("small");
  const tracks = [1, 0.75, 0.5].map((alpha) => {
    const bar = h("i");
    bar.style.background = requestColour(index * 3);
    bar.style.opacity = String(alpha);
    return bar;
  });
  const bars = h("div", { class: "bars", role: "img" }, ...tracks.map((bar) => h("div", { class: "track" }, bar)));
  const node = h("div", { class: "tenant" }, h("div", {}, h("b", {}, name ? inertLine(name, 32) : "everybody"), note), bars);
  return { node, note, tracks, bars };
}
