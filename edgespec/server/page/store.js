// Conversations in the browser's own database (IndexedDB). Where it is closed, as in some private windows, they last as long as the page.
//
// A conversation: {id, title, named, created, updated, messages}; `named` says that the title was given by hand. A message: {role, text,
// files?} of the user (a file is {name, text} or {name, picture}, a data URL), or {role, text, thoughts, pieces, figures, how, finish,
// problem, model, earlier, later} of the model; pieces are [kind, text] with kind accepted, refused or own. Other versions of an answer
// are {message, after}: the answer, and the messages that followed it.

const [DATABASE, VERSION, NAME] = ["edgespec", 1, "conversations"];

export class Store {
  #database = null;
  #memory = new Map();

  async open() {
    try {
      const request = indexedDB.open(DATABASE, VERSION);
      request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: "id" });
      this.#database = await done(request);
      return true;
    } catch {
      return false;
    }
  }

  // All, the latest first.
  async all() {
    const found = this.#database ? await done(this.#at("readonly").getAll()) : [...this.#memory.values()];
    return found.sort((one, other) => other.updated - one.updated);
  }

  async put(conversation) {
    if (this.#database) await done(this.#at("readwrite").put(conversation));
    else this.#memory.set(conversation.id, conversation);
  }

  async delete(id) {
    if (this.#database) await done(this.#at("readwrite").delete(id));
    else this.#memory.delete(id);
  }

  async clear() {
    if (this.#database) await done(this.#at("readwrite").clear());
    else this.#memory.clear();
  }

  #at(mode) {
    return this.#database.transaction(NAME, mode).objectStore(NAME);
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export function newConversation() {
  const id = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", created: Date.now(), updated: Date.now(), messages: [] };
}
