// One answer on its way: text, thoughts and calls as they come, the times, and how it ended.

import { eventsOf } from "./events.js";
import { sentence, ServerError } from "./client.js";

const MIN_RATE_TOKENS = 8; // of fewer, a rate says next to nothing
const MAX_CALLS = 64; // of one answer
const IGNORED = "x-maitred-schema-ignored"; // keywords of the schema that could not be enforced

/** Streams a chat completion into `turn`: {content, reasoning, calls, facts}. Gives the ServerError that ended it, or null.
 *
 * When chunks arrive says little of when tokens were made, so rates come from the engine's clock alone (`timing_ms`). Times
 * in seconds; `firstText`, `thought` and `total` are this page's clock, for answers of which the engine told nothing. */
export async function streamAnswer(client, body, turn, { signal, onPiece, onId }) {
  const asked = performance.now();
  const facts = { tokens: null, cached: 0, finish: null, firstText: null, total: null };
  let error = null;
  try {
    const response = await client.ask("v1/chat/completions", {
      body: { ...body, stream: true, stream_options: { include_usage: true } },
      signal,
    });
    facts.ignored = response.headers.get(IGNORED);
    let isFirst = true;
    for await (const data of eventsOf(response)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, sentence(chunk.error.message ?? "the answer broke off"));
      if (isFirst && chunk.id) onId?.(chunk.id);
      isFirst = false;
      const choice = chunk.choices?.[0];
      if (take(turn, choice?.delta ?? {})) {
        facts.total = (performance.now() - asked) / 1000;
        facts.firstText ??= facts.total;
        if (turn.reasoning && !turn.content && !turn.calls.length) facts.thought = facts.total;
        onPiece();
      }
      if (choice?.finish_reason) facts.finish = choice.finish_reason;
      if (chunk.usage) Object.assign(facts, factsOf(chunk.usage));
    }
    if (facts.finish === null) throw new ServerError(0, "The answer broke off before its end.");
  } catch (raised) {
    facts.finish = raised.name === "AbortError" ? "stopped" : "broken";
    if (facts.finish === "broken") {
      error = raised instanceof ServerError ? raised : new ServerError(0, "The connection broke before the end.");
    }
  }
  for (const call of turn.calls) call.arguments ||= "{}";
  turn.facts = facts;
  return error;
}

/** Whether the delta had anything in it. Thoughts come under two names at once. */
function take(turn, delta) {
  const thoughts = delta.reasoning_content ?? delta.reasoning ?? "";
  turn.reasoning += thoughts;
  turn.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) takeCall(turn.calls, piece);
  return Boolean(thoughts || delta.content || delta.tool_calls?.length);
}

function takeCall(calls, { index = calls.length, id, function: piece }) {
  let call = calls.find((one) => one.index === index);
  if (!call && calls.length < MAX_CALLS) {
    const isOwn = id && !calls.some((one) => one.id === id);
    call = { index, id: isOwn ? id : `call_${index}`, name: "", arguments: "" };
    calls.push(call);
  }
  if (!call) return;
  call.name += piece?.name ?? "";
  call.arguments += piece?.arguments ?? "";
}

/** What the server counted, and what its engine's clock says: first token, wait in the queue, rate from the first token on. */
function factsOf({ completion_tokens: tokens, prompt_tokens_details: prompt, completion_tokens_details: made, timing_ms: timing }) {
  const facts = { tokens, cached: prompt?.cached_tokens ?? 0, thoughtTokens: made?.reasoning_tokens ?? 0 };
  if (timing?.ttft === undefined) return facts;
  const { queue, schedule, prefill, decode, stall, ttft } = timing;
  const afterFirst = queue + schedule + prefill + decode + stall - ttft;
  if (tokens >= MIN_RATE_TOKENS && afterFirst > 0) facts.perSecond = ((tokens - 1) * 1000) / afterFirst;
  return { ...facts, ttft: ttft / 1000, queue: queue / 1000 };
}
