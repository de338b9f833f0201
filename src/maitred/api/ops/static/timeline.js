// Slots over time, like tickets on the rail of a kitchen's pass; below them those who wait.

import { begin, colour, font, requestColour, rounded, stripes } from "./canvas.js";
import { $, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { count, plural, seconds } from "./words.js";

const LAG_S = 0.3; // what is drawn lies this far back, so that bars grow evenly between two frames
const AXIS = 18;
const RAIL_ROW = 11;
const RAIL_ROWS = 6;
const MAX_ROW = 26;
const MIN_ROWS = 12; // so that an idle engine shows its empty slots, if it has so many

export class Timeline {
  /** A report has a canvas of its own, and says how long a `span` (s) is drawn and which moments are marked. */
  constructor(tickets, { isMine, onPoint, canvas = $("timeline"), span = spanOf, marks = ago }) {
    this.tickets = tickets;
    this.isMine = isMine;
    this.onPoint = onPoint; // told the ticket under the pointer, or null
    Object.assign(this, { canvas, span, marks });
    this.offset = null; // s, between the page's clock and the engine's
    this.stopped = false; // no frames come
    this.chosen = null; // ticket number shown alone
    this.boxes = [];
    this.rows = this.leastRows = 1;
    this.railRows = 2;
    for (const kind of ["pointermove", "pointerdown"]) this.canvas.addEventListener(kind, (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => onPoint(null));
  }

  take(frame) {
    const offset = performance.now() / 1000 - frame.engine.now;
    // The least delay seen is nearest the truth; let go of it slowly, for clocks drift.
    this.offset = this.offset === null || Math.abs(offset - this.offset) > 5 ? offset : Math.min(this.offset + 0.002, offset);
    const { num_running: running, max_num_seqs: most, num_waiting: waiting } = frame.engine;
    say($("timeline-note"), `${plural(running, "slot", "slots")} of ${most} taken`);
    this.numWaiting = waiting;
    this.leastRows = Math.min(MIN_ROWS, most);
    this.label = `Timeline of batch slots: ${running} of ${most} taken, ${waiting} waiting.`;
  }

  /** For who cannot see it; seldom, so that nobody is talked over. */
  describe() {
    if (this.label) this.canvas.setAttribute("aria-label", this.label);
  }

  draw() {
    if (this.offset === null || !this.canvas.clientWidth) return;
    const { context, width, height } = begin(this.canvas);
    const now = this.stopped ? this.tickets.now : performance.now() / 1000 - this.offset - LAG_S;
    const span = this.span(width);
    const left = 26;
    const scale = (width - left - 8) / span;
    const x = (at) => left + (at - (now - span)) * scale;
    const waiting = [...this.tickets.byId.values()].filter((t) => t.waiting).sort((a, b) => a.waiting.place - b.waiting.place);
    const wanted = waiting.length ? Math.min(RAIL_ROWS, waiting.length) + (waiting.length > RAIL_ROWS ? 1 : 0) : 2;
    this.railRows += (wanted - this.railRows) * (wanted > this.railRows || this.stopped ? 1 : 0.06); // shrinks gently
    const railTop = height - RAIL_ROW * this.railRows - 6;
    this.boxes = [];
    this.grid(context, width, height, left, x, now, span);
    this.seats(context, left, width, railTop, x, now, span);
    this.rail(context, left, width, railTop, x, now, waiting);
    context.fillStyle = colour("brass");
    context.globalAlpha = 0.7;
    context.fillRect(x(now), AXIS - 4, 1.5, height - AXIS);
    context.globalAlpha = 1;
  }

  grid(context, width, height, left, x, now, span) {
    context.font = font(10.5);
    context.textAlign = "center";
    for (const [moment, label] of this.marks(now, span, width)) {
      const at = Math.round(x(moment)) + 0.5;
      if (moment !== now) {
        context.strokeStyle = colour("line");
        context.globalAlpha = 0.7;
        context.beginPath();
        context.moveTo(at, AXIS - 3);
        context.lineTo(at, height);
        context.stroke();
        context.globalAlpha = 1;
      }
      context.fillStyle = colour("muted");
      context.textAlign = moment === now ? "right" : "center";
      context.fillText(label, moment === now ? at + 6 : Math.max(at, left + 8), 10);
    }
  }

  seats(context, left, width, railTop, x, now, span) {
    const stints = this.visible(now - span, now);
    const needed = Math.max(this.leastRows, ...stints.map(({ stint }) => stint.seat + 1));
    this.rows = needed > this.rows || this.stopped ? needed : this.rows + (needed - this.rows) * 0.06; // shrinks gently
    const row = Math.min(MAX_ROW, (railTop - AXIS - 6) / this.rows);
    context.font = font(10, "mono");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const each = row >= 11 ? 1 : row >= 6 ? 5 : 10;
    for (let seat = 0; seat < Math.round(this.rows); seat += 1) {
      const y = AXIS + seat * row;
      if (seat % each === 0) {
        context.fillStyle = colour("muted");
        context.globalAlpha = 0.8;
        context.fillText(String(seat + 1), left - 6, y + row / 2);
        context.globalAlpha = 1;
      }
      context.fillStyle = colour("well");
      rounded(context, left, y + row * 0.1, width - left - 8, row * 0.8, 4);
      context.fill();
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left - 7, railTop);
    context.clip();
    for (const { ticket, stint } of stints) this.bar(context, ticket, stint, AXIS + stint.seat * row, row, x, now, left);
    context.restore();
    context.textBaseline = "alphabetic";
  }

  visible(since, now) {
    const found = [];
    for (const ticket of this.tickets.byId.values()) {
      for (const stint of ticket.stints) if ((stint.to ?? Infinity) > since && stint.from <= now) found.push({ ticket, stint });
    }
    return found;
  }

  bar(context, ticket, stint, y, row, x, now, left) {
    const to = Math.min(stint.to ?? now, now);
    const from = Math.min(stint.from, to);
    const decode = Math.min(stint.decodeFrom ?? to, to);
    const [x0, x1, x2] = [x(from), x(decode), Math.max(x(to), x(from) + 2)];
    const [top, tall] = [y + row * 0.1, row * 0.8];
    const ink = requestColour(ticket.number);
    context.globalAlpha = this.chosen !== null && this.chosen !== ticket.number ? 0.22 : 1;
    context.save();
    rounded(context, x0, top, x2 - x0 - 1, tall, 4);
    context.clip();
    context.fillStyle = stripes(context, ink);
    context.fillRect(x0, top, x1 - x0 + 1, tall);
    context.fillStyle = ink;
    context.fillRect(x1, top, x2 - x1, tall);
    if (stint.end === "preempted") {
      context.fillStyle = colour("card");
      context.fillRect(x2 - 7.5, top, 8, tall);
      context.fillStyle = colour("cut");
      context.fillRect(x2 - 6, top, 6, tall);
    }
    context.restore();
    if (this.isMine(ticket.id)) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      rounded(context, x0 + 0.5, top + 0.5, x2 - x0 - 2, tall - 1, 4);
      context.stroke();
    }
    this.name(context, ticket, Math.max(x0, left), x2, top, tall);
    context.globalAlpha = 1;
    this.boxes.push({ ticket, x0: Math.max(x0, left), x1: x2, y0: top, y1: top + tall });
  }

  name(context, ticket, x0, x1, top, tall) {
    if (tall < 11 || x1 - x0 < 34) return;
    const words = this.isMine(ticket.id) ? "yours" : ticket.tenant ? inertLine(ticket.tenant, 16) : `no. ${ticket.number}`;
    context.font = font(Math.min(12, tall * 0.68));
    if (context.measureText(words).width > x1 - x0 - 12) return;
    context.fillStyle = "#1b1a17";
    context.textAlign = "left";
    context.fillText(words, x0 + 6, top + tall / 2 + 0.5);
    context.textAlign = "right";
  }

  rail(context, left, width, top, x, now, waiting) {
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(left, top + 0.5);
    context.lineTo(width - 8, top + 0.5);
    context.stroke();
    context.font = font(11);
    context.textAlign = "left";
    if (!waiting.length) {
      context.fillStyle = colour("muted");
      context.globalAlpha = 0.8;
      const words = this.numWaiting ? plural(this.numWaiting, "waits", "wait") : this.numWaiting === null ? "" : "nobody waits";
      context.fillText(words, left + 2, top + 17);
      context.globalAlpha = 1;
      return;
    }
    waiting.slice(0, RAIL_ROWS).forEach((ticket, index) => this.waits(context, ticket, top + 6 + index * RAIL_ROW, x, now, left));
    if (waiting.length > RAIL_ROWS) {
      context.fillStyle = colour("muted");
      context.fillText(`and ${Math.max(this.numWaiting, waiting.length) - RAIL_ROWS} more`, left + 26, top + 6 + (RAIL_ROWS + 1) * RAIL_ROW - 2);
    }
  }

  waits(context, ticket, y, x, now, left) {
    const x0 = Math.max(left + 24, x(ticket.waiting.since));
    const x1 = Math.max(x(now), x0 + 4);
    const ink = colour(ticket.waiting.state === "preempted" ? "cut" : "wait");
    context.globalAlpha = this.chosen !== null && this.chosen !== ticket.number ? 0.25 : 1;
    context.strokeStyle = ink;
    context.lineWidth = 2.5;
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(x0, y + RAIL_ROW / 2);
    context.lineTo(x1 - 5, y + RAIL_ROW / 2);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = requestColour(ticket.number);
    context.beginPath();
    context.arc(x1 - 4, y + RAIL_ROW / 2, 3.5, 0, 7);
    context.fill();
    context.globalAlpha = 1;
    this.boxes.push({ ticket, x0: x0 - 2, x1: x1 + 2, y0: y, y1: y + RAIL_ROW });
  }

  point(event) {
    const { offsetX: x, offsetY: y } = event;
    const box = this.boxes.findLast((b) => x >= b.x0 && x <= b.x1 && y >= b.y0 - 1 && y <= b.y1 + 1);
    this.onPoint(box?.ticket ?? null, event);
  }
}

const spanOf = (width) => (width < 480 ? 20 : width < 800 ? 32 : 45);

/** [moment, label]: so long ago. */
function ago(now, span, width) {
  const step = width < 480 ? 5 : 10;
  return Array.from({ length: Math.floor(span / step) + 1 }, (_, i) => [now - i * step, i ? `−${i * step} s` : "now"]);
}

/** 1, 2 or 5 times a power of ten, the nearest above. */
export function round(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= step * 0.999);
}

/** A ticket in words, for the tooltip. */
export function told(ticket, now) {
  const r = ticket.latest;
  const lines = [inertLine(r.id, 48)];
  if (r.tenant) lines.push(`tenant ${inertLine(r.tenant, 40)}, priority ${r.priority}`);
  if (ticket.waiting) lines.push(`${ticket.waiting.state} for ${seconds(now - ticket.waiting.since)}`);
  const stint = ticket.stints.at(-1);
  if (stint) {
    const doing = stint.to === null ? r.phase : stint.end === "preempted" ? "preempted" : "done";
    lines.push(`${doing}: ${r.num_prompt_tokens} prompt + ${r.num_output_tokens} new tokens`);
    if (r.num_cached_tokens) lines.push(`${r.num_cached_tokens} prompt tokens from the cache`);
    if (r.num_blocks) lines.push(plural(r.num_blocks, "KV block", "KV blocks"));
    if (r.num_draft_tokens) lines.push(`${count(r.num_accepted_tokens)} of ${plural(r.num_draft_tokens, "draft", "drafts")} kept`);
    if (r.first_token_at) lines.push(`first token after ${seconds(r.first_token_at - r.arrived_at)}`);
  }
  if (r.num_preemptions) lines.push(plural(r.num_preemptions, "preemption", "preemptions"));
  return lines.join("\n");
}
