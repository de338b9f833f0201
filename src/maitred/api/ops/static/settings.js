// Sampling controls and the system prompt; an empty field leaves the choice to the model.

import { $ } from "./dom.js";

const KEPT = "maitred.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];
const TEXTS = ["system", "stop_string"];

export class Settings {
  constructor() {
    this.fields = [...NUMBERS, ...TEXTS].map($);
    this.restore();
    for (const field of this.fields) field.addEventListener("input", () => this.keep());
    $("reset").addEventListener("click", () => {
      for (const field of this.fields) field.value = "";
      this.keep();
    });
  }

  get system() {
    return $("system").value.trim();
  }

  /** Fields of a request. Raises an Error that names the field which makes no sense. */
  sampling() {
    const chosen = {};
    for (const name of NUMBERS) {
      const field = $(name);
      if (isWrong(field)) throw new Error(`${labelOf(field)}: ${field.validationMessage}`);
      if (field.value !== "") chosen[name] = Number(field.value);
    }
    if ($("stop_string").value) chosen.stop = [$("stop_string").value];
    return chosen;
  }

  keep() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(this.fields.map((f) => [f.id, f.value]))));
    } catch { /* then they last as long as the page */ }
  }

  restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
      for (const field of this.fields) field.value = kept[field.id] ?? "";
    } catch { /* nothing kept, or not ours */ }
  }
}

/** The steps of a fraction are for its arrows; what is typed may lie between them. */
function isWrong({ validity, step }) {
  return validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (validity.stepMismatch && step === "1");
}

function labelOf(field) {
  return field.labels[0].firstChild.textContent.trim();
}
