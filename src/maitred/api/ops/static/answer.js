// One answer on its way: text as it comes, the times, and how it ended.

import { eventsOf } from "./events.js";
import { sentence, ServerError } from "./client.js";

const MIN_RATE_TOKENS = 8; // of fewer, a rate says next to nothing

/** Streams a chat completion. `onText` is told the whole text so far. Gives {text, facts, error}.
 *
 * When chunks arrive says little of when tokens were made, so rates come from the engine's clock alone (`timing_ms`). Times
 * in seconds; `firstText` and `total` are this page's clock, for answers of which the engine told nothing. */
export async function streamAnswer(client, body, { signal, onText, onId }) {
  const asked = performance.now();
  const facts = { tokens: null, cached: 0, finish: null, firstText: null, total: null };
  const answer = { text: "", facts };
  try {
    const response = await client.ask("v1/chat/completions", {
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      signal,
    });
    let isFirst = true;
    for await (const data of eventsOf(response)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, sentence(chunk.error.message ?? "the answer broke off"));
      if (isFirst && chunk.id) onId?.(chunk.id);
      isFirst = false;
      const choice = chunk.choices?.[0];
      const piece = (choice?.delta?.reasoning ?? "") + (choice?.delta?.content ?? "");
      if (piece) {
        facts.total = (performance.now() - asked) / 1000;
        facts.firstText ??= facts.total;
        answer.text += piece;
        onText(answer.text);
      }
      if (choice?.finish_reason) facts.finish = choice.finish_reason;
      if (chunk.usage) Object.assign(facts, factsOf(chunk.usage));
    }
    if (facts.finish === null) throw new ServerError(0, "The answer broke off before its end.");
  } catch (error) {
    facts.finish = error.name === "AbortError" ? "stopped" : "broken";
    if (facts.finish === "broken") {
      answer.error = error instanceof ServerError ? error : new ServerError(0, "The connection broke before the end.");
    }
  }
  return answer;
}

/** What the server counted, and what its engine's clock says: first token, wait in the queue, rate from the first token on. */
function factsOf({ completion_tokens: tokens, prompt_tokens_details: prompt, timing_ms: timing }) {
  const facts = { tokens, cached: prompt?.cached_tokens ?? 0 };
  if (timing?.ttft === undefined) return facts;
  const { queue, schedule, prefill, decode, stall, ttft } = timing;
  const afterFirst = queue + schedule + prefill + decode + stall - ttft;
  if (tokens >= MIN_RATE_TOKENS && afterFirst > 0) facts.perSecond = ((tokens - 1) * 1000) / afterFirst;
  return { ...facts, ttft: ttft / 1000, queue: queue / 1000 };
}
