// Which model answers, where the server has several.

import { $, h } from "./dom.js";
import { inertLine } from "./inert.js";
import { ofTab } from "./kept.js";

const KEPT = "maitred.model";

export class Models {
  /** `onChoose` is told (name, {root}), at first and whenever the reader picks another. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.cards = [];
    this.select = $("model");
    this.select.addEventListener("change", () => {
      ofTab.set(KEPT, this.select.value);
      this.tell();
    });
  }

  /** `cards` as /v1/models has them, or `instead` of any; what was picked before stays picked while it is there. */
  take(cards, instead = "nothing yet") {
    this.cards = cards;
    this.select.replaceChildren(...cards.map(({ id }) => h("option", { value: id }, inertLine(id, 60))));
    if (!cards.length) this.select.append(h("option", {}, instead));
    const kept = ofTab.get(KEPT);
    if (cards.some(({ id }) => id === kept)) this.select.value = kept;
    this.select.disabled = cards.length < 2;
    document.body.classList.toggle("has-models", cards.length > 1);
    this.tell();
  }

  tell() {
    const { id, root } = this.cards.find((card) => card.id === this.select.value) ?? {}; // none: a router has yet to learn
    document.title = id ? `${inertLine(id, 40)} · maitred` : "maitred";
    this.onChoose(id, { root });
  }
}
