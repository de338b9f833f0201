// The last requests of this server under other terms: asked of the server, which replays them in a process of its own.

import { change, distributions, rowsOf, table, tenantRows, valueOf } from "./compare.js";
import { $, fill, h, say } from "./dom.js";
import { count, plural, seconds } from "./words.js";

const BRIEF = ["slo_attainment", "ttft_s.p50", "ttft_s.p99", "e2e_s.p50", "e2e_s.p99", "queue_s.p99"];
const NUMBERS = ["max_num_seqs", "replicas", "prefill_workers", "minutes"];

export class WhatIf {
  constructor(client) {
    this.client = client;
    this.form = $("whatif").querySelector("form");
    this.said = $("whatif").querySelector(".said");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.replay();
    });
  }

  /** Choices are those of the policies' list. */
  begin(policies) {
    fill(this.form.elements.policy, ["", ...policies].map((name) => h("option", { value: name }, name || "as it is")));
  }

  change() {
    const given = Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value.trim()));
    for (const name of NUMBERS) if (name in given) given[name] = Number(given[name]);
    if (given.slo) given.slo = given.slo.split(/[ ,]+/).filter(Boolean);
    return given;
  }

  async replay() {
    const button = this.form.querySelector("button");
    button.disabled = true;
    say(this.said, "Replaying…");
    try {
      this.show(await this.client.json("admin/whatif", { body: this.change() }));
    } catch (error) {
      say(this.said, error.message);
    }
    button.disabled = false;
  }

  show(data) {
    const [now, then] = [1, 2]; // columns
    const told = [
      ...change(data, "ttft_s.p50", "Half of the first tokens come within", "", then, now, "as it is"),
      ...change(data, "e2e_s.mean", "A request takes", "in the mean", then, now, "as it is"),
    ];
    const truth = `${seconds(valueOf(data, "e2e_s.mean", now))} in the replay as it is, ${seconds(valueOf(data, "e2e_s.mean", 0))} measured`;
    const basis = `${plural(data.num_requests, "request", "requests")} of ${seconds(data.seconds)}; a mean request took ${truth}. ` +
      `The steps' model is ${Math.round(100 * data.step_error)}% off on steps it was not fitted to, of ${count(data.num_steps)}.`;
    const [rows, tenants] = [rowsOf(data), tenantRows(data)];
    const brief = tenants.length ? tenants : rows.filter(({ key }) => BRIEF.includes(key));
    const all = h("details", { class: "as-table" }, h("summary", {}, "All figures and distributions"), table(data, rows), ...distributions(data));
    fill($("whatif").querySelector(".replayed"), [h("p", { class: "told" }, told.join(" ")), h("p", { class: "basis" }, basis), table(data, brief), all]);
    say(this.said, "");
  }
}
