// Lines and points on axes, which answer to the pointer: distributions, queues, fronts. SVG, so that it prints sharp.

import { requestColour } from "./canvas.js";
import { h, showTip } from "./dom.js";
import { round } from "./timeline.js";
import { count, seconds } from "./words.js";

const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [46, 12, 8, 24, 210];

/** A value in its unit: s, share, count, number or text. */
export function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "s") return value === 0 ? "0" : seconds(value);
  if (unit === "share") return `${(100 * value).toFixed(value > 0.9995 || value === 0 ? 0 : 1)}%`;
  if (unit === "count") return count(value);
  if (unit === "text") return value;
  return Math.abs(value) >= 100 ? count(value) : Number(value.toPrecision(3)).toString();
}

/** A round value on an axis. */
export function tickOf(value, unit) {
  if (unit === "share") return `${Math.round(100 * value)}%`;
  if (unit !== "s" || value === 0) return shown(value, unit === "s" ? "" : unit);
  return value < 0.9995 ? `${Number((value * 1000).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
}

export const inkOf = (column) => requestColour(column + 1);

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A stretch of the line by which a column is known. */
export function sample(column) {
  const line = svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: inkOf(column), "stroke-width": 2.5, "stroke-dasharray": DASHES[column % 4] });
  return svg("svg", { width: 22, height: 10, class: "sample", "aria-hidden": "true" }, line);
}

export function legend(names) {
  return h("ul", { class: "legend" }, names.map((name, column) => h("li", {}, sample(column), name)));
}

/** A plot that is drawn anew for another width or theme. `series` are lists of [x, y], one for each of `names`; an axis
 * is {unit, log, title, least, most}. With `points`, which are {x, y, column, words, front}, these are drawn in place of lines. */
export function plot({ title, names, series = [], points = [], x, y, steps = false }) {
  const box = h("div", { class: "canvas" });
  const node = h("figure", { class: "plot" }, h("figcaption", {}, title), box);
  const all = [...series.flat(), ...points.map((point) => [point.x, point.y])];
  const axes = [x, y].map((each, index) => axis(all.map((pair) => pair[index]), points.length ? { ...each, ...around(all.map((pair) => pair[index])) } : each));
  const draw = () => {
    const width = box.clientWidth || 460;
    const place = { x: (v) => LEFT + axes[0].place(v) * (width - LEFT - RIGHT), y: (v) => HEIGHT - BOTTOM - axes[1].place(v) * (HEIGHT - TOP - BOTTOM) };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title });
    frame(picture, place, axes, width, [x, y]);
    series.forEach((line, column) => line.length && picture.append(curve(line, column, place, steps)));
    points.forEach((point) => picture.append(dot(point, place)));
    const cross = svg("g", { class: "cross" });
    picture.append(cross);
    const at = (event) => axes[0].value((event.offsetX - LEFT) / (width - LEFT - RIGHT));
    const look = (event) => {
      const told = points.length ? nearest(points, event, place, cross) : values(series, names, at(event), place, cross, [x, y]);
      showTip(event, told);
    };
    for (const kind of ["pointermove", "pointerdown"]) picture.addEventListener(kind, look);
    picture.addEventListener("pointerleave", () => {
      cross.replaceChildren();
      showTip(null, null);
    });
    box.replaceChildren(picture);
  };
  new ResizeObserver(draw).observe(box);
  window.addEventListener("themechange", draw);
  return node;
}

/** Room about points. */
function around(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.15 * (high - low) || 0.3 * high;
  return { least: Math.max(0, low - room), most: high + room };
}

/** From 0 to the largest value, or whole decades of what is over 0. */
function axis(values, { log = false, least = 0, most = null, unit }) {
  if (!log) {
    const high = most ?? Math.max(least + 1e-9, ...values);
    const step = Math.max(unit === "count" ? 1 : 0, round((high - least) / 5));
    const first = Math.ceil(least / step - 1e-9);
    const ticks = Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
    return { place: (v) => (v - least) / (high - least), value: (share) => least + share * (high - least), ticks };
  }
  const over = values.filter((value) => value > 1e-6);
  const low = -round125(-1, Math.min(1e3, ...over));
  const high = Math.max(low + 0.3, round125(1, Math.max(1e-6, ...over)));
  const all = Array.from({ length: 40 }, (_, i) => [1, 2, 5].map((factor) => factor * 10 ** (i - 8))).flat();
  const inside = all.filter((tick) => Math.log10(tick) > low - 1e-6 && Math.log10(tick) < high + 1e-6);
  const ticks = inside.length <= 7 ? inside : inside.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-6);
  return { place: (v) => Math.max(0, (Math.log10(Math.max(v, 1e-12)) - low) / (high - low)), value: (share) => 10 ** (low + share * (high - low)), ticks };
}

/** The logarithm of the next of 1, 2, 5, 10 ..., up or (negated) down. */
function round125(sign, value) {
  const log = Math.log10(value);
  const steps = [0, Math.log10(2), Math.log10(5), 1].map((step) => Math.floor(log) + step);
  return sign > 0 ? steps.find((step) => step >= log - 1e-6) : -steps.findLast((step) => step <= log + 1e-6);
}

function frame(picture, place, axes, width, [x, y]) {
  const far = [width - RIGHT, HEIGHT - BOTTOM];
  axes[0].ticks.forEach((tick) => {
    const at = place.x(tick).toFixed(1);
    const anchor = at > far[0] - 14 ? "end" : "middle";
    picture.append(svg("line", { x1: at, x2: at, y1: TOP, y2: far[1], class: "grid" }), svg("text", { x: at, y: far[1] + 15, "text-anchor": anchor }, tickOf(tick, x.unit)));
  });
  axes[1].ticks.forEach((tick) => {
    const at = place.y(tick).toFixed(1);
    picture.append(svg("line", { x1: LEFT, x2: far[0], y1: at, y2: at, class: "grid" }), svg("text", { x: LEFT - 6, y: Number(at) + 4, "text-anchor": "end" }, tickOf(tick, y.unit)));
  });
}

function curve(points, column, place, steps) {
  const places = points.map(([x, y]) => [place.x(x).toFixed(1), place.y(y).toFixed(1)]);
  const first = steps ? place.y(0).toFixed(1) : places[0][1];
  const path = `M${places[0][0]},${first}${places.map(([x, y]) => (steps ? `H${x}V${y}` : `L${x},${y}`)).join("")}`;
  return svg("path", { d: path, fill: "none", stroke: inkOf(column), "stroke-width": 2, "stroke-dasharray": DASHES[column % 4], "stroke-linejoin": "round" });
}

function dot({ x, y, column, front }, place) {
  return svg("circle", { cx: place.x(x), cy: place.y(y), r: front ? 6 : 4, fill: inkOf(column), "fill-opacity": front ? 1 : 0.35, class: front ? "front" : null });
}

/** Each line's value at `x`: the last one that is not behind it. */
function values(series, names, x, place, cross, [xAxis, yAxis]) {
  const lines = series.map((line) => line.findLast(([at]) => at <= x)?.[1] ?? (line.length ? 0 : null));
  const at = place.x(x);
  if (!(x >= 0) || at < LEFT) return null;
  const dots = lines.flatMap((y, column) => (y === null ? [] : [svg("circle", { cx: at, cy: place.y(y), r: 3.5, fill: inkOf(column) })]));
  cross.replaceChildren(svg("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots);
  const told = lines.map((y, column) => `${names[column]}: ${shown(y, yAxis.unit)}`);
  return [`${xAxis.title} ${shown(x, xAxis.unit)}`, ...told].join("\n");
}

function nearest(points, event, place, cross) {
  const off = (point) => Math.hypot(place.x(point.x) - event.offsetX, place.y(point.y) - event.offsetY);
  const found = points.reduce((one, other) => (off(other) < off(one) ? other : one));
  cross.replaceChildren();
  if (off(found) > 30) return null;
  cross.append(svg("circle", { cx: place.x(found.x), cy: place.y(found.y), r: 9, class: "ring" }));
  return found.words;
}
