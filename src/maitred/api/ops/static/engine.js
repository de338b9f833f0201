// The live view as a whole: one frame goes to every panel; drawings move on between frames.

import { BlockMap } from "./blocks.js";
import { Charts } from "./charts.js";
import { $, h, showTip } from "./dom.js";
import { inertLine } from "./inert.js";
import { Lanes } from "./lanes.js";
import { Queue } from "./queue.js";
import { Stats } from "./stats.js";
import { Tenants } from "./tenants.js";
import { Tickets } from "./tickets.js";
import { Timeline, told } from "./timeline.js";

const DESCRIBE_MS = 5000;
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

export class Engine {
  constructor() {
    this.mine = new Set(); // ids of this page's own answers
    const tickets = new Tickets();
    const isMine = (id) => [...this.mine].some((ours) => id.includes(ours));
    const onPoint = (ticket, event, words) => this.point(ticket, event, words);
    this.timeline = new Timeline(tickets, { isMine, onPoint });
    this.blocks = new BlockMap(tickets, { onPoint });
    this.panels = [tickets, new Stats(), this.timeline, this.blocks, new Queue(tickets), new Lanes(), new Charts(), new Tenants()];
    this.tickets = tickets;
    this.isMine = isMine;
    this.frame = null;
    this.describedAt = -Infinity;
    window.addEventListener("themechange", () => this.draw());
    new ResizeObserver(() => this.draw()).observe($("engine")); // of the window, or shown after it was hidden
    const turn = () => {
      if (!calm.matches && this.canDraw()) this.timeline.draw();
      requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
  }

  /** Without frames time stands still, and the picture fades. */
  setLive(live) {
    this.timeline.stopped = !live;
    $("engine").classList.toggle("stale", !live);
  }

  addMine(id) {
    this.mine.add(id);
    if (this.mine.size > 50) this.mine.delete(this.mine.values().next().value);
  }

  take(frame) {
    this.frame = frame;
    for (const panel of this.panels) panel.take(frame);
    this.blocks.draw();
    if (calm.matches) this.timeline.draw();
    if (performance.now() - this.describedAt > DESCRIBE_MS) {
      this.describedAt = performance.now();
      this.timeline.describe();
      this.blocks.describe();
    }
    if (document.querySelector(".as-table").open) this.table(frame);
  }

  canDraw() {
    return !document.hidden && this.frame !== null;
  }

  /** Everything, whether a frame came or not. */
  draw() {
    if (this.canDraw()) for (const panel of this.panels) panel.draw?.();
  }

  /** What the pointer is on stands out, here and there, and says what it is. */
  point(ticket, event, words = null) {
    const chosen = ticket?.number ?? null;
    if (chosen !== this.timeline.chosen) {
      this.timeline.chosen = this.blocks.chosen = chosen;
      this.blocks.draw();
      this.timeline.draw();
    }
    showTip(event, ticket ? told(ticket, this.tickets.now) : words);
  }

  table(frame) {
    const head = ["slot", "request", "tenant", "phase", "prompt", "new", "most", "blocks", "drafts", "kept", "preempted"];
    const rows = frame.engine.running.map((r, index) => [
      frame.seats[index] + 1, this.isMine(r.id) ? "yours" : inertLine(r.id, 28), inertLine(r.tenant || "–", 20), r.phase,
      r.num_prompt_tokens, r.num_output_tokens, r.max_tokens, r.num_blocks, r.num_draft_tokens, r.num_accepted_tokens,
      r.num_preemptions,
    ]);
    rows.sort((a, b) => a[0] - b[0]);
    const cells = (values, tag) => h("tr", {}, ...values.map((value) => h(tag, {}, String(value))));
    $("seats").replaceChildren(h("table", {}, h("thead", {}, cells(head, "th")), h("tbody", {}, ...rows.map((row) => cells(row, "td")))));
  }
}
