// One turn on the screen: what was said, thoughts folded, calls as cards, what it took, and what may be done with it.

import { card } from "./calls.js";
import { copyButton } from "./code.js";
import { fill, h, say } from "./dom.js";
import { inert, inertLine } from "./inert.js";
import { jsonBlock, markdown, MAX_CHARS } from "./markdown.js";
import { count, seconds } from "./words.js";

const FINISHES = {
  length: "reached its most tokens", stopped: "stopped by you", broken: "broke off", cut: "cut off: the page was left or reloaded",
};
const BAD_FINISHES = ["stopped", "broken", "cut"];
const GOOD_FINISHES = ["stop", "tool_calls", "function_call"];

/** Whether an answer came to its own end, so that what it calls may be run. */
export function isWhole(turn) {
  return GOOD_FINISHES.includes(turn.facts?.finish);
}

/** What the reader said; `node` is the bubble with its buttons below. */
export class Question {
  constructor(turn, { onEdit }) {
    this.turn = turn;
    this.bubble = h("div", { class: "turn user", dir: "auto" }, inert(turn.content));
    const edit = h("button", { type: "button", class: "tool edit", "aria-label": "Edit what you said", title: "Edit what you said" });
    edit.addEventListener("click", () => this.edit(onEdit));
    this.buttons = h("div", { class: "actions" }, edit, copyButton("Copy what you said", () => turn.content));
    this.node = h("div", { class: "entry by-user" }, this.bubble, this.buttons);
  }

  /** In the bubble's place a field, until it is sent or closed. */
  edit(onEdit, text = this.turn.content) {
    const field = h("textarea", { rows: "2", "aria-label": "What you said, edited" });
    field.value = text;
    const close = () => this.node.replaceChildren(this.bubble, this.buttons);
    const send = () => {
      if (field.value.trim()) onEdit(field.value.trim());
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const row = h("div", { class: "row" }, h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: send }, "Send again"));
    this.node.replaceChildren(h("div", { class: "editing" }, field, row));
    field.focus();
  }
}

/** What the model said. `draw` shows what there is of it so far. */
export class Reply {
  constructor(turn, { onAgain, onResult }) {
    this.turn = turn;
    this.onResult = onResult; // told (call, result) of a call that the reader answers
    this.summary = h("summary");
    this.thinking = h("div", { class: "thinking", dir: "auto" });
    this.thoughts = h("details", { class: "thoughts" }, this.summary, this.thinking);
    this.text = h("div", { class: "text" });
    this.calls = h("div", { class: "calls" });
    this.facts = h("p", { class: "facts" });
    this.bubble = h("div", { class: "turn assistant" }, this.thoughts, this.text, this.calls, this.facts);
    const again = h("button", { type: "button", class: "tool again", "aria-label": "Answer again", title: "Answer again", onclick: onAgain });
    const buttons = h("div", { class: "actions" }, copyButton("Copy the answer", () => textOf(turn)), again);
    this.node = h("div", { class: "entry" }, this.bubble, buttons);
  }

  /** `results` is call id -> result; a call that has none asks for one once the answer is whole. */
  draw(results = new Map()) {
    const { content, reasoning, calls, facts, isJSON } = this.turn;
    this.thoughts.hidden = !reasoning;
    if (reasoning) this.drawThoughts();
    fill(this.text, isJSON && content ? jsonBlock(content) : markdown(content));
    this.text.hidden = !content && Boolean(reasoning || calls.length);
    fill(this.calls, calls.map((call) => this.card(call, results.get(call.id))));
    fill(this.facts, facts ? factsOf(facts) : []);
    this.bubble.classList.toggle("bad", facts?.finish === "broken");
  }

  drawThoughts() {
    const { content, reasoning, calls, facts } = this.turn;
    const took = facts?.thought ? ` for ${seconds(facts.thought)}` : "";
    say(this.summary, content || calls.length || facts ? `Thought${took}` : "Thinking…");
    say(this.thinking, inert(reasoning.slice(0, MAX_CHARS)));
  }

  /** The call has its result now; other cards, and what is being typed into them, stay. */
  settle(call, result) {
    this.calls.children[this.turn.calls.indexOf(call)].replaceWith(this.card(call, result));
  }

  card(call, result) {
    const asks = result === undefined && isWhole(this.turn);
    return card(call, result, asks ? (given) => this.onResult(call, given) : null);
  }
}

/** What is copied: of an answer that only calls, what it calls with. */
function textOf({ content, calls }) {
  return content || calls.map((call) => call.arguments).join("\n");
}

/** The engine's figures where it told them; else what this page saw: no rate, for it cannot know one. */
function factsOf(facts) {
  const parts = [];
  const add = (value, words) => parts.push(h("span", {}, h("b", {}, value), ` ${words}`));
  const isTimed = facts.queue !== undefined;
  if (isTimed) add(seconds(facts.ttft), "to the first token");
  else if (facts.firstText) add(seconds(facts.firstText), "to the first text");
  if (facts.perSecond) add(facts.perSecond < 10 ? facts.perSecond.toFixed(1) : count(facts.perSecond), "tokens/s");
  if (facts.tokens && facts.firstText) add(count(facts.tokens), `${facts.tokens === 1 ? "token" : "tokens"}${isTimed ? "" : ` in ${seconds(facts.total)}`}`);
  if (facts.thoughtTokens) add(count(facts.thoughtTokens), "of them thoughts");
  if (isTimed) add(seconds(facts.queue), "in the queue");
  if (facts.cached) add(count(facts.cached), "prompt tokens cached");
  if (facts.finish && !GOOD_FINISHES.includes(facts.finish)) {
    parts.push(h("span", { class: BAD_FINISHES.includes(facts.finish) ? "bad" : "" }, FINISHES[facts.finish] ?? inert(facts.finish)));
  }
  if (facts.ignored) parts.push(h("span", { class: "bad" }, `the schema's ${inertLine(facts.ignored, 200)} ignored`));
  return parts;
}
