// What was said, kept for this tab alone.

const KEPT = "maitred.conversation";
const MAX_KEPT = 2_000_000; // characters
export const CUT = { finish: "cut" }; // facts of an answer that a reload, or leaving the page, ended

export class Conversation {
  constructor() {
    this.turns = []; // {role, content, facts}
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
      if (Array.isArray(kept)) this.turns = kept.filter((t) => typeof t?.content === "string" && typeof t?.role === "string");
    } catch { /* nothing kept, or not ours */ }
    if (this.turns.at(-1)?.role === "user") this.turns.push({ role: "assistant", content: "", facts: CUT });
  }

  /** The page is left, perhaps for good, with so much of an answer. */
  cut(text) {
    this.keep([...this.turns, { role: "assistant", content: text, facts: CUT }]);
  }

  add(role, content, facts = null) {
    const turn = { role, content, facts };
    this.turns.push(turn);
    this.keep();
    return turn;
  }

  clear() {
    this.turns = [];
    this.keep();
  }

  /** As the API wants them; an answer that failed before its first word is left out. */
  messages(system) {
    const said = this.turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  keep(turns = this.turns) {
    let text = JSON.stringify(turns);
    while (text.length > MAX_KEPT && turns.length > 1) {
      turns = turns.slice(1);
      text = JSON.stringify(turns);
    }
    try {
      sessionStorage.setItem(KEPT, text);
    } catch { /* full or forbidden: the page still has it */ }
  }
}
