// Conversations in the browser's own storage: each under its key, all of them within a bound.

const PREFIX = "maitred.conversation.";
export const MAX_KEPT = 4_000_000; // characters of all together; browsers give a site about five million

/** {name, at, turns}, or null where none is kept under `id`. `at` is in ms since 1970. */
export function read(id) {
  try {
    const kept = JSON.parse(localStorage.getItem(PREFIX + id));
    if (!Array.isArray(kept?.turns)) return null;
    return { name: String(kept.name ?? ""), at: Number(kept.at) || 0, turns: kept.turns.filter(isTurn).map(whole) };
  } catch {
    return null; // storage is forbidden, or what is there is not ours
  }
}

/** Raises an Error, in words for the reader, when it does not fit or may not be kept. */
export function write(id, { name, turns }) {
  const text = JSON.stringify({ name, at: Date.now(), turns });
  try {
    if (size(id) + text.length > MAX_KEPT) throw new DOMException("", "QuotaExceededError");
    localStorage.setItem(PREFIX + id, text);
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw new Error("This browser keeps no conversations: export this one before you leave.");
    throw new Error("The browser's store is full, so this is not kept: export it, or delete other conversations.");
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch { /* then it was never kept */ }
}

/** What lasts as long as the tab, or where that is forbidden, as the page. */
export const ofTab = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, value);
    } catch { /* then a reload begins anew */ }
  },
};

/** The ids of all, as the browser has them. */
export function ids() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Characters of all but `id`. */
function size(id) {
  return ids().reduce((sum, other) => sum + (other === id ? 0 : localStorage.getItem(PREFIX + other).length), 0);
}

function whole(turn) {
  return turn.role === "assistant" ? { ...turn, reasoning: turn.reasoning ?? "", calls: turn.calls ?? [], facts: turn.facts ?? null } : turn;
}

function isTurn(turn) {
  const isText = (value) => typeof value === "string";
  const calls = turn?.calls ?? [];
  return isText(turn?.content) && isText(turn.role) && isText(turn.reasoning ?? "")
    && Array.isArray(calls) && calls.every((call) => isText(call?.id) && isText(call.name) && isText(call.arguments));
}
