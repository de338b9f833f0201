// Server-sent events out of a fetch: EventSource can neither send a key nor POST.

const MAX_EVENT = 4 * 1024 * 1024; // characters of one event; a server that sends more is broken

/** The data of each event, as it comes. Ends with the stream or at [DONE]. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const data = dataOf(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield data;
      }
      if (rest.length > MAX_EVENT) throw new Error("the server sent an event that is too long");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
}
