// The conversation on the screen: sending, streaming, stopping.

import { streamAnswer } from "./answer.js";
import { Conversation, CUT } from "./conversation.js";
import { $, fill, h } from "./dom.js";
import { inert } from "./inert.js";
import { markdown } from "./markdown.js";
import { Settings } from "./settings.js";
import { count, seconds } from "./words.js";

const SUGGESTIONS = ["I would like two soups and a tea, please.", "What is maitred?", "What is the prefix cache?"];
const REDRAW_MS = 60;
const LEAVING_MS = 100; // a page that is left may first lose its connections; then nothing that waits for this is run
const FINISHES = {
  length: "reached its most tokens", stopped: "stopped by you", broken: "broke off", cut: "cut off: the page was left or reloaded",
};
const BAD_FINISHES = ["stopped", "broken", "cut"];

export class Chat {
  /** `onId` is told the id of each answer of ours, so that the live view can point at it. */
  constructor(client, { onId = () => {}, onNeedsKey = () => {}, onUnreachable = () => {} } = {}) {
    this.client = client;
    this.onId = onId;
    this.onNeedsKey = onNeedsKey;
    this.onUnreachable = onUnreachable;
    this.model = null;
    this.modelKnown = new Promise((resolve) => (this.resolveModel = resolve));
    this.running = null; // AbortController of the answer on its way
    this.conversation = new Conversation();
    this.settings = new Settings();
    this.wire();
    for (const turn of this.conversation.turns) this.show(turn);
    this.arrange();
  }

  /** What is sent before this waits for it. Only the built-in model is sure to know what the suggestions are about. */
  useModel(name, { isBuiltIn = false } = {}) {
    this.model = name;
    $("suggestions").hidden = !isBuiltIn;
    this.resolveModel();
  }

  wire() {
    $("send").addEventListener("click", () => this.send());
    $("stop").addEventListener("click", () => this.running?.abort());
    $("fresh").addEventListener("click", () => this.begin());
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !$("key-dialog").open) this.running.abort();
    });
    for (const text of SUGGESTIONS) {
      const use = () => {
        $("message").value = text;
        this.send();
      };
      $("suggestions").append(h("button", { type: "button", onclick: use }, text));
    }
  }

  begin() {
    this.running?.abort();
    this.conversation.clear();
    $("log").replaceChildren();
    this.complain(null);
    this.arrange();
    $("message").focus();
  }

  async send() {
    const text = $("message").value.trim();
    if (!text || this.running || this.waits) return;
    let body;
    try {
      body = this.settings.sampling();
    } catch (error) {
      this.complain(error.message);
      $("settings").open = true;
      return;
    }
    $("message").value = "";
    this.complain(null);
    if (!this.model) this.complain("Not connected to the server yet; the message waits.");
    this.waits = true;
    await this.modelKnown;
    this.waits = false;
    this.complain(null);
    const question = this.show(this.conversation.add("user", text));
    const told = await this.answer({ ...body, model: this.model, messages: this.conversation.messages(this.settings.system) });
    if (told.error && !told.text) this.takeBack(question, text);
  }

  /** What was refused stays out of the conversation, or all that follows would be refused too. */
  takeBack(question, text) {
    question.node.remove();
    this.conversation.turns.pop();
    this.conversation.keep();
    if (!$("message").value) $("message").value = text;
    this.arrange();
  }

  async answer(body) {
    this.running = new AbortController();
    const turn = { role: "assistant", content: "", facts: null };
    const view = this.show(turn);
    view.node.classList.add("streaming");
    $("log").setAttribute("aria-busy", "true");
    this.arrange();
    const painter = new Painter(view.text);
    let isLeft = false;
    const leave = () => {
      isLeft = true;
      this.conversation.cut(painter.latest); // now, for what follows may not run any more
      this.running.abort();
    };
    window.addEventListener("pagehide", leave);
    const told = await streamAnswer(this.client, body, {
      signal: this.running.signal,
      onText: (text) => painter.paint(text),
      onId: this.onId,
    });
    if (told.error) await new Promise((done) => setTimeout(done, LEAVING_MS));
    window.removeEventListener("pagehide", leave);
    if (isLeft) told.facts = CUT;
    const follows = isAtEnd();
    painter.finish(told.text);
    this.running = null;
    view.node.classList.remove("streaming");
    $("log").removeAttribute("aria-busy");
    const isWanted = view.node.isConnected; // not so once a new conversation began
    if (isWanted && (told.text || !told.error)) this.conversation.add("assistant", told.text, told.facts);
    this.tell(view, told);
    this.arrange();
    if (follows) this.scroll();
    return told;
  }

  /** What it took, or what went wrong. */
  tell(view, told) {
    view.facts.replaceChildren(...factsOf(told.facts, told.text));
    if (!told.error) return;
    view.node.classList.add("bad");
    if (!told.text) view.node.remove();
    const again = told.error.retryAfter ? ` Try again in ${seconds(told.error.retryAfter)}.` : "";
    this.complain(told.error.message + again);
    if (told.error.status === 401) this.onNeedsKey(told.error.message);
    if (told.error.status === null) this.onUnreachable();
  }

  show(turn) {
    const text = h("div", { class: "text" });
    const facts = h("p", { class: "facts" });
    const node = h("div", { class: `turn ${turn.role === "user" ? "user" : "assistant"}` });
    if (turn.role === "user") {
      node.setAttribute("dir", "auto");
      node.textContent = inert(turn.content);
    } else {
      fill(text, markdown(turn.content));
      facts.replaceChildren(...(turn.facts ? factsOf(turn.facts, turn.content) : []));
      node.append(text, facts);
    }
    $("log").append(node);
    this.scroll();
    return { node, text, facts };
  }

  arrange() {
    const empty = !$("log").childElementCount;
    $("welcome").hidden = !empty;
    $("fresh").disabled = empty;
    $("send").hidden = Boolean(this.running);
    $("stop").hidden = !this.running;
  }

  complain(words) {
    $("trouble").hidden = !words;
    $("trouble").textContent = words ?? "";
  }

  scroll() {
    $("log").scrollTop = $("log").scrollHeight;
  }
}

/** Draws a growing text now and then: seldom enough that drawing takes at most a fifth of the time. */
class Painter {
  constructor(node) {
    this.node = node;
    this.timer = null;
    this.waitMs = REDRAW_MS;
    this.latest = "";
  }

  paint(text) {
    this.latest = text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, this.waitMs);
  }

  finish(text) {
    clearTimeout(this.timer);
    this.latest = text;
    this.draw();
  }

  draw() {
    const began = performance.now();
    const follows = isAtEnd();
    fill(this.node, markdown(this.latest));
    if (follows) $("log").scrollTop = $("log").scrollHeight;
    this.waitMs = Math.max(REDRAW_MS, 4 * (performance.now() - began));
  }
}

/** Who reads further up is left there. */
function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

/** The engine's figures where it told them; else what this page saw: no rate, for it cannot know one. */
function factsOf(facts, text) {
  const parts = [];
  const add = (value, words) => parts.push(h("span", {}, h("b", {}, value), ` ${words}`));
  const isTimed = facts.queue !== undefined;
  if (isTimed) add(seconds(facts.ttft), "to the first token");
  else if (facts.firstText) add(seconds(facts.firstText), "to the first text");
  if (facts.perSecond) add(facts.perSecond < 10 ? facts.perSecond.toFixed(1) : count(facts.perSecond), "tokens/s");
  if (facts.tokens && text) add(count(facts.tokens), `${facts.tokens === 1 ? "token" : "tokens"}${isTimed ? "" : ` in ${seconds(facts.total)}`}`);
  if (isTimed) add(seconds(facts.queue), "in the queue");
  if (facts.cached) add(count(facts.cached), "prompt tokens cached");
  if (facts.finish && facts.finish !== "stop") {
    parts.push(h("span", { class: BAD_FINISHES.includes(facts.finish) ? "bad" : "" }, FINISHES[facts.finish] ?? inert(facts.finish)));
  }
  return parts;
}
