// A conversation as a file: JSON with the messages as the API takes them, or Markdown to read.

import { h } from "./dom.js";
import { messagesOf, titleOf } from "./conversation.js";

const WHO = { user: "You", assistant: "Answer", tool: "Result" };
const KINDS = { json: ["application/json", asJSON], md: ["text/markdown", asMarkdown] };

/** Hands the file to the browser; `ending` is `json` or `md`. */
export function save(conversation, ending) {
  const [type, write] = KINDS[ending];
  const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "conversation";
  const address = URL.createObjectURL(new Blob([write(conversation)], { type }));
  h("a", { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function asJSON(conversation) {
  return `${JSON.stringify({ name: titleOf(conversation), messages: messagesOf(conversation.turns) }, null, 2)}\n`;
}

function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  for (const turn of conversation.turns) {
    parts.push(`## ${WHO[turn.role] ?? turn.role}`);
    if (turn.reasoning) parts.push(turn.reasoning.replace(/^/gm, "> "));
    if (turn.content) parts.push(turn.role === "tool" ? fenced(turn.content, "") : turn.content);
    for (const call of turn.calls ?? []) parts.push(`Calls \`${call.name}\``, fenced(call.arguments, "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

/** A fence is longer than any in the text. */
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}
