// The conversation on the screen: sending, streaming, stopping, and going on after a call.

import { streamAnswer } from "./answer.js";
import { Conversation, CUT, messagesOf, reply } from "./conversation.js";
import { Conversations } from "./conversations.js";
import { $, h, say } from "./dom.js";
import { ofTab } from "./kept.js";
import { Restaurant } from "./restaurant.js";
import { Settings } from "./settings.js";
import { isWhole, Question, Reply } from "./turns.js";
import { seconds } from "./words.js";

// What each packaged model (model.packaged) is sure to answer; others get no suggestions.
const SUGGESTIONS = {
  smollm2: ["What is gravity?", "Name three primary colors.", "Write a short poem about rain."],
  "maitred-mini": ["I would like two soups and a tea, please.", "What is maitred?", "What is the prefix cache?"],
};
const BUILT_IN = "maitred-mini";
const OPEN = "maitred.open"; // id of the conversation in this tab
const REDRAW_MS = 60;
const LEAVING_MS = 100; // a page that is left may first lose its connections; then nothing that waits for this is run
const MAX_ROUNDS = 8; // of calls in a row that are run without a word of the reader

export class Chat {
  /** `onId` is told the id of each answer of ours, so that the live view can point at it. */
  constructor(client, { onId = () => {}, onNeedsKey = () => {}, onUnreachable = () => {} } = {}) {
    Object.assign(this, { client, onId, onNeedsKey, onUnreachable });
    this.model = null; // undefined where the server has yet to learn of one
    this.modelKnown = new Promise((resolve) => (this.resolveModel = resolve));
    this.running = null; // AbortController of the answer on its way
    this.waits = false; // for the model
    this.settings = new Settings();
    this.restaurant = new Restaurant();
    this.wire();
    this.open(ofTab.get(OPEN));
    new Conversations({ current: () => this.conversation, onOpen: (id) => this.open(id), onGone: () => this.open() });
  }

  /** What is sent before this waits for it. `root` is the model that is served under this name. */
  useModel(name, { root = "" } = {}) {
    this.model = name;
    this.suggest(SUGGESTIONS[root] ?? []);
    if (root === BUILT_IN) this.settings.offerRestaurant();
    this.resolveModel();
  }

  wire() {
    $("send").addEventListener("click", () => this.send());
    $("stop").addEventListener("click", () => this.running?.abort());
    $("fresh").addEventListener("click", () => {
      this.open();
      $("message").focus();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.running.abort();
    });
  }

  suggest(texts) {
    const button = (text) => {
      const use = () => {
        $("message").value = text;
        this.send();
      };
      return h("button", { type: "button", onclick: use }, text);
    };
    $("suggestions").replaceChildren(...texts.map(button));
    $("suggestions").hidden = !texts.length;
  }

  /** A kept conversation, or a new one; the answer on its way ends where it is. */
  open(id = null) {
    this.running?.abort();
    this.complain(null);
    this.conversation = new Conversation(id, (words) => words && this.complain(words));
    ofTab.set(OPEN, this.conversation.id);
    this.redraw();
  }

  redraw() {
    this.views = new Map();
    $("log").replaceChildren();
    for (const turn of this.conversation.turns) this.show(turn);
    this.arrange();
  }

  show(turn) {
    if (turn.role === "tool") return null; // on the card of its call
    const view = turn.role === "user" ? new Question(turn, { onEdit: (text) => this.editTo(turn, text) }) : new Reply(turn, {
      onAgain: () => this.again(turn),
      onResult: (call, result) => this.giveResult(turn, call, result),
    });
    view.draw?.(this.conversation.resultsOf(turn));
    this.views.set(turn, view);
    $("log").append(view.node);
    this.scroll();
    return view;
  }

  // What the reader does. `asked` is what is set at that moment, for all rounds of the answer: {fields, hasRestaurant}.

  async send() {
    const text = $("message").value.trim();
    const asked = text && this.asked();
    if (!asked) return;
    $("message").value = "";
    const isHeard = await this.say(text, this.conversation.turns, asked);
    if (!isHeard && !$("message").value) $("message").value = text;
  }

  async editTo(turn, text) {
    const asked = this.asked();
    if (!asked) return;
    const isHeard = await this.say(text, this.before(turn), asked);
    const view = this.views.get(turn);
    if (!isHeard && view) view.edit((again) => this.editTo(turn, again), text);
  }

  async again(turn) {
    const asked = this.asked();
    if (!asked || !(await this.modelIsKnown())) return;
    const { turns } = this.conversation;
    this.conversation.replace(this.before(turn));
    this.redraw();
    await this.respond(turns, asked);
  }

  async giveResult(turn, call, result) {
    const asked = this.asked();
    if (!asked || !(await this.modelIsKnown())) return;
    const { turns } = this.conversation;
    this.settle(turn, call, result);
    await this.goOn(turn, turns, asked, MAX_ROUNDS);
  }

  /** Null, with the reason shown, when a field is wrong and while an answer is on its way. */
  asked() {
    if (this.running || this.waits) {
      const first = this.running ? "An answer is still being written: stop it (Escape), or wait until it ends." : "The message before this one still waits.";
      say($("busy"), `${first} Nothing was sent.`);
      return null;
    }
    this.complain(null);
    try {
      return { fields: this.settings.fields(), hasRestaurant: this.settings.hasRestaurant };
    } catch (error) {
      this.complain(error.message);
      return null;
    }
  }

  before(turn) {
    return this.conversation.turns.slice(0, this.conversation.turns.indexOf(turn));
  }

  // What comes of it.

  /** Says `text` after `turns`. Gives whether it was heard. */
  async say(text, turns, asked) {
    if (!(await this.modelIsKnown())) return false;
    const before = this.conversation.turns;
    const turn = { role: "user", content: text };
    this.conversation.replace([...turns, turn]);
    if (turns === before) this.show(turn);
    else this.redraw();
    return this.respond(before, asked);
  }

  /** False when another conversation was opened meanwhile. */
  async modelIsKnown() {
    const { conversation } = this;
    if (this.model === null) this.complain("Not connected to the server yet; the message waits.");
    this.waits = true;
    await Promise.all([this.modelKnown, this.restaurant.loaded]);
    this.waits = false;
    if (this.conversation !== conversation) return false;
    this.complain(null);
    return true;
  }

  /** Answers what was said last. A refusal goes back to the turns `before`, or all that follows would be refused too. */
  async respond(before, asked, rounds = MAX_ROUNDS) {
    const { conversation } = this;
    const { turn, error } = await this.answer(conversation, asked);
    if (error && isEmpty(turn)) {
      conversation.replace(before);
      if (this.conversation === conversation) this.redraw();
      return false;
    }
    if (this.conversation === conversation && isWhole(turn) && turn.calls.length) await this.run(turn, asked, rounds);
    return true;
  }

  /** Runs the restaurant's calls, and goes on once all have a result. */
  async run(turn, asked, rounds) {
    const before = this.conversation.turns;
    for (const call of rounds > 0 && asked.hasRestaurant ? turn.calls : []) {
      const result = this.restaurant.run(call);
      if (result !== undefined) this.settle(turn, call, result);
    }
    await this.goOn(turn, before, asked, rounds - 1);
  }

  settle(turn, call, result) {
    this.conversation.add({ role: "tool", id: call.id, content: result });
    this.views.get(turn).settle(call, result);
    this.scroll();
  }

  async goOn(turn, before, asked, rounds) {
    if (turn.calls.length === this.conversation.resultsOf(turn).size) await this.respond(before, asked, rounds);
  }

  async answer(conversation, asked) {
    this.running = new AbortController();
    const turn = { ...reply(), isJSON: Boolean(asked.fields.response_format) };
    const body = this.bodyOf(conversation, asked);
    const view = this.show(turn);
    view.bubble.classList.add("streaming");
    $("log").setAttribute("aria-busy", "true");
    this.arrange();
    const painter = new Painter(view);
    let isLeft = false;
    const leave = () => {
      isLeft = true;
      conversation.cut(turn); // now, for what follows may not run any more
      this.running?.abort();
    };
    window.addEventListener("pagehide", leave);
    const { signal } = this.running;
    const error = await streamAnswer(this.client, body, turn, { signal, onPiece: () => painter.paint(), onId: this.onId });
    if (error) await new Promise((done) => setTimeout(done, LEAVING_MS));
    window.removeEventListener("pagehide", leave);
    if (isLeft) turn.facts = CUT;
    this.running = null;
    $("log").removeAttribute("aria-busy");
    if (!error || !isEmpty(turn)) conversation.add(turn);
    painter.finish();
    view.bubble.classList.remove("streaming");
    if (error && this.conversation === conversation) this.tell(error);
    this.arrange();
    return { turn, error };
  }

  bodyOf({ turns }, { fields, hasRestaurant }) {
    const body = { ...fields, model: this.model, messages: messagesOf(turns, this.settings.system) };
    if (hasRestaurant) body.tools = [...this.restaurant.tools, ...(fields.tools ?? [])];
    return body;
  }

  /** What went wrong. */
  tell(error) {
    const again = error.retryAfter ? ` Try again in ${seconds(error.retryAfter)}.` : "";
    this.complain(error.message + again);
    if (error.status === 401) this.onNeedsKey(error.message);
    if (error.status === null) this.onUnreachable();
  }

  arrange() {
    const empty = !$("log").childElementCount;
    $("welcome").hidden = !empty;
    $("fresh").disabled = empty;
    $("send").hidden = Boolean(this.running);
    $("stop").hidden = !this.running;
    say($("busy"), "");
  }

  complain(words) {
    $("trouble").hidden = !words;
    $("trouble").textContent = words ?? "";
  }

  scroll() {
    $("log").scrollTop = $("log").scrollHeight;
  }
}

function isEmpty({ content, reasoning, calls }) {
  return !content && !reasoning && !calls.length;
}

/** Draws a growing turn now and then: seldom enough that drawing takes at most a fifth of the time. */
class Painter {
  constructor(view) {
    this.view = view;
    this.timer = null;
    this.waitMs = REDRAW_MS;
  }

  paint() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, this.waitMs);
  }

  finish() {
    clearTimeout(this.timer);
    this.draw();
  }

  draw() {
    const began = performance.now();
    const follows = isAtEnd();
    this.view.draw();
    if (follows) $("log").scrollTop = $("log").scrollHeight;
    this.waitMs = Math.max(REDRAW_MS, 4 * (performance.now() - began));
  }
}

/** Who reads further up is left there. */
function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}
