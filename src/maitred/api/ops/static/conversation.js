// One conversation: its turns, and the messages that the API wants of them.

import { read, remove, write } from "./kept.js";

const MAX_TITLE = 60; // characters
const NO_RESULT = '{"error": "no result was given"}';
export const CUT = { finish: "cut" }; // facts of an answer that a reload, or leaving the page, ended

/** An answer before its first word. Other turns are {role: "user", content} and {role: "tool", id, content}. */
export function reply() {
  return { role: "assistant", content: "", reasoning: "", calls: [], facts: null }; // calls: {id, name, arguments}
}

export class Conversation {
  /** The one kept as `id`, or a new one. `onTrouble` is told, in words, what could not be kept, and null when all is well. */
  constructor(id, onTrouble) {
    const kept = id ? read(id) : null;
    // Not crypto.randomUUID: that exists under https alone.
    this.id = id || `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
    this.name = kept?.name ?? "";
    this.turns = kept?.turns ?? [];
    this.onTrouble = onTrouble;
    this.isDeleted = false;
    if (this.turns.at(-1)?.role === "user") this.turns.push({ ...reply(), facts: CUT });
  }

  get title() {
    return titleOf(this);
  }

  /** The page is left, perhaps for good, with so much of an answer. */
  cut(turn) {
    this.keep([...this.turns, { ...turn, facts: CUT }]);
  }

  add(turn) {
    this.replace([...this.turns, turn]);
  }

  /** An array of turns is never changed, so the one from before is enough to go back to it. */
  replace(turns) {
    this.turns = turns;
    this.keep();
  }

  rename(name) {
    this.name = name.trim();
    this.keep();
  }

  delete() {
    this.isDeleted = true;
    remove(this.id);
  }

  keep(turns = this.turns) {
    if (this.isDeleted) return;
    if (!turns.length) {
      remove(this.id);
      return;
    }
    try {
      write(this.id, { name: this.name, turns });
      this.onTrouble(null);
    } catch (error) {
      this.onTrouble(error.message);
    }
  }

  /** Call id -> result, of the calls that `turn` made. */
  resultsOf(turn) {
    return resultsAfter(this.turns, this.turns.indexOf(turn));
  }
}

/** What the reader named it, else what it began with. */
export function titleOf({ name, turns }) {
  const first = turns.find((turn) => turn.role === "user")?.content ?? "";
  return (name || first.replace(/\s+/g, " ").trim()).slice(0, MAX_TITLE) || "Without a name";
}

/** As the API wants them; an answer that failed before its first word is left out, and so is a call that broke off. */
export function messagesOf(turns, system = "") {
  const messages = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, at) => {
    if (turn.role === "user") messages.push({ role: "user", content: turn.content });
    if (turn.role === "assistant") messages.push(...answerOf(turn, resultsAfter(turns, at)));
  });
  return messages;
}

/** An answer's message, and the results of its calls: the API wants one for each. */
function answerOf({ content, reasoning, calls }, results) {
  const whole = calls.filter(isWhole);
  if (!content && !whole.length) return [];
  const message = { role: "assistant", content: content || null };
  if (reasoning) message.reasoning_content = reasoning;
  if (!whole.length) return [message];
  message.tool_calls = whole.map(({ id, name, arguments: json }) => ({ id, type: "function", function: { name, arguments: json } }));
  return [message, ...whole.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results.get(id) ?? NO_RESULT }))];
}

function resultsAfter(turns, at) {
  let end = at + 1;
  while (turns[end]?.role === "tool") end += 1;
  return new Map(turns.slice(at + 1, end).map(({ id, content }) => [id, content]));
}

/** The arguments are a JSON object. */
function isWhole(call) {
  try {
    const given = JSON.parse(call.arguments);
    return typeof given === "object" && given !== null && !Array.isArray(given);
  } catch {
    return false;
  }
}
