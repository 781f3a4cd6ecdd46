"use strict";
// The turns of a conversation, as elements.

function userTurn(text) {
  return make("article", { className: "turn user", "aria-label": "You", textContent: text });
}

/** What went wrong, and what may be done: {label: function}. */
function errorTurn(message, actions) {
  const buttons = Object.entries(actions).map(([label, onclick]) => make("button", { type: "button", textContent: label, onclick }));
  return make("div", { className: "turn error", role: "alert" },
    make("p", { textContent: message }), make("div", { className: "actions" }, ...buttons));
}

/** An answer, which grows. `message` is what the conversation keeps of it. */
class AnswerTurn {
  #queue = new TokenQueue();
  #thoughts;
  #content;
  #thinking;
  #summary = make("summary");
  #figures = make("p", { className: "figures" });
  #actions = make("div", { className: "actions" });
  #watch;

  /** watch: called with each TokenText whose tokens have probabilities to show. */
  constructor(message, watch) {
    this.message = message;
    this.#watch = watch;
    this.#thoughts = this.#tokenText("Thinking");
    this.#content = this.#tokenText("Answer");
    this.#thinking = make("details", { className: "thinking", hidden: true }, this.#summary, this.#thoughts.element);
    const parts = [this.#thinking, this.#content.element, this.#figures, this.#actions];
    this.element = make("article", { className: "turn assistant", "aria-label": "Model" }, ...parts);
    this.#show({ content: message.content, reasoning: message.reasoning ?? "" });
    this.showFigures(message.figures);
  }

  /** Adds what a chunk of the stream brings. Returns the new text that is no thinking. */
  add(choice) {
    if (choice.logprobs?.content.length) this.#queue.add(choice.logprobs.content);
    const { content = "", reasoning = choice.delta.reasoning_content ?? "" } = choice.delta;
    this.message.content += content;
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    this.#show({ content, reasoning });
    return content;
  }

  showFigures(text = "") {
    this.message.figures = text;
    this.#figures.textContent = text;
  }

  /** actions: {label: function}, of the last answer alone. */
  setActions(actions) {
    const button = ([label, onclick]) => make("button", { type: "button", textContent: label, onclick });
    this.#actions.replaceChildren(...Object.entries(actions).map(button));
  }

  #tokenText(label) {
    const tokens = new TokenText({ className: "text", role: "group", "aria-label": label });
    this.#watch(tokens);
    return tokens;
  }

  #show({ content, reasoning }) {
    if (reasoning) this.#thoughts.add(reasoning, this.#queue);
    if (content) this.#content.add(content, this.#queue);
    this.#thinking.hidden = !this.#thoughts.text;
    this.#summary.textContent = this.#content.text ? "Thought" : "Thinking…";
    for (const { element } of [this.#thoughts, this.#content]) {
      if (element.getElementsByClassName("token").length) {  // the arrow keys walk them
        element.tabIndex = 0;
        element.setAttribute("aria-label", "Arrow keys tell the probabilities of these tokens");
      }
    }
  }
}
