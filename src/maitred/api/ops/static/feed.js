// The live view's stream, for as long as the page is looked at; comes back by itself, ever less often.

import { eventsOf } from "./events.js";
import { ServerError } from "./client.js";

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

  begin() {
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
    if (silence >= SILENT_S) this.onState("wait", `No news from the engine for ${Math.floor(silence)} s.`);
  }

  async run(signal) {
    let pause = 1;
    while (!signal.aborted) {
      try {
        const response = await this.client.ask("admin/live", { signal });
        for await (const data of eventsOf(response)) {
          const frame = JSON.parse(data);
          if (frame.error) throw new ServerError(0, frame.error.message);
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
