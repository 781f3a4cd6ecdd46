"use strict";
// The conversations that this browser keeps: {id, updated, messages}, a message being {role, content} and, of the model's,
// {reasoning, figures}. They are bounded in number and size; those that were not used for the longest time go first.

class Conversations {
  static MAX_NUMBER = 100;
  static MAX_CHARACTERS = 4e6;  // of all as JSON; browsers hold about five million for a server
  #store;
  #held = new Map();  // id -> conversation

  constructor(store) {
    this.#store = store;
    for (const id of store.names()) this.refresh(id);
  }

  /** The one with this id, or undefined. */
  get(id) { return this.#held.get(id); }

  /** The last used first. */
  all() { return [...this.#held.values()].sort((a, b) => b.updated - a.updated); }

  /** One without messages, which is kept once it is saved. */
  begin() {
    const random = crypto.getRandomValues(new Uint32Array(2));
    return { id: Array.from(random, x => x.toString(36)).join(""), updated: Date.now(), messages: [] };
  }

  /** Keeps a conversation, or its new messages. Returns whether the browser could; the page has it until it is closed anyway. */
  save(conversation) {
    conversation.updated = Date.now();
    this.#held.set(conversation.id, conversation);
    const oldest = this.all().filter(other => other !== conversation);
    const size = x => JSON.stringify(x).length;
    let left = Conversations.MAX_CHARACTERS - this.all().reduce((sum, other) => sum + size(other), 0);
    while (oldest.length && (left < 0 || this.#held.size > Conversations.MAX_NUMBER)) {
      const gone = oldest.pop();
      left += size(gone);
      this.remove(gone.id);
    }
    return this.#store.set(conversation.id, conversation);
  }

  remove(id) {
    this.#held.delete(id);
    this.#store.remove(id);
  }

  /** Reads one again that another tab has changed. */
  refresh(id) {
    const found = this.#store.get(id);
    const whole = Array.isArray(found?.messages) && Number.isFinite(found.updated)
      && found.messages.every(message => typeof message?.content === "string" && typeof message.role === "string");
    if (whole) this.#held.set(id, { ...found, id });
    else this.#held.delete(id);
  }

  /** All of them as JSON, to be saved in a file. */
  exported() {
    return JSON.stringify({ format: "jaxserve conversations", version: 1, conversations: this.all() }, null, 1);
  }

  static title(conversation) {
    const first = conversation.messages.find(message => message.role === "user");
    return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 60) : "New chat";
  }
}
