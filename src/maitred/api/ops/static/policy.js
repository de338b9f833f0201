// The policy in force, and another one at a turn of the hand; whoever waits keeps the time they have waited.

import { $, h, say } from "./dom.js";

export class Policy {
  /** `onChoices` hears the names of all policies. */
  constructor(client, onChoices) {
    Object.assign(this, { client, onChoices });
    this.select = $("policy");
    this.busy = false;
    this.select.addEventListener("change", () => this.choose(this.select.value));
  }

  async begin() {
    try {
      const { policy, choices } = await this.client.json("admin/policy");
      this.select.replaceChildren(...choices.map((name) => h("option", { value: name }, name)));
      this.onChoices(choices);
      this.select.value = policy;
      this.select.parentElement.hidden = false;
    } catch { /* nothing to choose from here */ }
  }

  take(frame) {
    if (!this.busy && document.activeElement !== this.select) this.select.value = frame.engine.policy;
  }

  async choose(policy) {
    this.busy = true;
    try {
      await this.client.json("admin/policy", { body: { policy } });
      say($("policy-said"), `From now on by ${policy}; nobody lost their place in time.`);
    } catch (error) {
      say($("policy-said"), error.message);
    }
    this.busy = false;
    setTimeout(() => say($("policy-said"), ""), 6000);
  }
}
