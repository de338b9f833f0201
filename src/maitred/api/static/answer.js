// One answer on its way: text as it comes, the times, and how it ended.

import { eventsOf } from "./events.js";
import { sentence, ServerError } from "./client.js";

/** Streams a chat completion. `onText` is told the whole text so far. Gives {text, facts, id}; raises as Client.ask. */
export async function streamAnswer(client, body, { signal, onText, onId }) {
  const asked = performance.now();
  const answer = { text: "", facts: { ttft: null, perSecond: null, tokens: null, cached: 0, finish: null, total: null } };
  let first = null;
  let last = null;
  let pieces = 0;
  try {
    const response = await client.ask("v1/chat/completions", {
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      signal,
    });
    for await (const data of eventsOf(response)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, sentence(chunk.error.message ?? "the answer broke off"));
      if (pieces === 0 && chunk.id) onId?.(chunk.id);
      const choice = chunk.choices?.[0];
      const piece = (choice?.delta?.reasoning ?? "") + (choice?.delta?.content ?? "");
      if (piece) {
        last = performance.now();
        first ??= last;
        pieces += 1;
        answer.text += piece;
        onText(answer.text);
      }
      if (choice?.finish_reason) answer.facts.finish = choice.finish_reason;
      if (chunk.usage) {
        answer.facts.tokens = chunk.usage.completion_tokens;
        answer.facts.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
    }
    if (answer.facts.finish === null) throw new ServerError(0, "The answer broke off before its end.");
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.error = error instanceof ServerError ? error : new ServerError(0, "The connection broke before the end.");
    } else {
      answer.facts.finish = "stopped";
    }
  }
  if (first !== null) {
    const tokens = answer.facts.tokens ?? pieces; // without usage a piece is about a token
    answer.facts.tokens = tokens;
    answer.facts.ttft = (first - asked) / 1000;
    answer.facts.total = (last - asked) / 1000;
    if (tokens > 1 && last > first) answer.facts.perSecond = ((tokens - 1) * 1000) / (last - first);
  }
  return answer;
}
