"use strict";
// The conversation that is open: what is asked and answered in it.

class Chat {
  static SAVE_EVERY = 1000;  // milliseconds, of an answer that grows
  #settings;
  #conversations;
  #announcer;
  #likeliest;
  #changed;
  #running = null;  // an AbortController
  #last = null;  // the AnswerTurn that can be asked for again
  #failed = [];  // elements of what failed: no part of the conversation, they go when something is asked
  isKept = true;  // whether the browser could save it

  /** changed: called when one runs or ends, is opened or saved. */
  constructor({ settings, conversations, announcer, likeliest, changed }) {
    [this.#settings, this.#conversations, this.#announcer] = [settings, conversations, announcer];
    [this.#likeliest, this.#changed] = [likeliest, changed];
  }

  get isRunning() { return this.#running !== null; }

  /** Shows a conversation. An answer that grows in another is stopped. */
  open(conversation) {
    this.stop();
    this.#running = this.#last = null;
    this.#failed = [];
    this.conversation = conversation;
    this.#likeliest.hide();
    at("chat").replaceChildren();
    for (const message of conversation.messages) {
      if (message.role === "user") this.#append(userTurn(message.content));
      else this.#append((this.#last = this.#turn(message)).element);
    }
    this.#settle();
  }

  stop() { this.#running?.abort(); }

  /** Saves an answer that grows, before the page goes. */
  save() {
    if (this.isRunning && this.conversation.messages.at(-1)?.role === "assistant") this.#save(this.conversation);
  }

  /** Asks for an answer to a text. Throws SettingError. */
  send(text) {
    const fields = this.#settings.fields(), asked = userTurn(text), { messages } = this.conversation;
    this.#begin();
    this.#append(asked);
    messages.push({ role: "user", content: text });
    this.#answer(fields, () => this.#attempt(() => this.send(text)), () => {
      messages.pop();  // what got no answer is no part of it: if it was refused, all after it would be too
      return [asked];
    });
  }

  /** Asks for another answer in place of the last. Throws SettingError. */
  regenerate() {
    const fields = this.#settings.fields(), before = this.#last, { messages } = this.conversation;
    this.#begin();
    messages.pop();
    before.element.remove();
    this.#answer(fields, () => this.#attempt(() => this.regenerate()), isOpen => {
      messages.push(before.message);
      if (isOpen) this.#append((this.#last = before).element);
      return [];
    });
  }

  /** Does what may throw SettingError, unless an answer grows. */
  #attempt(action) {
    if (this.isRunning) return;
    try {
      action();
      at("input").focus();
    } catch (error) {
      showWrong(error);
    }
  }

  #begin() {
    for (const element of this.#failed.splice(0)) element.remove();
    this.#last?.setActions({});
    this.#likeliest.hide();
  }

  /** again: asks once more. takeBack: undoes the question where it got no answer, and returns its elements that stay for now; it is
   * told whether the conversation is still the one that is shown. */
  async #answer(fields, again, takeBack) {
    const conversation = this.conversation, running = this.#running = new AbortController();
    const turn = this.#turn({ role: "assistant", content: "" });
    this.#announcer.begin();
    this.#changed();
    let wrong = null;
    try {
      await this.#stream(fields, running.signal, turn, conversation);
    } catch (error) {
      wrong = error;
      if (!(error instanceof ServerError) && error.name !== "AbortError") console.error(error);
    }
    const stopped = wrong?.name === "AbortError", begun = conversation.messages.at(-1) === turn.message;
    const isOpen = this.conversation === conversation;
    if (begun && (isOpen || this.#conversations.get(conversation.id))) this.#save(conversation);  // not if it was deleted
    if (!isOpen) {
      if (!begun) takeBack(false);
      return;
    }
    this.#running = null;
    this.#announcer.end();
    if (!begun) this.#failed = takeBack(true);
    if (!begun || (wrong && !stopped)) {
      const message = stopped ? "Stopped before the first token." : wrong?.message ?? "The server ended the answer before it began.";
      const failed = errorTurn(message, { "Try again": begun ? () => this.#attempt(() => this.regenerate()) : again });
      this.#failed.push(this.#append(failed));
    } else {
      this.#announcer.say(stopped ? "Stopped." : "The answer is complete.");
    }
    this.#settle();
  }

  async #stream(fields, signal, turn, conversation) {
    const figures = new Figures();
    let saved = performance.now();
    for await (const chunk of ask(this.#request(fields), this.#settings.key, signal)) {
      signal.throwIfAborted();  // several chunks come at once
      figures.take(chunk);
      const follows = at("chat").scrollHeight - at("chat").scrollTop - at("chat").clientHeight < 40;
      if (figures.numTokens && conversation.messages.at(-1) !== turn.message) {
        conversation.messages.push(turn.message);
        this.#last = turn;
        this.#append(turn.element);
        this.#save(conversation);
      }
      for (const choice of chunk.choices) this.#announcer.add(turn.add(choice));
      turn.showFigures(figures.text);
      if (follows) at("chat").scrollTop = at("chat").scrollHeight;
      if (performance.now() - saved > Chat.SAVE_EVERY) {
        this.#save(conversation);
        saved = performance.now();
      }
    }
  }

  #request(fields) {
    const { system } = this.#settings;
    const said = this.conversation.messages.map(({ role, content }) => ({ role, content }));
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...said];
    return { messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...fields };
  }

  #turn(message) { return new AnswerTurn(message, tokens => this.#likeliest.watch(tokens)); }

  #save(conversation) {
    this.isKept = this.#conversations.save(conversation);
    this.#changed();
  }

  /** Nothing runs: the last answer can be asked for again. */
  #settle() {
    this.#last?.setActions({ "Regenerate": () => this.#attempt(() => this.regenerate()) });
    this.#changed();
  }

  #append(element) {
    at("chat").append(element);
    at("chat").scrollTop = at("chat").scrollHeight;
    return element;
  }
}
