// The numbers on top, and how fast tokens leave: rates out of counters that only grow.

import { begin, colour } from "./canvas.js";
import { $, h, say } from "./dom.js";
import { count, percent, seconds, short } from "./words.js";

const WINDOW_S = 2; // that a rate is taken over
const HISTORY = 90;

/** Figures in a row, each with its unit and a level from 0 to 100. */
export class Tiles {
  /** `titles` by key. */
  constructor(list, titles) {
    this.tiles = Object.fromEntries(Object.entries(titles).map(([key, title]) => [key, tile(key, title)]));
    list.append(...Object.values(this.tiles).map((each) => each.node));
  }

  node(key) {
    return this.tiles[key].node;
  }

  set(key, value, unit = "", level = null) {
    const tile = this.tiles[key];
    say(tile.value, value);
    say(tile.unit, unit);
    if (level !== null) tile.level.style.width = `${Math.min(100, level)}%`;
  }
}

function tile(key, title) {
  const value = h("span", { id: `stat-${key}` }, "–");
  const [unit, level] = [h("small"), h("i", { class: "level" })];
  return { node: h("div", {}, h("dt", {}, title), h("dd", {}, value, " ", unit), level), value, unit, level };
}

export class Stats {
  constructor() {
    this.seen = []; // {now, counters, execute_s, host_s} of the last seconds
    this.rates = []; // tokens/s, for the little chart
    this.tiles = new Tiles($("stats"), {
      rate: "new tokens/s", batch: "in the batch", waiting: "waiting", kv: "KV in use", prefix: "cache hits", step: "a step takes", drafts: "drafts kept",
    });
    this.chart = h("canvas", { "aria-hidden": "true" });
    this.tiles.node("rate").append(this.chart);
  }

  take(frame) {
    const engine = frame.engine;
    if (this.seen.length && engine.now < this.seen.at(-1).now) this.seen = [];
    this.seen.push(engine);
    while (this.seen.length > 2 && this.seen[1].now < engine.now - WINDOW_S) this.seen.shift();
    const [before, time] = [this.seen[0], engine.now - this.seen[0].now];
    const grown = (name) => engine.counters[name] - before.counters[name];
    const rate = time > 0 ? grown("num_generated_tokens") / time : 0;
    this.rates.push(rate);
    if (this.rates.length > HISTORY) this.rates.shift();
    this.tiles.set("rate", rate && rate < 10 ? rate.toFixed(1) : short(rate));
    this.tiles.set("batch", count(engine.num_running), `of ${engine.max_num_seqs}`, percent(engine.num_running, engine.max_num_seqs));
    this.tiles.set("waiting", count(engine.num_waiting));
    const used = percent(engine.blocks.num_used, engine.blocks.num_blocks);
    this.tiles.set("kv", used < 10 && used > 0 ? used.toFixed(1) : used.toFixed(0), "%", used);
    const asked = engine.counters.num_prefix_queried_tokens;
    const hits = percent(engine.counters.num_prefix_hit_tokens, asked);
    this.tiles.set("prefix", asked ? hits.toFixed(0) : "–", asked ? "%" : "", hits);
    const steps = grown("num_steps");
    const spent = engine.execute_s + engine.host_s - before.execute_s - before.host_s;
    this.tiles.set("step", steps ? seconds(spent / steps) : "–");
    const drafted = grown("num_draft_tokens");
    const kept = percent(grown("num_accepted_tokens"), drafted);
    this.tiles.set("drafts", drafted ? kept.toFixed(0) : "–", drafted ? "%" : "", kept);
    this.draw();
  }

  draw() {
    if (!this.chart.clientWidth) return;
    const { context, width, height } = begin(this.chart);
    const most = Math.max(1, ...this.rates);
    context.beginPath();
    context.moveTo(width, height);
    this.rates.forEach((rate, index) => {
      const x = width - ((this.rates.length - 1 - index) * width) / (HISTORY - 1);
      if (index === 0) context.lineTo(x, height);
      context.lineTo(x, height - (rate / most) * (height - 3));
    });
    context.lineTo(width, height);
    context.closePath();
    context.fillStyle = colour("brass");
    context.globalAlpha = 0.28;
    context.fill();
  }
}
