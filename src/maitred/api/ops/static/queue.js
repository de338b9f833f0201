// Who waits, in order, and why.

import { $, h, say } from "./dom.js";
import { inertLine } from "./inert.js";
import { plural, seconds } from "./words.js";

const SHOWN = 12;

export class Queue {
  constructor(tickets) {
    this.tickets = tickets;
    this.list = $("queue");
    this.rows = [];
    this.empty = h("li", { class: "empty" }, "Nobody waits. Every guest is seated.");
    this.more = h("li", { class: "why" });
  }

  take(frame) {
    const { waiting, num_waiting: total, now } = frame.engine;
    say($("queue-note"), total ? plural(total, "waits", "wait") : "");
    const shown = waiting.slice(0, SHOWN);
    while (this.rows.length < shown.length) this.rows.push(row());
    shown.forEach((request, place) => this.fill(this.rows[place], request, place, now));
    say(this.more, total > shown.length ? `and ${total - shown.length} more` : "");
    const nodes = shown.length ? this.rows.slice(0, shown.length).map((r) => r.node) : [this.empty];
    if (total > shown.length) nodes.push(this.more);
    if (nodes.length !== this.list.childElementCount || nodes[0] !== this.list.firstElementChild) {
      this.list.replaceChildren(...nodes);
    }
  }

  fill(parts, request, place, now) {
    const number = this.tickets.byId.get(request.id)?.number;
    if (parts.node.className !== request.state) parts.node.className = request.state;
    say(parts.name, `${place + 1}. ${request.state === "preempted" ? "preempted, " : ""}no. ${number ?? "?"}`);
    const grown = request.num_output_tokens ? ` + ${request.num_output_tokens}` : "";
    const tenant = request.tenant ? `${inertLine(request.tenant, 24)} · ` : "";
    say(parts.who, `${tenant}${request.num_prompt_tokens}${grown} tokens`);
    say(parts.age, seconds(Math.max(0, now - request.arrived_at)));
    say(parts.why, request.reason);
  }
}

function row() {
  const [name, who, age, why] = [h("b"), h("span", { class: "who" }), h("span", { class: "age" }), h("p", { class: "why" })];
  return { node: h("li", {}, h("div", { class: "line" }, name, who, age), why), name, who, age, why };
}
