// Percentiles over the last two minutes: first token, between tokens, queue.

import { begin, colour, font } from "./canvas.js";
import { $, h, say } from "./dom.js";
import { seconds } from "./words.js";

const SPAN_S = 120;
const MIN_SPAN_S = 20;
const KINDS = [["first_token", "first token"], ["between_tokens", "between tokens"], ["queue", "in the queue"]];
const LINES = [["p99", 0.35, 1.2], ["p90", 0.6, 1.4], ["p50", 1, 2]];

export class Charts {
  constructor() {
    this.charts = KINDS.map(([key, title]) => this.chart(key, title));
    this.addedAt = -Infinity;
  }

  chart(key, title) {
    const now = h("p", { class: "now", id: `p50-${key}` }, "–");
    const rest = h("p", { class: "rest" });
    const canvas = h("canvas", { role: "img", "aria-label": `Percentiles of the time: ${title}` });
    $("charts").append(h("div", { class: "chart" }, h("h3", {}, title), now, rest, canvas));
    return { key, title, now, rest, canvas, points: [] };
  }

  take(frame) {
    const now = frame.engine.now;
    if (now < this.addedAt) for (const chart of this.charts) chart.points = [];
    if (now - this.addedAt < 1 && now >= this.addedAt) return;
    this.addedAt = now;
    for (const chart of this.charts) {
      const times = frame[chart.key];
      chart.points.push({ at: now, ...times });
      while (chart.points[0].at < now - SPAN_S) chart.points.shift();
      say(chart.now, seconds(times.p50));
      say(chart.rest, times.count ? `${seconds(times.p90)} · ${seconds(times.p99)}` : "no answers yet");
    }
    this.draw();
  }

  draw() {
    for (const chart of this.charts) if (chart.points.length && chart.canvas.clientWidth) this.lines(chart, this.addedAt);
  }

  lines(chart, now) {
    const { context, width, height } = begin(chart.canvas);
    const most = Math.max(1e-4, ...chart.points.map((point) => point.p99 ?? 0)) * 1.1;
    const span = Math.max(MIN_SPAN_S, now - chart.points[0].at); // grows until it is full
    const x = (at) => width - ((now - at) / span) * width;
    const y = (value) => height - 2 - (value / most) * (height - 14);
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(0, height - 1.5);
    context.lineTo(width, height - 1.5);
    context.stroke();
    context.font = font(10);
    context.fillStyle = colour("muted");
    if (chart.points.some((point) => point.count)) context.fillText(seconds(most / 1.1), 0, 9);
    this.band(context, chart.points, x, y);
    for (const [name, alpha, wide] of LINES) this.line(context, chart.points, name, x, y, alpha, wide);
  }

  band(context, points, x, y) {
    const known = points.filter((point) => point.p50 !== null && point.p50 !== undefined);
    if (known.length < 2) return;
    context.beginPath();
    known.forEach((point) => context.lineTo(x(point.at), y(point.p99)));
    known.reverse().forEach((point) => context.lineTo(x(point.at), y(point.p50)));
    context.closePath();
    context.fillStyle = colour("brass");
    context.globalAlpha = 0.12;
    context.fill();
    context.globalAlpha = 1;
  }

  line(context, points, name, x, y, alpha, wide) {
    context.strokeStyle = colour("brass");
    context.globalAlpha = alpha;
    context.lineWidth = wide;
    context.lineJoin = "round";
    context.beginPath();
    let on = false;
    for (const point of points) {
      const known = point[name] !== null && point[name] !== undefined;
      if (known && on) context.lineTo(x(point.at), y(point[name]));
      else if (known) context.moveTo(x(point.at), y(point[name]));
      on = known;
    }
    context.stroke();
    context.globalAlpha = 1;
  }
}
