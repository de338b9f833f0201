// The conversations that this browser keeps: to open, name, export and delete.

import { $, fill, h } from "./dom.js";
import { Conversation } from "./conversation.js";
import { save } from "./exports.js";
import { inertLine } from "./inert.js";
import { ids, read } from "./kept.js";

export class Conversations {
  /** `current()` is the one on the screen; the others tell which to show, and that it is gone. */
  constructor({ current, onOpen, onGone }) {
    Object.assign(this, { current, onOpen, onGone });
    $("conversations-button").addEventListener("click", () => this.show());
    $("conversations-close").addEventListener("click", () => $("conversations").close());
  }

  show() {
    $("conversations-said").textContent = "";
    this.list();
    if (!$("conversations").open) $("conversations").showModal();
  }

  list() {
    const all = ids().map((id) => ({ id, at: read(id)?.at ?? 0 })).sort((one, other) => other.at - one.at);
    fill($("conversations-list"), all.map(({ id, at }) => this.row(this.conversation(id), at)));
    $("conversations-none").hidden = all.length > 0;
  }

  /** What is on the screen is named and deleted there, so that it is not kept again as it was. */
  conversation(id) {
    if (this.current().id === id) return this.current();
    return new Conversation(id, (words) => ($("conversations-said").textContent = words ?? ""));
  }

  row(conversation, at) {
    const title = inertLine(conversation.title);
    const field = h("input", { type: "text", "aria-label": `Name of ${title}`, maxlength: "60" });
    field.value = title;
    field.addEventListener("change", () => conversation.rename(field.value));
    const button = (words, onclick) => h("button", { type: "button", class: "quiet", "aria-label": `${words} ${title}`, onclick }, words);
    const open = () => {
      $("conversations").close();
      this.onOpen(conversation.id);
    };
    const when = h("time", { class: "muted" }, new Date(at).toLocaleString());
    const last = h("span", { class: "row" }, when, button("Open", open), button("JSON", () => save(conversation, "json")),
      button("Markdown", () => save(conversation, "md")), this.deleteButton(conversation, button));
    return h("li", {}, field, last);
  }

  /** Asks once more, in the same place. */
  deleteButton(conversation, button) {
    const node = button("Delete", () => {
      if (node.textContent === "Delete") {
        node.textContent = "Really?";
        node.classList.add("danger");
        return;
      }
      conversation.delete();
      if (conversation === this.current()) this.onGone();
      this.list();
    });
    return node;
  }
}
