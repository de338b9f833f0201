// Columns side by side, and what is to be concluded: for reports and for what-if.

import { h } from "./dom.js";
import { inertLine } from "./inert.js";
import { legend, plot, sample, shown } from "./plots.js";
import { seconds } from "./words.js";

const CLEAR = 0.01; // relative difference from which on one is better
const TIMES = [["ttft_s", "First token (TTFT)"], ["itl_s", "Between tokens (ITL)"], ["tpot_s", "Mean gap of a request (TPOT)"], ["e2e_s", "Whole request (E2E)"], ["queue_s", "In the queue"]];
const SHARES = [["mean", "mean"], ["p50", "half within"], ["p90", "90% within"], ["p99", "99% within"], ["max", "longest"]];
const OVERALL = [ // figure, label, unit, which is better; those that not all columns have are left out
  ["num_devices", "devices", "count", "low"],
  ["rate", "requests a second", "number", "high"],
  ["slo_attainment", "met all objectives", "share", "high"],
  ["attainment", "met all objectives", "share", "high"],
  ["goodput_rps", "good requests a second", "number", "high"],
  ["jain", "fairness (Jain's index)", "number", "high"],
  ["num_finished", "finished", "count", ""],
  ["failed", "failed", "count", "low"],
  ["num_preemptions", "preemptions", "count", "low"],
  ["num_cached_tokens", "prompt tokens from the cache", "count", "high"],
  ["utilisation", "engines busy", "share", ""],
  ["load_max_over_mean", "fullest over mean replica", "number", "low"],
  ["replica_s", "seconds of all replicas", "count", "low"],
  ["num_starts", "replicas started", "count", "low"],
  ["mean_rows", "requests in a step", "number", ""],
  ["kv_waste", "KV memory wasted", "share", "low"],
  ["tokens_per_s_per_device", "answer tokens/s of a device", "count", "high"],
  ["watts_per_device", "watts of a device", "count", "low"],
  ["joules_per_token", "joules of a token", "number", "low"],
  ["price_per_hour", "price of an hour", "number", "low"],
  ["cost_per_million_tokens", "price of a million tokens", "number", "low"],
];

/** A figure by its key, `e2e_s.mean`; those by cause are added up. */
function figure(figures, key) {
  const value = key.split(".").reduce((part, name) => part?.[name], figures) ?? null;
  return value !== null && typeof value === "object" ? Object.values(value).reduce((sum, each) => sum + each, 0) : value;
}

export const valueOf = (data, key, column) => figure(data.columns[column].figures, key);

/** Measures that all columns have; gaps of a request in the mean only where not every gap is known. */
function timesOf(data) {
  const known = TIMES.filter(([key]) => data.columns.every((_, column) => valueOf(data, `${key}.mean`, column) !== null));
  return known.filter(([key]) => key !== "tpot_s" || !known.some(([other]) => other === "itl_s"));
}

/** Rows of all figures: {group, key, label, unit, better, values}. */
export function rowsOf(data) {
  const row = (group, key, label, unit, better) => ({ group, key, label, unit, better, values: data.columns.map((_, column) => valueOf(data, key, column)) });
  const inAll = OVERALL.filter(([key]) => data.columns.every(({ figures }) => key in figures));
  const overall = inAll.map(([key, ...words]) => row("All requests", key, ...words)).filter(({ values }) => values.some((value) => value !== null));
  return [...overall, ...timesOf(data).flatMap(([key, title]) => SHARES.map(([share, label]) => row(title, `${key}.${share}`, label, "s", "low")))];
}

/** Some rows for each tenant, where there are several. */
export function tenantRows(data) {
  const names = [...new Set(data.columns.flatMap(({ figures }) => Object.keys(figures.tenants ?? {})))].sort();
  const asked = [["ttft_s.p50", "first token, half within", "s", "low"], ["ttft_s.p99", "first token, 99% within", "s", "low"], ["e2e_s.p50", "whole request, half within", "s", "low"], ["e2e_s.p99", "whole request, 99% within", "s", "low"], ["slo_attainment", "met all objectives", "share", "high"]];
  const values = (name, key) => data.columns.map(({ figures }) => figure(figures.tenants[name], key));
  return names.length < 2 ? [] : names.flatMap((name) => asked.map(([key, label, unit, better]) => ({ group: name, key, label, unit, better, values: values(name, key) })));
}

/** The column with most good requests, then the shortest mean request; null where none is clearly better. A plan has
 * its best first. */
export function bestOf(data) {
  if (data.columns.length < 2) return null;
  if (data.kind === "plan") return 0;
  const better = (one, other) => {
    const met = valueOf(data, "slo_attainment", one) - valueOf(data, "slo_attainment", other);
    return Math.abs(met) > CLEAR ? met > 0 : valueOf(data, "e2e_s.mean", one) < (1 - CLEAR) * valueOf(data, "e2e_s.mean", other);
  };
  const all = data.columns.map((_, column) => column);
  return all.find((one) => all.every((other) => other === one || better(one, other))) ?? null;
}

/** A table of `rows`, groups of them under headings; differences are to the baseline column. */
export function table(data, rows) {
  const cells = data.columns.map(({ name, figures: { layout } }, column) => h("th", { scope: "col", class: column === data.best ? "best" : "" },
    h("span", { class: "name" }, sample(column), inertLine(name, 40)), column === data.best ? h("b", { class: "badge" }, "best") : "",
    layout ? h("small", {}, inertLine(layout, 200)) : ""));
  const body = [];
  let group = null;
  for (const row of rows) {
    if (row.group !== group) body.push(h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: data.columns.length + 1 }, inertLine(row.group, 60))));
    group = row.group;
    body.push(h("tr", {}, h("th", { scope: "row" }, row.label), row.values.map((_, column) => cell(data, row, column))));
  }
  const top = h("thead", {}, h("tr", {}, h("td"), cells));
  const node = h("table", { class: "compare" }, top, h("tbody", {}, body));
  if (data.baseline === undefined) node.classList.add("plain"); // no differences
  node.style.minWidth = `${7.6 + 5.4 * data.columns.length}em`; // narrower pages scroll it
  return h("div", { class: "scroll" }, node);
}

function cell(data, row, column) {
  const value = row.values[column];
  const base = row.values[data.baseline] ?? null;
  const compared = column > data.baseline && typeof value === "number" && typeof base === "number";
  return h("td", { class: column === data.best ? "best" : "" }, shown(value, row.unit), compared ? difference(value, base, row) : "");
}

/** In percent, or in percentage points of a share; coloured where one direction is better. */
export function difference(value, base, { unit, better }) {
  const change = unit === "share" ? value - base : base === 0 ? NaN : value / base - 1;
  if (!(Math.abs(change) >= CLEAR / 2)) return "";
  const good = better === "" ? "" : (change < 0) === (better === "low") ? "good" : "bad";
  const size = Math.abs(100 * change);
  const sign = change < 0 ? "−" : "+";
  return h("small", { class: `change ${good}` }, size > 999 ? `×${(value / base).toFixed(0)}` : `${sign}${size.toFixed(size < 9.95 ? 1 : 0)}${unit === "share" ? " pt" : "%"}`);
}

/** Distributions of every measure that some column has. */
export function distributions(data) {
  const names = data.columns.map(({ name }) => inertLine(name, 24));
  const axes = { x: { unit: "s", log: true, title: "within" }, y: { unit: "share", most: 1 } };
  const drawn = timesOf(data).map(([key, title]) => plot({ title, names, series: data.columns.map(({ curves }) => curves[key]), steps: true, ...axes }));
  return [legend(names), h("div", { class: "plots" }, drawn)];
}

/** Sentences, the conclusion first. */
export function verdict(data) {
  const names = data.columns.map(({ name }) => inertLine(name, 40));
  const of = (key, column) => valueOf(data, key, column);
  const met = (column) => shown(of("slo_attainment", column), "share");
  if (names.length < 2) return [`${names[0]}: ${met(0)} of the requests met all objectives.`, `A request takes ${seconds(of("e2e_s.mean", 0))} in the mean.`];
  if (data.best === null) return ["No column is clearly better.", "Objectives met and the mean time of a request are within 1% of each other."];
  const rest = names.map((_, column) => column).filter((column) => column !== data.best);
  const other = data.best ? 0 : rest.reduce((a, b) => (of("e2e_s.mean", b) < of("e2e_s.mean", a) ? b : a));
  const told = [`${names[data.best]} serves this load best.`];
  const [one, two] = [data.best, other].map((column) => of("slo_attainment", column));
  if (Math.abs(one - two) > CLEAR) told.push(`${met(data.best)} of the requests met all objectives, under ${names[other]} ${met(other)}.`);
  told.push(...change(data, "e2e_s.mean", "A request takes", "in the mean", data.best, other, `under ${names[other]}`));
  if (of("ttft_s.max", data.best) > (1 + CLEAR) * of("ttft_s.max", other)) {
    told.push(...change(data, "ttft_s.max", "The price: the longest wait for a first token is", "", data.best, other, `under ${names[other]}`));
  }
  return told;
}

/** One sentence about a figure of two columns, or none where one lacks it. */
export function change(data, key, begin, end, one, other, against) {
  const [value, base] = [valueOf(data, key, one), valueOf(data, key, other)];
  if (value === null || !base) return [];
  const [percent, times] = [Math.round(100 * (value / base - 1)), Math.max(value / base, base / value)];
  const much = times > 10 ? `${Math.round(times)} times` : `${Math.abs(percent)}%`;
  const than = percent ? `${much} ${percent < 0 ? "less" : "more"} than` : "as";
  return [`${begin} ${seconds(value)}${end ? ` ${end}` : ""}, ${than} ${against} (${seconds(base)}).`];
}
