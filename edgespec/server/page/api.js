// The server's API, as any client uses it. The key, where one is asked for, is kept until the tab is closed.

const KEY = "edgespec.key";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Server {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  // Lists the models: each {id, edgespec: {methods, context, operators, chat, loaded}}.
  async models() {
    const answer = await this.#fetch("v1/models", {});
    return (await answer.json()).data;
  }

  // Asks for a picture -> {data: [{b64_json}], edgespec: [how]}; `signal` ends it.
  async draw(body, signal) {
    return (await this.#ask("v1/images/generations", body, signal)).json();
  }

  // Asks for speech -> a WAV file, as a blob; `signal` ends it.
  async speak(body, signal) {
    const file = await (await this.#ask("v1/audio/speech", body, signal)).arrayBuffer();
    const head = new DataView(file); // of a stream, whose length was not known
    head.setUint32(4, file.byteLength - 8, true);
    head.setUint32(40, file.byteLength - 44, true);
    return new Blob([file], { type: "audio/wav" });
  }

  // Asks, and yields the events of the stream; `signal` ends it.
  async *stream(path, body, signal) {
    const answer = await this.#ask(path, { ...body, stream: true }, signal);
    for await (const line of lines(answer.body)) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, 500);
      yield event;
    }
    throw new Refused("the connection ended before the answer did", 0);
  }

  #ask(path, body, signal) {
    return this.#fetch(path, { method: "POST", body: JSON.stringify(body), signal }, { "Content-Type": "application/json" });
  }

  async #fetch(path, options, headers = {}) {
    if (this.key) headers.Authorization = `Bearer ${latin(this.key)}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("the server does not answer", 0);
    }
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => null);
    throw new Refused(said?.error?.message ?? `the server answered ${answer.status}`, answer.status);
  }
}

// Headers hold bytes, a letter each; the server reads a key as UTF-8.
function latin(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
