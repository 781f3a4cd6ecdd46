"use strict";
// What the browser keeps for this page, as JSON by name. A browser that keeps nothing (private windows, blocked storage) is told
// by false and undefined.

class JsonStore {
  #area;
  #prefix;

  /** area: () => localStorage or sessionStorage, which may throw. */
  constructor(area, prefix) {
    this.#prefix = prefix;
    try {
      this.#area = area();
    } catch {
      this.#area = null;
    }
  }

  names() {
    const keys = this.#area ? Array.from({ length: this.#area.length }, (_, i) => this.#area.key(i)) : [];
    return keys.filter(key => key.startsWith(this.#prefix)).map(key => key.slice(this.#prefix.length));
  }

  get(name) {
    try {
      return JSON.parse(this.#area?.getItem(this.#prefix + name) ?? "null") ?? undefined;
    } catch {
      return undefined;  // not ours
    }
  }

  /** Whether it is kept. */
  set(name, value) {
    try {
      this.#area.setItem(this.#prefix + name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  remove(name) {
    this.#area?.removeItem(this.#prefix + name);
  }
}
