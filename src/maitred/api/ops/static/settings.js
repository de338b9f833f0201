// Sampling, the system prompt, and the shape of an answer; an empty field leaves the choice to the model.

import { $ } from "./dom.js";

const KEPT = "maitred.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];
const OTHERS = ["system", "stop_string", "schema", "tools", "restaurant", "thinking"];

/** Tells the field that makes no sense, which is then in sight. */
class WrongField extends Error {
  constructor(field, words) {
    super(`${labelOf(field)}: ${words}`);
    field.closest("details").open = true;
  }
}

export class Settings {
  constructor() {
    this.all = [...NUMBERS, ...OTHERS].map($);
    this.kept = {};
    this.restore();
    for (const field of this.all) field.addEventListener("input", () => this.keep());
    $("reset").addEventListener("click", () => {
      for (const field of this.all) put(field, "");
      this.keep();
    });
  }

  /** The built-in model knows the restaurant: its tools are offered unless the reader said otherwise. */
  offerRestaurant() {
    $("restaurant").defaultChecked = true;
    if (this.kept.restaurant === undefined) put($("restaurant"), "");
  }

  get system() {
    return $("system").value.trim();
  }

  /** Whether the restaurant's tools are offered. */
  get hasRestaurant() {
    return $("restaurant").checked;
  }

  /** Fields of a request. Raises an Error that names the field which makes no sense. */
  fields() {
    const fields = this.sampling();
    const schema = parsed($("schema"), isObject, "a schema is a JSON object");
    if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const tools = parsed($("tools"), Array.isArray, "tools are a JSON array, as the API takes it");
    if (tools) fields.tools = tools;
    if ($("thinking").value) fields.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
    return fields;
  }

  sampling() {
    const chosen = {};
    for (const name of NUMBERS) {
      const field = $(name);
      if (isWrong(field)) throw new WrongField(field, field.validationMessage);
      if (field.value !== "") chosen[name] = Number(field.value);
    }
    if ($("stop_string").value) chosen.stop = [$("stop_string").value];
    return chosen;
  }

  keep() {
    try {
      const all = this.all.map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]);
      sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(all)));
    } catch { /* then they last as long as the page */ }
  }

  restore() {
    try {
      this.kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
      for (const field of this.all) put(field, this.kept[field.id] ?? "");
    } catch { /* nothing kept, or not ours */ }
  }
}

function put(field, value) {
  if (field.type === "checkbox") field.checked = value === "" ? field.defaultChecked : value === true;
  else field.value = value;
}

/** The field's JSON; undefined where it is empty. */
function parsed(field, isGood, words) {
  if (!field.value.trim()) return undefined;
  let value;
  try {
    value = JSON.parse(field.value);
  } catch (error) {
    throw new WrongField(field, `this is no JSON (${error.message}).`);
  }
  if (!isGood(value)) throw new WrongField(field, `${words}.`);
  return value;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The steps of a fraction are for its arrows; what is typed may lie between them. */
function isWrong({ validity, step }) {
  return validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (validity.stepMismatch && step === "1");
}

function labelOf(field) {
  return field.labels[0].firstChild.textContent.trim();
}
