// A rush of guests at the press of a button, so that there is something to watch.

import { $ } from "./dom.js";

const PARTIES = 3; // connections: a browser opens six to one server, and the page needs some itself
const PROMPTS = [
  "I would like two soups and a tea, please.",
  "What is maitred, and who is served next? Tell me about the queue, the batch and the cache.",
  "How does prefix caching work?",
  "A table for four. What does the fish cost, and what goes with it?",
];

export class Rush {
  constructor(client, modelOf) {
    this.client = client;
    this.modelOf = modelOf;
    this.running = null;
    $("rush").addEventListener("click", () => (this.running ? this.end() : this.begin()));
  }

  async begin() {
    this.running = new AbortController();
    $("rush").setAttribute("aria-pressed", "true");
    $("rush").textContent = "Send them home";
    const { signal } = this.running;
    await Promise.allSettled(Array.from({ length: PARTIES }, (_, party) => this.party(party, signal)));
    if (this.running?.signal === signal) this.end();
  }

  async party(party, signal) {
    for (let round = 0; round < 4 && !signal.aborted; round += 1) {
      const prompt = PROMPTS[(party + round) % PROMPTS.length];
      await this.client.json("v1/chat/completions", {
        signal,
        body: {
          model: this.modelOf(), messages: [{ role: "user", content: prompt }],
          n: 4 + 2 * ((party + round) % 4), temperature: 1, ignore_eos: true, max_tokens: 60 + 50 * ((party * 2 + round) % 4),
        },
      });
    }
  }

  end() {
    this.running?.abort();
    this.running = null;
    $("rush").setAttribute("aria-pressed", "false");
    $("rush").textContent = "Rush hour";
  }
}
