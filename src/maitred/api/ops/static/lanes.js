// Tensor models: their versions and states where they are all there is, and lanes: what waits, what runs, and why.

import { $, h, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { plural, seconds } from "./words.js";

const SHOWN = 12;

export class Lanes {
  constructor() {
    this.rows = [];
    this.more = h("li", { class: "why" });
  }

  take(frame) {
    const lanes = [...frame.engine.lanes].sort((a, b) => load(b) - load(a) || b.rows_per_s - a.rows_per_s);
    $("lanes-card").hidden = !lanes.length;
    const shown = lanes.slice(0, SHOWN);
    while (this.rows.length < shown.length) this.rows.push(row());
    shown.forEach((lane, place) => fill(this.rows[place], lane));
    say(this.more, lanes.length > shown.length ? `and ${lanes.length - shown.length} more` : "");
    const nodes = this.rows.slice(0, shown.length).map((parts) => parts.node);
    if (lanes.length > shown.length) nodes.push(this.more);
    if (nodes.length !== $("lanes").childElementCount) $("lanes").replaceChildren(...nodes);
  }
}

const AGAIN_MS = 3000;
const HEAD = ["model", "version", "state"];

/** What a server without a language model serves; whoever may ask it may see this. */
export class TensorModels {
  constructor(client) {
    this.client = client;
    this.timer = null;
  }

  async begin() {
    clearTimeout(this.timer);
    this.show(await this.client.json("v2/repository/index", { body: {} }));
    this.again();
  }

  /** What fails is told by the feed. */
  again() {
    const look = () => (document.hidden ? this.again() : this.begin().catch(() => this.again()));
    this.timer = setTimeout(look, AGAIN_MS);
  }

  show(index) {
    const ready = index.filter(({ state }) => state === "READY").length;
    say($("models-note"), `${ready} of ${plural(index.length, "version", "versions")} ready`);
    const head = h("tr", {}, ...HEAD.map((title) => h("th", {}, title)));
    const rows = index.map(({ name, version, state, reason }) => h("tr", {},
      h("td", {}, h("b", {}, inertLine(name, 60))),
      h("td", {}, version ?? "–"),
      h("td", {}, state ?? "NOT LOADED", reason ? h("p", { class: "why" }, inertLine(reason, 300)) : "")));
    $("tensor-models").replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }
}

function load(lane) {
  return lane.num_waiting_rows + lane.num_running_rows;
}

function fill(parts, lane) {
  say(parts.name, inertLine([lane.model, lane.version, lane.bucket].filter(Boolean).join(" "), 40));
  const waiting = `${plural(lane.num_waiting, "waits", "wait")} (${plural(lane.num_waiting_rows, "row", "rows")})`;
  say(parts.who, `${waiting} · ${plural(lane.num_running_rows, "row runs", "rows run")} · ${lane.rows_per_s.toFixed(1)} rows/s`);
  say(parts.age, lane.num_waiting ? seconds(lane.age_s) : "");
  say(parts.why, lane.reason);
}

function row() {
  const [name, who, age, why] = [h("b"), h("span", { class: "who" }), h("span", { class: "age" }), h("p", { class: "why" })];
  return { node: h("li", {}, h("div", { class: "line" }, name, who, age), why), name, who, age, why };
}
