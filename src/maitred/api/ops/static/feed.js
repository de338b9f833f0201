// The live view's frames, for as long as the page is looked at; comes back by itself, ever less often.

import { eventsOf } from "./events.js";
import { ServerError } from "./client.js";

const POLL_MS = 1000; // between two looks at a fleet

const MOST_PAUSE_S = 4; // an engine that died is back within seconds
const SILENT_S = 4; // between two frames; a long step of the engine, or a long way to it
const REFUSALS = [401, 403, 404];

export class Feed {
  /** `onFrame(frame)`; `onState(kind, words)` with kind ok, wait, bad; `onRefused(error)` when it will never come. */
  constructor(client, { onFrame, onState, onRefused }) {
    Object.assign(this, { client, onFrame, onState, onRefused });
    this.stopped = null;
    this.heardAt = null; // while frames are to come
    document.addEventListener("visibilitychange", () => this.look());
    setInterval(() => this.doubt(), 1000);
  }

  /** Of a `source` {whom, frames(client, signal)}, which ends when the server says so. */
  begin(source) {
    this.source = source;
    this.wanted = true;
    this.look();
  }

  end() {
    this.wanted = false;
    this.stopped?.abort();
    this.stopped = null;
  }

  /** Nobody looks at a hidden tab, so the engine is not asked. */
  look() {
    if (document.hidden) {
      this.stopped?.abort();
      this.stopped = null;
    } else if (this.wanted && !this.stopped) {
      this.stopped = new AbortController();
      this.run(this.stopped.signal);
    }
  }

  /** A picture that stands still is not live, whatever the connection says. */
  doubt() {
    const silence = this.heardAt === null ? 0 : (performance.now() - this.heardAt) / 1000;
    if (silence >= SILENT_S) this.onState("wait", `No news from the ${this.source.whom} for ${Math.floor(silence)} s.`);
  }

  async run(signal) {
    let pause = 1;
    while (!signal.aborted) {
      try {
        for await (const frame of this.source.frames(this.client, signal)) {
          pause = 1;
          this.heardAt = performance.now();
          this.onState("ok", "live");
          this.onFrame(frame);
        }
        this.onState("wait", "the server is going");
      } catch (error) {
        if (signal.aborted) return;
        if (REFUSALS.includes(error.status)) {
          this.wanted = false;
          this.stopped = null;
          this.onRefused(error);
          return;
        }
        this.onState("bad", error instanceof ServerError ? error.message : "The live view broke off.");
      } finally {
        this.heardAt = null;
      }
      await new Promise((done) => setTimeout(done, pause * 1000));
      pause = Math.min(MOST_PAUSE_S, pause * 2);
    }
  }
}

/** An engine tells of itself. */
export const ENGINE = {
  whom: "engine",
  async *frames(client, signal) {
    for await (const data of eventsOf(await client.ask("admin/live", { signal }))) {
      const frame = JSON.parse(data);
      if (frame.error) throw new ServerError(0, frame.error.message);
      yield frame;
    }
  },
};

/** A router is asked again and again. */
export const FLEET = {
  whom: "router",
  async *frames(client, signal) {
    for (;;) {
      yield await client.json("admin/fleet", { signal });
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
  },
};
