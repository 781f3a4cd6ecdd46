"use strict";
// The server's state, read once a second while the page is seen: its model, and what it is doing.

class Status {
  static SHOWN = ["running", "waiting", "kv", "cached"];
  #settings;

  constructor(settings) {
    this.#settings = settings;
    at("key").addEventListener("change", () => this.#showName());
    this.#showName();
    this.#show();
    setInterval(() => document.hidden || this.#show(), 1000);
  }

  async #showName() {
    const models = await read("v1/models", this.#settings.key);
    if (models !== null) document.title = at("model").textContent = JSON.parse(models).data[0].id;
  }

  async #show() {
    const text = await read("metrics", this.#settings.key);
    const value = name => Number(text?.match(new RegExp(`^(?:jaxserve|vllm):${name}\\{.*\\} (.*)$`, "m"))?.[1]);
    const looked = value("prefix_cache_queries_total");
    const shown = {
      running: value("num_requests_running"),
      waiting: value("num_requests_waiting"),
      kv: percent(value("kv_cache_usage_perc")),
      cached: looked ? percent(value("prefix_cache_hits_total") / looked) : "–",
    };
    for (const name of Status.SHOWN) at(name).textContent = String(shown[name]).startsWith("NaN") ? "–" : shown[name];
  }
}
