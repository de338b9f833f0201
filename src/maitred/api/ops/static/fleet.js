// A router's replicas: who is there, how busy each is, and how many requests are held until one has room.

import { $, fillRows, h, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { Tiles } from "./stats.js";
import { bytes, count, percent, plural, seconds } from "./words.js";

const HEAD = ["replica", "state", "in flight", "prefix keys", "tier", "models", "pid"];

const MODELS_HEAD = ["model", "state", "memory", "in flight", "waiting", "put out", ""];

export class Fleet {
  constructor(client) {
    this.client = client;
    this.tiles = new Tiles($("fleet-stats"), {
      ready: "ready", busy: "in flight", held: "held", oldest: "the oldest for", keys: "prefix keys", even: "load ratio",
    });
  }

  setLive(live) {
    $("fleet").classList.toggle("stale", !live);
  }

  /** `view` is of GET /admin/fleet. */
  take(view) {
    const all = view.replicas;
    const ready = all.filter((replica) => replica.state === "ready");
    const [busy, slots] = [sum(all, "in_flight"), sum(ready, "slots")];
    this.tiles.set("ready", count(ready.length), `of ${count(view.target || all.length)}`);
    this.tiles.set("busy", count(busy), `of ${count(slots)}`, percent(busy, slots));
    this.tiles.set("held", count(view.held));
    this.tiles.set("oldest", view.held ? seconds(view.oldest_held_s) : "–");
    this.tiles.set("keys", count(sum(all, "prefix_keys")));
    const most = Math.max(0, ...ready.map((replica) => replica.in_flight));
    const inReady = sum(ready, "in_flight");
    this.tiles.set("even", inReady ? ((most * ready.length) / inReady).toFixed(1) : "–");
    say($("replicas-note"), all.length ? plural(all.length, "replica", "replicas") : "none yet: requests are held");
    const head = h("tr", {}, ...HEAD.map((title) => h("th", {}, title)));
    $("replicas").replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, all.map(row))));
    this.takeModels(view.models ?? []);
  }

  /** Several models of which some are in memory; a button loads one or puts it out. */
  takeModels(models) {
    $("swaps").hidden = !models.length;
    const there = models.filter((model) => model.state !== "unloaded");
    say($("swaps-note"), `${there.length} of ${models.length} in memory, ${bytes(sum(there, "memory_bytes"))}`);
    fillRows($("swap-rows"), MODELS_HEAD, models.map((model) => this.modelRow(model)));
  }

  modelRow(model) {
    const isOut = model.state === "unloaded";
    const button = h("button", { type: "button", class: "quiet" }, isOut ? "Load" : "Unload");
    button.addEventListener("click", () => this.order(isOut ? "load" : "unload", model.name));
    const why = model.error ? h("p", { class: "why" }, inertLine(model.error, 200)) : "";
    const names = [model.name, ...model.aliases].join(", ");
    return [model.name, [
      [h("b", {}, inertLine(names, 60)), model.pinned ? " (pinned)" : ""],
      [h("span", { class: `standing ${model.state}` }, model.state), why],
      [bytes(model.memory_bytes)],
      [count(model.in_flight)],
      [count(model.waiting)],
      [model.expires_in_s === null ? "–" : `in ${seconds(model.expires_in_s)}`],
      [button],
    ]];
  }

  async order(what, model) {
    try {
      await this.client.json(`admin/models/${what}`, { body: { model } });
      say($("swaps-said"), "");
    } catch (error) {
      say($("swaps-said"), error.message);
    }
  }
}

function row(replica) {
  const state = replica.kind === "foreign" ? `${replica.state} (foreign)` : replica.state;
  const why = replica.error ? h("p", { class: "why" }, inertLine(replica.error, 200)) : "";
  const level = h("i");
  level.style.width = `${Math.min(100, percent(replica.in_flight, replica.slots))}%`;
  const cells = [
    [h("b", { title: replica.url }, inertLine(replica.name, 48))],
    [h("span", { class: `standing ${replica.state}` }, state), why],
    [`${count(replica.in_flight)} of ${count(replica.slots)}`, h("div", { class: "track" }, level)],
    [count(replica.prefix_keys)],
    [inertLine(replica.tier || "–", 24)],
    [inertLine(replica.models.join(", ") || "–", 60)],
    [String(replica.pid ?? "–")],
  ];
  return h("tr", {}, cells.map((cell) => h("td", {}, cell)));
}

function sum(all, field) {
  return all.reduce((total, each) => total + each[field], 0);
}
