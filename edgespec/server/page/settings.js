// Settings of the pickers: kept in the browser, and written into a request.

import { byId, el } from "./dom.js";

const KEPT = "edgespec.settings";
const OWN = ["top_k", "min_p", "repetition_penalty", "gamma"]; // of the request's field `edgespec`
const COMMON = ["temperature", "top_p", "seed", "max_tokens"];
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const PICKERS = ["method", "sampling", "system", "theme", ...OWN, ...COMMON];
const CONTINUED = 256; // new tokens of a model without a chat template, which never ends a text
const NAMES = { auto: "auto: the fastest at the moment", ar: "ar: plain decoding, no guesses" };

export class Settings {
  // `changed` is called after every change.
  constructor(changed) {
    this.chat = true;
    this.sees = false;
    const kept = restore();
    for (const id of PICKERS) if (id !== "method" && id in kept) byId(id).value = kept[id];
    byId("show-drafts").checked = kept["show-drafts"] ?? false;
    this.wanted = kept.method ?? "auto";
    this.model = kept.model ?? "";
    this.#apply();
    byId("settings").addEventListener("input", (event) => {
      if (event.target.id === "method") this.wanted = byId("method").value;
      if (event.target.id === "models") this.model = byId("models").value;
      this.#apply();
      this.#keep();
      changed();
    });
  }

  get showDrafts() {
    return byId("show-drafts").checked;
  }

  // Shows the methods of a model, and only the settings that it accepts.
  offer({ methods, chat, sees, draws, speaks }) {
    this.chat = chat;
    this.makes = draws ? "picture" : speaks ? "speech" : "";
    this.sees = chat && sees;
    const names = [...new Set(["auto", ...methods, "ar"])];
    byId("method").replaceChildren(...names.map((name) => el("option", { value: name }, NAMES[name] ?? name)));
    byId("method").value = names.includes(this.wanted) ? this.wanted : "auto";
    byId("system-part").hidden = !chat;
  }

  // The fields of a request for a picture or speech, without its prompt.
  making() {
    const { temperature, seed, edgespec } = this.request();
    return { method: edgespec.method, temperature, seed };
  }

  // The fields of a request, without its text.
  request() {
    const own = { method: byId("method").value || "auto", show_drafts: true };
    const body = {};
    for (const name of [...COMMON, ...OWN]) {
      const field = byId(name);
      const used = !SAMPLING.includes(name) || byId("sampling").value === "custom";
      if (!used || field.value === "") continue;
      if (!field.checkValidity()) throw new Error(`${field.labels[0].textContent}: ${field.validationMessage}`);
      (OWN.includes(name) ? own : body)[name] = Number(field.value);
    }
    if (byId("sampling").value === "greedy") body.temperature = 0;
    if (!this.chat) body.max_tokens ??= CONTINUED;
    return { ...body, edgespec: own };
  }

  get system() {
    return this.chat ? byId("system").value.trim() : "";
  }

  #apply() {
    byId("custom").hidden = byId("sampling").value !== "custom";
    document.documentElement.dataset.theme = byId("theme").value;
  }

  #keep() {
    const kept = { "show-drafts": this.showDrafts, method: this.wanted, model: this.model };
    for (const id of PICKERS) if (id !== "method") kept[id] = byId(id).value;
    try {
      localStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {
      // no place to keep them: they last as long as the page
    }
  }
}

function restore() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}
