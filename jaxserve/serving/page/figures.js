"use strict";
// What is told of an answer: its tokens and their rate, the wait for the first, the share of its prompt that was cached.

class Figures {
  static ENDS = { length: "cut off: no more tokens were allowed", abort: "ended by the server", error: "ended by an error" };
  #started = performance.now();
  #first = null;
  #last = null;
  #usage = null;
  #end = null;

  /** Reads a chunk, whose usage is that so far. */
  take(chunk) {
    const before = this.numTokens;
    this.#usage = chunk.usage ?? this.#usage;
    this.#end = chunk.choices[0]?.finish_reason ?? this.#end;
    if (this.numTokens > before) {
      this.#last = performance.now();
      this.#first ??= { time: this.#last, numTokens: this.numTokens };
    }
  }

  get numTokens() { return this.#usage?.completion_tokens ?? 0; }

  get text() {
    if (!this.numTokens) return "";
    const prompt = this.#usage.prompt_tokens, cached = this.#usage.prompt_tokens_details?.cached_tokens;
    const thought = this.#usage.completion_tokens_details?.reasoning_tokens;
    const rate = (this.numTokens - this.#first.numTokens) / (this.#last - this.#first.time) * 1000;
    return [
      `${this.numTokens} tokens` + (thought ? `, ${thought} of thinking` : ""),
      Number.isFinite(rate) && rate > 0 && `${rate.toFixed(1)} tokens/s`,
      `first after ${Math.round(this.#first.time - this.#started)} ms`,
      `prompt ${prompt} tokens` + (cached === undefined ? "" : `, ${percent(cached / prompt)} cached`),
      Figures.ENDS[this.#end],
    ].filter(Boolean).join(" · ");
  }
}
