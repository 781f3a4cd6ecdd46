"use strict";
// The likeliest tokens in place of the one that the model took, beside it: under the pointer, or by the arrow keys.

class Likeliest {
  #element;
  #announcer;
  #chosen = null;  // the span that it is shown for

  constructor(element, announcer) {
    [this.#element, this.#announcer] = [element, announcer];
  }

  /** Shows them for the tokens of a TokenText. */
  watch(tokens) {
    const element = tokens.element;
    element.addEventListener("pointerover", event => {
      if (event.target.classList.contains("token")) this.#show(tokens, event.target);
    });
    element.addEventListener("pointerleave", () => this.hide());
    element.addEventListener("blur", () => this.hide());
    element.addEventListener("keydown", event => {
      const spans = element.getElementsByClassName("token");
      const at = Array.prototype.indexOf.call(spans, this.#chosen);
      const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? spans.length - 1 : at - 1, Home: 0, End: spans.length - 1 }[event.key];
      if (to === undefined || !spans[to]) return;
      event.preventDefault();
      this.#show(tokens, spans[to]);
      spans[to].scrollIntoView({ block: "nearest" });
      this.#announcer.say(tokens.entriesOf(spans[to]).map(Likeliest.spoken).join("; "));
    });
  }

  hide() {
    this.#chosen?.classList.remove("chosen");
    this.#chosen = null;
    this.#element.hidden = true;
  }

  #show(tokens, span) {
    this.hide();
    this.#chosen = span;
    span.classList.add("chosen");
    this.#element.replaceChildren(...tokens.entriesOf(span).map(Likeliest.#table));
    this.#element.hidden = false;
    const [place, size] = [span.getClientRects()[0] ?? span.getBoundingClientRect(), this.#element.getBoundingClientRect()];
    const below = place.bottom + 4 + size.height < innerHeight;
    this.#element.style.top = (below ? place.bottom + 4 : Math.max(0, place.top - 4 - size.height)) + "px";
    this.#element.style.left = Math.max(0, Math.min(place.left, innerWidth - size.width - 8)) + "px";
  }

  /** The rows of an entry: [token, probability, whether it was taken]. Of two tokens with one text both are rows. */
  static #rows(entry) {
    const same = top => top.token === entry.token && top.logprob === entry.logprob;
    const rows = entry.top_logprobs.map(top => [top.token, Math.exp(top.logprob), same(top)]);
    const taken = rows.findIndex(row => row[2]);
    if (taken < 0) rows.push([entry.token, Math.exp(entry.logprob), true]);  // it was none of the likeliest
    return rows.map((row, i) => [row[0], row[1], row[2] && (taken < 0 || i === taken)]);
  }

  static #table(entry) {
    const line = ([token, probability, taken]) => make("tr", { className: taken ? "chosen" : "" },
      make("th", { scope: "row", textContent: JSON.stringify(token).slice(1, -1).replaceAll(" ", "␣") }),
      make("td", { textContent: percent(probability) }));
    return make("table", {}, make("tbody", {}, ...Likeliest.#rows(entry).map(line)));
  }

  static spoken(entry) {
    const rows = Likeliest.#rows(entry);
    const say = ([token, probability]) => `${JSON.stringify(token)} ${percent(probability)}`;
    const others = rows.filter(row => !row[2]).map(say);
    return say(rows.find(row => row[2])) + (others.length ? ", others: " + others.join(", ") : "");
  }
}
