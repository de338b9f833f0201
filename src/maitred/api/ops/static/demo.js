// `maitred demo`: buttons that strike workers, change loads and the policy, and put the fleet to sleep.

import { $, fillRows, h, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { count, plural, seconds } from "./words.js";

const HOLD_MS = 6000; // so long a sentence stands

export class Demo {
  constructor(client) {
    this.client = client;
    $("demo-policy").addEventListener("change", () => this.act("policy", $("demo-policy").value));
    $("demo-sleep").addEventListener("click", () => this.act($("demo-sleep").dataset.act));
  }

  /** With each frame of the fleet. */
  async take(fleet) {
    this.fleet = fleet;
    $("demo").hidden = false;
    try {
      this.show(await this.client.json("admin/demo"));
    } catch { /* the fleet's own feed tells of a router that is gone */ }
  }

  async act(act, name = null) {
    say($("demo-said"), "");
    try {
      this.show(await this.client.json("admin/demo", { body: { act, name } }));
      say($("demo-said"), SAID[act](name));
    } catch (error) {
      say($("demo-said"), error.message);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => say($("demo-said"), ""), HOLD_MS);
  }

  show(view) {
    const select = $("demo-policy");
    if (select.options.length !== view.policies.length)
      select.replaceChildren(...view.policies.map((name) => h("option", { value: name }, name)));
    if (document.activeElement !== select) select.value = view.policy;
    $("demo-sleep").dataset.act = view.is_asleep ? "wake" : "sleep";
    say($("demo-sleep"), view.is_asleep ? "Wake the fleet" : "Put the fleet to sleep");
    const workers = (this.fleet?.replicas ?? []).map((replica) => this.worker(replica, view));
    fillRows($("demo-workers"), ["worker", "role", "state", ""], workers);
    fillRows($("demo-loads"), ["tenant", "load", "", "in flight", "answered", "failed", "first token"], view.loads.map((load) => this.load(load)));
    const failed = view.loads.reduce((sum, load) => sum + load.num_failed, 0);
    const done = view.loads.reduce((sum, load) => sum + load.num_done, 0);
    say($("demo-note"), `${plural(done, "answer", "answers")}, ${failed ? count(failed) : "none"} failed`);
  }

  worker(replica, view) {
    const isFrozen = view.frozen.includes(replica.name);
    const cold = replica.pid === null;
    return [replica.name, [
      h("b", {}, inertLine(replica.name, 32)),
      view.roles[replica.name] ?? "–",
      isFrozen ? "frozen" : view.is_asleep && replica.state === "ready" ? "asleep" : replica.state,
      h("span", { class: "acts" },
        this.button("Kill", "kill", replica.name, cold),
        isFrozen ? this.button("Thaw", "thaw", replica.name, cold) : this.button("Freeze", "freeze", replica.name, cold)),
    ]];
  }

  load(load) {
    return [load.tenant, [
      h("b", {}, inertLine(load.tenant, 32)),
      load.times ? `${load.rate} /s` : "none",
      h("span", { class: "acts" }, this.button("Less", "less", load.tenant, !load.times), this.button("More", "more", load.tenant)),
      count(load.num_in_flight),
      count(load.num_done),
      h("span", { title: load.error ?? "" }, count(load.num_failed)),
      load.ttft_s === null ? "–" : seconds(load.ttft_s),
    ]];
  }

  button(words, act, name, disabled = false) {
    const button = h("button", { type: "button", class: "quiet", "aria-label": `${words} ${name}`, onclick: () => this.act(act, name) }, words);
    button.disabled = disabled;
    return button;
  }
}

const SAID = {
  kill: (name) => `${name} was killed (SIGKILL). Its answers go on with another worker, and it starts again.`,
  freeze: (name) => `${name} was frozen (SIGSTOP). After 2.25 s of silence its answers go on elsewhere.`,
  thaw: (name) => `${name} goes on.`,
  policy: (name) => `From now on by ${name}, at the router and in every worker.`,
  more: (name) => `${name} sends more.`,
  less: (name) => `${name} sends less.`,
  sleep: () => "The engines have ended and their memory is free. A message in the chat wakes one; the button wakes all.",
  wake: () => "Every engine is there again.",
};
