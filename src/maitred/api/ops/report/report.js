// A report: what one file tells of a comparison of policies, or of a plan.

import { bestOf, distributions, rowsOf, table, tenantRows, valueOf, verdict } from "./compare.js";
import { $, fill, h, say, showTip } from "./dom.js";
import { inertLine } from "./inert.js";
import { legend, plot, shown, tickOf } from "./plots.js";
import { Timeline, round, told } from "./timeline.js";
import { plural, seconds } from "./words.js";

const MOST_SLOTS = 64; // that are drawn
const data = JSON.parse($("contents").textContent);
data.best = bestOf(data);
const names = data.columns.map(({ name }) => inertLine(name, 24));

/** Shows the card of that id, if there is something to show. */
function show(id, nodes) {
  $(id).hidden = nodes === null;
  if (nodes !== null) fill($(id).querySelector("div, pre"), nodes);
}

/** The same of a plan. */
function planVerdict() {
  const of = (key, column) => shown(valueOf(data, key, column), key.endsWith("mean") ? "s" : "number");
  const size = (column) => `${of("num_devices", column)} devices for ${of("rate", column)} requests/s`;
  const others = names.slice(1).map((name, i) => `${name}: ${size(i + 1)}; a request takes ${of("e2e_s.mean", i + 1)} in the mean, against ${of("e2e_s.mean", 0)}.`);
  return [names.length ? `${names[0]} is best: ${size(0)}.` : "No plan meets the objectives.", ...others, ...data.notes.map((words) => `${words[0].toUpperCase()}${words.slice(1)}.`)];
}

const [conclusion, ...reasons] = data.kind === "plan" ? planVerdict() : verdict(data);
say($("conclusion"), conclusion);
fill($("reasons"), reasons.map((words) => h("p", {}, words)));
say($("kind"), data.kind);
say($("source"), inertLine(data.source, 400));
document.title = `maitred ${data.kind}: ${conclusion}`;
if (names.length > 1 && data.baseline !== undefined) say($("side-note"), `differences are to ${names[data.baseline]}`);
show("side-by-side", names.length ? [table(data, rowsOf(data))] : null);
show("start", data.columns[0]?.figures.commands ? [data.columns[0].figures.commands.join("\n")] : null);
const tenants = tenantRows(data);
show("tenants", tenants.length ? [table(data, tenants)] : null);
show("distributions", names.length ? distributions(data) : null);
const queues = data.columns.map(({ queue }) => queue);
const waited = queues.some((line) => line.some(([, count]) => count > 0));
show("queue", waited ? [legend(names), plot({ title: "", names, series: queues, x: { unit: "s", title: "at" }, y: { unit: "count" } })] : null);
const modes = data.columns.map(({ figures }) => figures.mode);
const points = (data.tried ?? []).map(({ x, mean_e2e_s: y, front, mode, layout, num_devices: devices, rate }) => ({
  x, y, front, column: modes.indexOf(mode), words: `${mode}: ${layout}\n${devices} devices, ${shown(rate, "number")} requests/s\na request takes ${seconds(y)} in the mean`,
}));
const axes = { x: { unit: data.minimised === "devices" ? "count" : "number" }, y: { unit: "s" } };
show("front", points.length ? [legend(names), plot({ title: `mean time of a request by ${data.minimised}`, names, points, ...axes })] : null);
const rejected = Object.entries(data.rejected ?? {}).map(([reason, number]) => h("tr", {}, h("td", {}, String(number)), h("td", {}, inertLine(reason, 200))));
show("rejected", rejected.length ? [h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, rejected)))] : null);

/** A lane for each [from, to], such that no two of a lane are served at once, the lowest free one first. */
export function inLanes(slots) {
  const order = slots.map((_, index) => index).sort((a, b) => slots[a][0] - slots[b][0] || slots[a][1] - slots[b][1] || a - b);
  const [lanes, until] = [[], []];
  for (const index of order) {
    const free = until.findIndex((end) => end <= slots[index][0]);
    lanes[index] = free < 0 ? until.length : free;
    until[lanes[index]] = slots[index][1];
  }
  return lanes;
}

/** The tickets of one column at a moment, as the live page keeps them. */
class Pass {
  constructor(tickets) {
    const lanes = inLanes(tickets.flatMap(({ slots }) => slots));
    this.all = tickets.map((ticket, index) => {
      const [number, latest] = [index + 1, { ...ticket, id: ticket.request_id }];
      const stints = ticket.slots.map(([from, to], place) => {
        const next = ticket.slots[place + 1];
        const moved = next && ticket.moves.some(([a, b]) => a <= next[0] && b >= to);
        const decodeFrom = Math.min(Math.max(from, ticket.first_token_at), to);
        return { seat: lanes.shift(), from, to, decodeFrom, end: !next ? "done" : moved ? "moved" : "preempted" };
      });
      return { ...ticket, number, latest, stints: stints.filter(({ seat }) => seat < MOST_SLOTS), waiting: null };
    });
    this.byId = new Map(this.all.map((ticket) => [ticket.number, ticket]));
    this.now = 0;
  }

  /** Where each request waits at `now`, in order of arrival. */
  at(now) {
    this.now = now;
    let place = 0;
    for (const ticket of this.all) {
      const before = ticket.stints.filter((stint) => stint.from <= now);
      const last = before.at(-1);
      const here = ticket.arrived_at <= now && before.length < ticket.stints.length && !(last && last.to > now);
      ticket.waiting = here ? { since: last?.to ?? ticket.arrived_at, state: last?.end === "preempted" ? "preempted" : "waiting", place: (place += 1) } : null;
    }
    return place;
  }
}

function words(ticket, now) {
  const moved = ticket.moves.map(([from, to]) => `KV handed over in ${seconds(to - from)}`);
  return [told(ticket, now), `waited ${seconds(ticket.scheduled_at - ticket.arrived_at)} for its first slot`, ...moved].join("\n");
}

function passes() {
  const all = data.columns.flatMap(({ tickets }) => tickets);
  const begin = Math.min(...all.map((ticket) => ticket.arrived_at));
  const end = Math.max(...all.map((ticket) => ticket.finished_at));
  let span = Math.min(45, end - begin);
  const spans = [...new Set([end - begin, 45, 15, 5, 1].filter((each) => each <= end - begin))];
  fill($("span"), spans.map((each, index) => h("option", { value: each }, index ? seconds(each) : "all of it")));
  $("span").value = spans.find((each) => each <= 45) ?? spans[0];
  const marks = (now, seen, width) => {
    const step = round(seen / (width < 480 ? 4 : 8));
    const last = Math.floor((now - begin) / step);
    return Array.from({ length: Math.floor(seen / step) + 1 }, (_, i) => (last - i) * step).filter((at) => at >= 0).map((at) => [begin + at, tickOf(at, "s")]);
  };
  const drawn = data.columns.map(({ tickets }, column) => {
    const pass = new Pass([...tickets].sort((a, b) => a.arrived_at - b.arrived_at));
    const canvas = h("canvas", { class: "timeline", role: "img", "aria-label": `Slots over time under ${names[column]}` });
    const slots = Math.max(1, ...pass.all.flatMap((ticket) => ticket.stints.map((stint) => stint.seat + 1)));
    canvas.style.height = `${Math.min(460, 110 + 20 * slots)}px`;
    const onPoint = (ticket, event) => {
      timeline.chosen = ticket?.number ?? null;
      timeline.draw();
      showTip(event, ticket && words(ticket, pass.now));
    };
    const timeline = new Timeline(pass, { isMine: () => false, onPoint, canvas, span: () => span, marks });
    Object.assign(timeline, { offset: 0, stopped: true, leastRows: slots });
    $("lanes").append(h("h3", {}, names[column]), canvas);
    new ResizeObserver(() => timeline.draw()).observe(canvas);
    window.addEventListener("themechange", () => timeline.draw());
    return { pass, timeline };
  });
  const draw = () => {
    const now = begin + ($("moment").value / 1000) * (end - begin);
    span = Number($("span").value);
    say($("until"), seconds(now - begin));
    drawn.forEach(({ pass, timeline }, column) => {
      const queued = queues[column].findLast(([at]) => at <= now)?.[1] ?? null; // those that are not kept, too
      timeline.numWaiting = Math.max(pass.at(now), queued ?? 0) || queued;
      timeline.draw();
    });
  };
  $("moment").addEventListener("input", draw);
  $("span").addEventListener("change", draw);
  $("moment").value = Math.min(1000, (1000 * Number($("span").value)) / (end - begin));
  const most = Math.max(...data.columns.map(({ tickets }) => tickets.length));
  say($("pass-note"), `who sits in which slot: the first ${plural(most, "request", "requests")} that ended; later ones are left out`);
  draw();
}

$("passes").hidden = !data.columns.some(({ tickets }) => tickets.length);
if (!$("passes").hidden) passes();

// Paper is white, whatever the screen is; canvases do not follow the theme by themselves.
const root = document.documentElement.dataset;
let onScreen = root.theme;
function wear(theme) {
  root.theme = theme;
  window.dispatchEvent(new Event("themechange"));
}
window.addEventListener("beforeprint", () => {
  onScreen = root.theme;
  wear("light");
});
window.addEventListener("afterprint", () => wear(onScreen));
