// The KV cache as a map: whose block, which can be found again by prefix, what is free.

import { begin, colour, requestColour, rounded } from "./canvas.js";
import { $, say } from "./dom.js";
import { count, percent } from "./words.js";

const FREE = 0;
const CACHED = 1;
const SHARED = 2;
const FIRST_OWNER = 4;
const MEANINGS = ["free", "free, but findable by its prefix", "shared by several requests", "held by a request that is not shown"];

export class BlockMap {
  constructor(tickets, { onPoint }) {
    this.tickets = tickets;
    this.onPoint = onPoint; // told (ticket, event, words), or null
    this.canvas = $("blocks");
    this.codes = [];
    this.numbers = []; // ticket number of each of the frame's running
    this.chosen = null;
    for (const kind of ["pointermove", "pointerdown"]) this.canvas.addEventListener(kind, (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => onPoint(null));
  }

  take(frame) {
    const blocks = frame.engine.blocks;
    this.codes = [];
    for (let i = 0; i < blocks.runs.length; i += 2) {
      for (let n = 0; n < blocks.runs[i + 1]; n += 1) this.codes.push(blocks.runs[i]);
    }
    this.owners = frame.engine.running.map((request) => this.tickets.byId.get(request.id));
    this.blocks = blocks;
    const used = percent(blocks.num_used, blocks.num_blocks);
    const each = blocks.blocks_per_cell > 1 ? `; a square is ${blocks.blocks_per_cell} blocks` : "";
    say($("blocks-note"), `${count(blocks.num_used)} of ${count(blocks.num_blocks)} blocks in use${each}`);
    this.label = `Map of KV blocks: ${used.toFixed(0)}% in use, ${count(blocks.num_cached)} findable by prefix.`;
  }

  describe() {
    if (this.label) this.canvas.setAttribute("aria-label", this.label);
  }

  /** The widest square cells that fit. */
  layout(width, height) {
    const cells = Math.max(1, this.codes.length);
    let pitch = Math.min(26, Math.sqrt((width * height) / cells));
    while (pitch > 2 && Math.floor(width / pitch) * Math.floor(height / pitch) < cells) pitch -= 0.1;
    const columns = Math.max(1, Math.floor(width / pitch));
    return { pitch: Math.min(width / columns, height / Math.ceil(cells / columns)), columns };
  }

  draw() {
    if (!this.codes.length || !this.canvas.clientWidth) return;
    const { context, width, height } = begin(this.canvas);
    const { pitch, columns } = this.layout(width, height);
    const gap = pitch > 7 ? 2 : 1;
    const side = pitch - gap;
    this.codes.forEach((code, index) => {
      const [x, y] = [(index % columns) * pitch, Math.floor(index / columns) * pitch];
      const owner = this.owners[code - FIRST_OWNER];
      const faded = this.chosen !== null && (code < FIRST_OWNER || owner?.number !== this.chosen);
      context.globalAlpha = faded ? 0.28 : 1;
      context.fillStyle = this.ink(code, owner);
      rounded(context, x, y, side, side, 2.5);
      context.fill();
      if (code === CACHED && side > 6) this.dot(context, x, y, side);
      if (code === SHARED && side > 6) this.ring(context, x, y, side);
    });
    context.globalAlpha = 1;
  }

  ink(code, owner) {
    if (code >= FIRST_OWNER) return owner ? requestColour(owner.number) : colour("other");
    return colour({ [FREE]: "cell", [CACHED]: "cached", [SHARED]: "shared" }[code] ?? "other");
  }

  ring(context, x, y, side) {
    context.fillStyle = colour("card");
    rounded(context, x + side * 0.3, y + side * 0.3, side * 0.4, side * 0.4, side * 0.2);
    context.fill();
  }

  dot(context, x, y, side) {
    context.fillStyle = colour("brass");
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, Math.max(1, side / 8), 0, 7);
    context.fill();
  }

  point(event) {
    if (!this.codes.length) return;
    const { pitch, columns } = this.layout(this.canvas.clientWidth, this.canvas.clientHeight);
    const column = Math.floor(event.offsetX / pitch);
    const index = Math.floor(event.offsetY / pitch) * columns + column;
    const code = column < columns ? this.codes[index] : undefined;
    if (code === undefined) return this.onPoint(null);
    const owner = this.owners[code - FIRST_OWNER] ?? null;
    const first = index * this.blocks.blocks_per_cell;
    const last = Math.min(first + this.blocks.blocks_per_cell, this.blocks.num_blocks) - 1;
    const words = `${first === last ? `block ${first}` : `blocks ${first} to ${last}`}: ${MEANINGS[code] ?? ""}`;
    return this.onPoint(owner, event, owner ? null : words);
  }
}
