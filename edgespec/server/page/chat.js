// One conversation at a time: questions, answers, and where they are stored.

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
    this.conversation.title ||= title(text || files[0]?.name || "");
    await this.#answer();
  }

  // Asks a changed question in the place of an earlier one; what followed it is dropped.
  async edit(message, text) {
    await this.stop();
    const at = this.messages.indexOf(message);
    this.messages.splice(at, Infinity, { ...message, text });
    if (at === 0 && !this.conversation.named) this.conversation.title = title(text || message.files[0].name);
    await this.#answer();
  }

  // Asks again. The current answer, and what followed it, becomes an earlier version of the new one.
  async regenerate(message) {
    await this.stop();
    const { earlier, later, before } = this.#takeOut(message);
    await this.#answer({ earlier: [...earlier, before, ...later], later: [] });
  }

  // Shows another version of an answer, and what followed that version: -1 for the previous one, 1 for the next one.
  async turn(message, by) {
    await this.stop();
    if (!(by < 0 ? message.earlier : message.later)?.length) return;
    const { earlier, later, before } = this.#takeOut(message);
    const next = by < 0 ? earlier.pop() : later.shift();
    (by < 0 ? later.unshift.bind(later) : earlier.push.bind(earlier))(before);
    this.messages.push({ ...next.message, earlier, later }, ...next.after);
    await this.#keep(this.conversation);
    this.on.changed();
  }

  // Whether an answer was cut off and can be continued: only the last one, if it is text.
  goesOn(message) {
    const cut = ["length", "timed_out", "stopped", ""].includes(message.finish) && !message.problem;
    return cut && !this.running && Boolean(message.text) && !this.settings.makes && message === this.messages.at(-1);
  }

  // Continues an answer that was cut off.
  async goOn(message) {
    await this.stop();
    Object.assign(message, { finish: "", problem: "" });
    await this.#write(message, this.messages);
  }

  // Removes an answer and all messages after it from the conversation.
  #takeOut(message) {
    const [, ...after] = this.messages.splice(this.messages.indexOf(message));
    const { earlier = [], later = [], ...bare } = message;
    return { earlier: [...earlier], later: [...later], before: { message: bare, after } };
  }

  async #answer(versions = {}) {
    const said = [...this.messages];
    const message = { role: "assistant", text: "", thoughts: "", pieces: [], figures: {}, how: {}, finish: "", problem: "" };
    Object.assign(message, { model: this.model }, versions);
    this.messages.push(message);
    await this.#write(message, said);
  }

  // Has the rest of a message written, which is the last one; `said` is what the model reads.
  async #write(message, said) {
    const { conversation } = this;
    let ended;
    this.#ended = new Promise((resolve) => (ended = resolve));
    this.#abort = new AbortController();
    const { signal } = this.#abort;
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

  // Requests a picture or speech.
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
    const meter = new Meter(message.figures);
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
        meter.end(own);
        message.figures = meter.counted;
      }
      if (choice.finish_reason) message.finish = own?.timed_out ? "timed_out" : own?.finish ?? choice.finish_reason;
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
    const goesOn = said.at(-1).role === "assistant" && { continue_final_message: true };
    return ["v1/chat/completions", { model: this.model, messages, ...goesOn, ...settings }];
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
