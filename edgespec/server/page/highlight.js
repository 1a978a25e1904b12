// Colors for code: highlight.js says which words are what, and is loaded with the first code whose language is named.

import { el } from "./dom.js";

const LONGEST = 10_000; // characters of code, and of a line of it, that get colors: the time may grow with their square
const WIDEST = 400;
const SLOW = 100; // milliseconds; a slower language gets no colors until the page is reloaded
const slow = new Set();
let library = null;

// Gives the text of an element its colors, if the language is known; until then, and otherwise, it stays as it is.
export async function highlight(element, text, language) {
  if (!language || text.length > LONGEST || text.split("\n").some((line) => line.length > WIDEST)) return;
  library ??= import("./vendor/highlight.min.mjs");
  const found = (await library).default;
  if (!found.getLanguage(language) || slow.has(language)) return;
  const began = performance.now();
  const made = found.highlight(text, { language, ignoreIllegals: true });
  if (performance.now() - began > SLOW) slow.add(language);
  if (!made.errorRaised) element.replaceChildren(...colored(made._emitter.root.children));
}

// Elements of a tree whose nodes are texts or {scope, children}; a part in another language has no scope, but is a tree.
function colored(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    const name = node.scope?.startsWith("language:") ? undefined : node.scope?.split(".")[0];
    return el("span", { class: name && `hl-${name}` }, ...colored(node.children));
  });
}
