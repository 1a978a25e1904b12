// The list of conversations: search, names, and what can be done with each.

import { button, byId, el, isSend } from "./dom.js";

export class ConversationList {
  #renaming = false;

  // `actions`: current() -> a conversation, open(conversation), rename(conversation, title), remove(conversation).
  constructor(store, actions) {
    Object.assign(this, { store, actions });
    byId("search").addEventListener("input", () => this.show());
  }

  // Shows the conversations as they are kept now, and of a search those that have its words.
  async show() {
    if (this.#renaming) return;
    const all = await this.store.all();
    const words = folded(byId("search").value).split(/\s+/).filter(Boolean);
    const found = words.length ? all.filter((one) => matches(one, words)) : all;
    if (this.#renaming) return;
    const buttons = () => [...byId("list").querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement);
    byId("list").replaceChildren(...found.map((conversation) => this.#row(conversation)));
    if (focused >= 0) (buttons()[focused] ?? byId("new")).focus();
    byId("none-found").textContent = words.length && !found.length ? "No conversation has these words." : "";
    byId("search").hidden = !all.length;
    byId("delete-all").disabled = !all.length;
  }

  #row(conversation) {
    const name = conversation.title || "Untitled";
    const current = conversation.id === this.actions.current().id;
    const open = () => this.actions.open(conversation);
    const row = el(
      "li",
      {},
      button(name, open, { class: "open", dir: "auto", title: name, "aria-current": String(current) }),
      button("✎", () => this.#rename(conversation, row), { "aria-label": `Rename ${name}` }),
      button("×", () => this.actions.remove(conversation), { "aria-label": `Delete ${name}` }),
    );
    return row;
  }

  #rename(conversation, row) {
    this.#renaming = true;
    const field = el("input", { type: "text", dir: "auto", maxlength: "200", "aria-label": "Name of the conversation" });
    field.value = conversation.title;
    const at = [...byId("list").children].indexOf(row);
    const close = async (title) => {
      if (!this.#renaming) return;
      this.#renaming = false;
      if (title && title !== conversation.title) await this.actions.rename(conversation, title);
      await this.show();
      byId("list").children[at]?.querySelector(".open").focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) event.stopPropagation();
      if (isSend(event)) close(field.value.trim());
      else if (event.key === "Escape" && !event.isComposing) close("");
    });
    field.addEventListener("blur", () => close(field.value.trim()));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }
}

function matches(conversation, words) {
  const text = folded([conversation.title, ...conversation.messages.map((message) => message.text)].join("\n"));
  return words.every((word) => text.includes(word));
}

// Without case, and full-width letters as others.
function folded(text) {
  return text.normalize("NFKC").toLowerCase();
}
