"use strict";
// Text as the tokens that it was sampled as. The server sends the text of an answer and the log-probabilities of its tokens; marks
// such as </think> are tokens and no text, and a text may lag behind its tokens, so the two are matched here.

/** Tokens that have come and whose text has not: {text, entries}, an entry being one of OpenAI's `logprobs.content`. */
class TokenQueue {
  #decoder = new TextDecoder();
  #incomplete = [];  // tokens that end within a character
  #waiting = [];

  add(entries) {
    for (const entry of entries) {
      const text = entry.bytes ? this.#decoder.decode(Uint8Array.from(entry.bytes), { stream: true }) : entry.token;
      this.#incomplete.push(entry);
      if (text) this.#waiting.push({ text, entries: this.#incomplete.splice(0) });
    }
  }

  /** The next token of a text that goes on with `rest`, and as much of `rest` as is its own; null if it has not come whole, or
   * there is none. Tokens that are no part of the text are left out. Where none begins `rest`, what is before the first that is
   * found in it, without entries. */
  next(rest) {
    if (!rest) return null;
    for (const [i, { text, entries }] of this.#waiting.entries()) {
      const trimmed = text.trimStart();
      const own = rest.startsWith(text) ? text.length
        : /^\s/.test(rest) && rest.startsWith(text, 1) ? text.length + 1  // SentencePiece's tokens lose their blank
        : rest.startsWith(trimmed) ? trimmed.length  // blanks at the beginning of a text are left out
        : 0;
      if (own) {
        this.#waiting.splice(0, i + 1);
        return { text: rest.slice(0, own), entries };
      }
      if (text.startsWith(rest) || trimmed.startsWith(rest)) {  // the rest of it is held back: it may become a stop string
        this.#waiting.splice(0, i);
        return null;
      }
    }
    return this.#skipped(rest);
  }

  #skipped(rest) {
    const found = this.#waiting.map(({ text }) => text.trim() ? rest.indexOf(text) : -1);
    const least = Math.min(...found.filter(at => at > 0));
    this.#waiting.splice(0, least < Infinity ? found.indexOf(least) : this.#waiting.length);
    return least < Infinity ? { text: rest.slice(0, least), entries: null } : null;
  }
}

/** An element that shows a text, which grows, token by token. What no token was found for is shown as it is. */
class TokenText {
  static UNSURE = Math.log(0.5);  // a token that is less likely is underlined
  #entries = new WeakMap();  // span -> its entries
  #rest = new Text();

  constructor(named) {
    this.text = "";
    this.element = make("div", named, this.#rest);
  }

  add(text, queue) {
    this.text += text;
    let rest = this.#rest.data + text;
    for (let token; (token = queue.next(rest)); rest = rest.slice(token.text.length)) this.#show(token);
    this.#rest.data = rest;
  }

  /** The entries of a span's token, in which it lies. */
  entriesOf(span) { return this.#entries.get(span); }

  #show({ text, entries }) {
    if (!entries) return this.#rest.before(text);
    const unsure = entries.some(entry => entry.logprob < TokenText.UNSURE);
    const span = make("span", { className: unsure ? "token unsure" : "token", textContent: text });
    this.#entries.set(span, entries);
    this.#rest.before(span);
  }
}
