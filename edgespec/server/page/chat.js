// One conversation at a time: what is asked, what comes, and where it is kept.

import { Refused } from "./api.js";
import { Meter } from "./figures.js";
import { content, dataUrl, written } from "./files.js";
import { newConversation } from "./store.js";

const KEEP = 2000; // milliseconds between two times that an answer on its way is kept
const TITLE = 60; // characters

export class Chat {
  #abort = null;
  #ended = Promise.resolve();

  // `on`: started(message), grown(message), ended(message), changed(), key().
  constructor(server, store, settings, on) {
    Object.assign(this, { server, store, settings, on });
    this.conversation = newConversation();
    this.model = "";
  }

  get running() {
    return this.#abort !== null;
  }

  get messages() {
    return this.conversation.messages;
  }

  // Ends the answer on its way, and waits until it has ended.
  async stop() {
    this.#abort?.abort();
    await this.#ended;
  }

  async open(conversation) {
    await this.stop();
    this.conversation = conversation;
    this.on.changed();
  }

  async send(text, files) {
    await this.stop();
    this.messages.push({ role: "user", text, files });
    this.conversation.title ||= title(text || files[0].name);
    await this.#answer();
  }

  // Asks a changed question in the place of an earlier one; what followed it is dropped.
  async edit(message, text) {
    await this.stop();
    const at = this.messages.indexOf(message);
    this.messages.splice(at, Infinity, { ...message, text });
    if (at === 0) this.conversation.title = title(text || message.files[0].name);
    await this.#answer();
  }

  // Drops an answer and what followed it, and asks again.
  async regenerate(message) {
    await this.stop();
    this.messages.splice(this.messages.indexOf(message));
    await this.#answer();
  }

  async #answer() {
    const { conversation } = this;
    const message = { role: "assistant", text: "", thoughts: "", pieces: [], figures: {}, how: {}, finish: "", problem: "" };
    message.model = this.model;
    let ended;
    this.#ended = new Promise((resolve) => (ended = resolve));
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    const said = [...this.messages];
    this.messages.push(message);
    this.on.changed();
    this.on.started(message);
    try {
      await this.#keep(conversation);
      if (this.settings.makes) await this.#make(message, said.at(-1).text, signal);
      else await this.#take(message, this.#asked(said), signal);
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.problem = error.message;
      if (error instanceof Refused && error.status === 401) this.on.key();
    } finally {
      await this.#keep(conversation);
      this.#abort = null;
      ended();
      this.on.ended(message);
    }
  }

  // Has a picture drawn, or a text spoken.
  async #make(message, text, signal) {
    const asked = { model: this.model, ...this.settings.making() };
    if (this.settings.makes === "speech") {
      const spoken = await this.server.speak({ ...asked, input: text }, signal);
      message.files = [{ name: text, sound: await dataUrl(spoken) }];
    } else {
      const answer = await this.server.draw({ ...asked, prompt: text }, signal);
      message.files = [{ name: text, picture: `data:image/png;base64,${answer.data[0].b64_json}` }];
      [message.how] = answer.edgespec;
    }
    message.finish = "stop";
    this.on.grown(message);
  }

  async #take(message, [path, body], signal) {
    const meter = new Meter();
    let kept = performance.now();
    for await (const event of this.server.stream(path, body, signal)) {
      const [choice] = event.choices;
      if (!choice) continue;
      message.text += choice.delta?.content ?? choice.text ?? "";
      message.thoughts += choice.delta?.reasoning_content ?? "";
      const own = event.edgespec?.[0];
      if (own?.texts) {
        meter.add(own, performance.now());
        message.figures = meter.counted;
        for (const kind of ["accepted", "refused", "own"]) grow(message.pieces, kind, own.texts[kind]);
      } else if (own) {
        message.how = own;
      }
      if (choice.finish_reason) message.finish = own?.late ? "late" : own?.finish ?? choice.finish_reason;
      this.on.grown(message);
      if (performance.now() - kept > KEEP) {
        kept = performance.now();
        await this.#keep(this.conversation);
      }
    }
  }

  // Path and body of the request for the answer to these messages.
  #asked(said) {
    const settings = this.settings.request();
    if (!this.settings.chat) {
      const prompt = said.map((message) => (message.role === "user" ? written(message) : message.text)).join("");
      return ["v1/completions", { model: this.model, prompt, ...settings }];
    }
    const { system } = this.settings;
    const messages = said.map((message) => ({
      role: message.role,
      content: message.role === "user" ? content(message) : message.text,
    }));
    if (system) messages.unshift({ role: "system", content: system });
    return ["v1/chat/completions", { model: this.model, messages, ...settings }];
  }

  async #keep(conversation) {
    conversation.updated = Date.now();
    await this.store.put(conversation).catch(() => {}); // a full disk must not end an answer
    this.on.kept();
  }
}

// Adds a piece; one of the same kind as the last grows it.
function grow(pieces, kind, text) {
  if (!text) return;
  const last = pieces.at(-1);
  if (last?.[0] === kind) last[1] += text;
  else pieces.push([kind, text]);
}

function title(text) {
  return [...text.trim().split("\n")[0]].slice(0, TITLE).join("");
}
