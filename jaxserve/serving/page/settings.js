"use strict";
// What a user sets: sampling, the system message, the form of answers, the key, colours. Kept by the browser, the key only as long
// as the tab.

/** A setting that can't be sent; `element` is where it is. */
class SettingError extends Error {
  constructor(element, message) {
    super(message);
    this.element = element;
  }
}

// Parameters of the API. The number may be more than the slider goes; without a number the server takes the model's own.
const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, slider: [0, 2, 0.05, 1] },
  { name: "top_p", label: "Top p", min: 0, max: 1, slider: [0.01, 1, 0.01, 1] },
  { name: "top_k", label: "Top k (0: all)", min: 0, step: 1, slider: [0, 200, 1, 0] },
  { name: "min_p", label: "Min p", min: 0, max: 1, slider: [0, 1, 0.01, 0] },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, slider: [0.5, 2, 0.05, 1] },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, slider: [16, 4096, 16, 512], given: 512 },
  { name: "seed", label: "Seed", step: 1 },
];

class Settings {
  static TEXTS = ["system", "schema", "theme"];
  #store;
  #session;
  #sliders = new Map();  // name -> [slider, where it stands without a number]

  constructor(store, session) {
    [this.#store, this.#session] = [store, session];
    const kept = store.get("settings") ?? {};
    at("controls").append(...SAMPLING.map(row => this.#control(row)));
    for (const { name, given } of SAMPLING) at(name).value = kept[name] ?? given ?? "";
    for (const name of Settings.TEXTS) at(name).value = kept[name] ?? "";
    at("probabilities").checked = kept.probabilities ?? true;
    at("form_of_answers").open = Boolean(kept.schema);
    at("key").value = session.get("key") ?? "";
    for (const element of this.#elements()) element.addEventListener("input", () => this.#changed());
    at("key").addEventListener("change", () => session.set("key", at("key").value));
    this.#changed();
  }

  get key() { return at("key").value; }

  get system() { return at("system").value.trim(); }

  /** Fields of a request. Throws SettingError. */
  fields() {
    const fields = at("probabilities").checked ? { logprobs: true, top_logprobs: 5 } : {};
    for (const { name, label } of SAMPLING) {
      const element = at(name);
      if (!element.checkValidity()) throw new SettingError(element, `${label}: ${element.validationMessage}`);
      if (element.value !== "") fields[name] = element.valueAsNumber;
    }
    const schema = this.#schema();
    if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return fields;
  }

  #schema() {
    const text = at("schema").value.trim();
    if (!text) return null;
    let schema;
    try {
      schema = JSON.parse(text);
    } catch (error) {
      throw new SettingError(at("schema"), `The schema is not JSON: ${error.message}`);
    }
    if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
      throw new SettingError(at("schema"), 'The schema must be an object, such as {"type": "object"}.');
    }
    return schema;
  }

  #elements() {
    return [...SAMPLING.map(({ name }) => at(name)), ...Settings.TEXTS.map(at), at("probabilities")];
  }

  #changed() {
    for (const [name, [slider, neutral]] of this.#sliders) {
      slider.value = at(name).value === "" ? neutral : at(name).value;
      slider.parentElement.classList.toggle("unset", at(name).value === "");
    }
    document.documentElement.dataset.theme = at("theme").value;
    at("schema_error").textContent = "";
    at("schema").removeAttribute("aria-invalid");
    try {
      this.#schema();
    } catch (error) {
      at("schema_error").textContent = error.message;
      at("schema").setAttribute("aria-invalid", "true");
    }
    const kept = Object.fromEntries(this.#elements().map(element => [element.id, element.value]));
    this.#store.set("settings", { ...kept, probabilities: at("probabilities").checked });
  }

  #control({ name, label, min = "", max = "", step = "any", slider, given }) {
    const placeholder = name === "seed" ? "none" : given === undefined ? "model's" : "no limit";
    const number = make("input", { id: name, type: "number", min, max, step, placeholder });
    const row = make("div", { className: "control" }, make("label", { htmlFor: name, textContent: label }), number);
    if (slider) {
      const [least, most, by, neutral] = slider;
      const range = make("input", { type: "range", min: least, max: most, step: by, "aria-label": `${label}, slider` });
      range.addEventListener("input", () => {
        number.value = range.value;
        this.#changed();
      });
      this.#sliders.set(name, [range, neutral]);
      row.append(range);
    }
    return row;
  }
}
