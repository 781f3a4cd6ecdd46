"use strict";
// What a screen reader is told: an answer by whole sentences as it grows, and short notices. The words on the page itself are no
// live region: each token would interrupt the one before.

class Announcer {
  static MAX_LINES = 20;
  #element;
  #rest = "";

  constructor(element) { this.#element = element; }

  /** Says a notice. */
  say(text) {
    this.#element.append(make("p", { textContent: text }));
    while (this.#element.childElementCount > Announcer.MAX_LINES) this.#element.firstElementChild.remove();
  }

  /** An answer begins. What is left of one before, which was stopped, is not said. */
  begin() {
    this.#rest = "";
    this.say("The model answers.");
  }

  /** Adds to the answer, and says what of it is whole sentences or lines. */
  add(text) {
    this.#rest += text;
    const end = [...this.#rest.matchAll(/[.!?:;]\s|\n/g)].pop();
    if (end) this.#say(end.index + end[0].length);
  }

  /** Says what is left of the answer. */
  end() { this.#say(this.#rest.length); }

  #say(length) {
    const text = this.#rest.slice(0, length).trim();
    this.#rest = this.#rest.slice(length);
    if (text) this.say(text);
  }
}
