// The messages of a conversation on the page, and what can be done with each.

import { button, copy, el, isSend } from "./dom.js";
import { view } from "./files.js";
import { details, figures, reason } from "./figures.js";
import { show as showMarkdown } from "./markdown.js";

const ENDS = {
  stopped: "stopped",
  length: "cut: no more tokens were allowed",
  context: "cut: the context is full",
  timed_out: "cut: the server's time was over",
};
const KINDS = new Set(["accepted", "refused", "own"]);
const NEAR = 80; // pixels from the end within which the view follows the text

export class Messages {
  #parts = new WeakMap(); // message -> its elements

  // `actions`: messages(), edit(message, text), regenerate(message), goOn(message), turn(message, by).
  constructor(log, list, actions) {
    this.log = log;
    this.list = list;
    this.actions = actions;
    this.drafts = false;
  }

  // Shows all messages of a conversation.
  show(messages) {
    this.list.replaceChildren();
    for (const message of messages) this.add(message);
    this.log.scrollTop = this.log.scrollHeight;
  }

  add(message) {
    const parts = message.role === "user" ? this.#asked(message) : this.#answered();
    this.#parts.set(message, parts);
    this.list.append(parts.item);
    this.refresh(message);
  }

  // Shows a message as it is now.
  refresh(message, running = false) {
    const parts = this.#parts.get(message);
    if (!parts) return;
    const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
    if (message.role === "user") {
      parts.text.replaceChildren(el("p", { class: "raw", dir: "auto" }, message.text));
    } else {
      this.#refreshAnswer(message, parts, running);
    }
    if (follow) this.log.scrollTop = this.log.scrollHeight;
  }

  #refreshAnswer(message, parts, running) {
    const coloured = this.drafts && message.pieces.length > 0;
    if (parts.coloured !== coloured) parts.text.replaceChildren();
    parts.coloured = coloured;
    if (message.files?.length) parts.text.replaceChildren(...message.files.map(view));
    else if (coloured) showPieces(parts.text, message.pieces);
    else showMarkdown(parts.text, message.text, running);
    parts.thoughts.hidden = !message.thoughts || coloured; // pieces have them
    if (!parts.thoughts.hidden) showMarkdown(parts.thoughts.lastElementChild, message.thoughts, running);
    const thinks = !message.text; // they are folded when the answer begins
    if (parts.thinks !== thinks) parts.thoughts.open = parts.thinks = thinks;
    parts.figures.textContent = figures(message.figures) || "How it was made";
    parts.counted.textContent = details(message.figures, message.how).join(" · ");
    parts.reason.textContent = reason(message.how);
    parts.details.hidden = !message.figures?.tokens && !message.how?.method_used;
    parts.end.textContent = running ? "" : ENDS[message.finish] ?? (message.finish || message.problem ? "" : "interrupted");
    parts.problem.textContent = message.problem ?? "";
    parts.row.hidden = running;
    parts.goOn.hidden = !this.actions.goesOn(message);
    const { earlier = [], later = [] } = message;
    parts.versions.hidden = !earlier.length && !later.length;
    parts.place.textContent = `${earlier.length + 1} of ${earlier.length + 1 + later.length}`;
    parts.back.disabled = !earlier.length;
    parts.forth.disabled = !later.length;
    parts.item.setAttribute("aria-busy", String(running));
  }

  #asked(message) {
    const text = el("div", { class: "text" });
    const row = el("div", { class: "row" });
    const change = button("Edit", () => this.#edit(message, text, row));
    row.append(change, copyButton(() => message.text));
    const files = (message.files ?? []).map((file) =>
      file.picture ? view(file) : el("details", { class: "attached" }, el("summary", { dir: "auto" }, file.name), code(file.text)),
    );
    return { item: el("li", { class: "message user" }, el("h2", {}, "You"), ...files, text, row), text };
  }

  #answered() {
    const parts = {
      text: el("div", { class: "text" }),
      thoughts: el("details", { class: "thoughts" }, el("summary", {}, "Thoughts"), el("div", { class: "text" })),
      figures: el("summary", { class: "hint figures" }),
      counted: el("p", { class: "hint counted" }),
      reason: el("p", { class: "hint reason" }),
      end: el("p", { class: "hint end" }),
      problem: el("p", { class: "problem" }),
      row: el("div", { class: "row" }),
      item: el("li", { class: "message assistant" }, el("h2", {}, "Model")),
    };
    const message = () => this.#messageOf(parts);
    parts.details = el("details", { class: "details" }, parts.figures, parts.counted, parts.reason);
    parts.goOn = button("Continue", () => this.actions.goOn(message()));
    parts.back = button("‹", () => this.actions.turn(message(), -1), { "aria-label": "Earlier version" });
    parts.place = el("span", { class: "hint" });
    parts.forth = button("›", () => this.actions.turn(message(), 1), { "aria-label": "Later version" });
    parts.versions = el("span", { class: "versions" }, parts.back, parts.place, parts.forth);
    parts.row.append(
      parts.goOn,
      button("Regenerate", () => this.actions.regenerate(message())),
      copyButton(() => message().text),
      parts.versions,
    );
    const { text, thoughts, problem, end, row } = parts;
    parts.item.append(thoughts, text, problem, end, parts.details, row);
    return parts;
  }

  #messageOf(parts) {
    return this.actions.messages().find((message) => this.#parts.get(message) === parts);
  }

  #edit(message, text, row) {
    const area = el("textarea", { rows: "3", dir: "auto", "aria-label": "Edit the message" });
    area.value = message.text;
    const close = () => {
      this.refresh(message);
      row.hidden = false;
      row.firstElementChild.focus();
    };
    const save = () => {
      if (!area.value.trim() && !message.files?.length) return;
      this.actions.edit(message, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (isSend(event)) {
        event.preventDefault();
        save();
      } else if (event.key === "Escape" && !event.isComposing) {
        event.stopPropagation();
        close();
      }
    });
    const buttons = el("div", { class: "row" }, button("Save and ask again", save), button("Cancel", close));
    text.replaceChildren(area, buttons);
    row.hidden = true;
    area.focus();
  }
}

// Writes pieces into an element; existing ones stay.
function showPieces(parent, pieces) {
  const place = parent.firstElementChild ?? el("p", { class: "raw", dir: "auto" });
  if (!place.parentElement) parent.append(place);
  for (let at = Math.max(0, place.children.length - 1); at < pieces.length; at += 1) {
    const [kind, text] = pieces[at];
    const made = kind === "refused" ? refused(text) : el("span", { class: KINDS.has(kind) ? kind : "own" }, text);
    const there = place.children[at];
    if (there) there.replaceWith(made);
    else place.append(made);
  }
}

// A line that was guessed and refused is a sign, not a line.
function refused(text) {
  return el("del", { class: "refused", "aria-hidden": "true" }, text.replaceAll("\n", "⏎"));
}

function code(text) {
  return el("pre", { dir: "auto", tabindex: "0", role: "region", "aria-label": "Attached text" }, el("code", {}, text));
}

function copyButton(text) {
  const made = button("Copy", () => copy(text(), made));
  return made;
}
