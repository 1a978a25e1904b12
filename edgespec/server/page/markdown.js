// Markdown by markdown-it, whose tokens become elements and text nodes here: no HTML is read or written, no image is loaded, and
// only links to the web and to mail can be followed, under the name of where they lead.

import { button, copy, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { linkTarget, named } from "./links.js";
import markdownit from "./vendor/markdown-it.esm.min.mjs";

const DEEPEST = 40; // lists in lists and quotes in quotes, two per list; deeper content becomes a paragraph
const BIDI = /[\u202a-\u202e\u2066-\u2069]/g; // characters that reverse the letters after them

// Definitions of references (`[name]: url`) are off: they would change blocks that are long there.
const parser = markdownit("default", { html: false, linkify: true, maxNesting: 2 * DEEPEST });
parser.disable(["reference", "image"]);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (url) => linkTarget(url) !== null;
parser.normalizeLinkText = (url) => url;
parser.block.ruler.before("table", "deep", tooDeep);

const shown = new WeakMap(); // element -> {source, blocks}: the source of its first blocks, which stay as they are

// Shows a text in an element. While it grows, all blocks except the last stay, and only the text after them is parsed
// again.
export function show(parent, text, growing = false) {
  let settled = shown.get(parent);
  if (!settled || parent.children.length < settled.blocks || !text.startsWith(settled.source)) {
    settled = { source: "", blocks: 0 };
    shown.set(parent, settled);
  }
  while (parent.children.length > settled.blocks) parent.lastElementChild.remove();
  let rest = text.slice(settled.source.length);
  const whole = rest.lastIndexOf("\n") + 1; // the last line may grow into something else
  const tokens = growing ? parser.parse(rest.slice(0, whole), {}) : [];
  const last = tokens.findLastIndex((token) => token.level === 0 && token.nesting >= 0);
  if (last > 0) {
    place(tokens.slice(0, last), parent, false);
    const source = rest.slice(0, lineStart(rest, tokens[last].map[0]));
    settled.source += source;
    settled.blocks = parent.children.length;
    rest = rest.slice(source.length);
  }
  place(parser.parse(rest, {}), parent, growing);
}

function lineStart(text, line) {
  const ends = /\r\n?|\n/g;
  for (; line > 0; line -= 1) ends.exec(text);
  return ends.lastIndex;
}

const ELEMENTS = {
  paragraph_open: () => el("p", { dir: "auto" }),
  heading_open: (token) => el(`h${Math.min(6, Number(token.tag[1]) + 2)}`, { dir: "auto" }), // below the page's own two
  blockquote_open: () => el("blockquote", { dir: "auto" }),
  bullet_list_open: () => el("ul"),
  ordered_list_open: (token) => el("ol", { start: token.attrGet("start") ?? 1 }),
  list_item_open: () => el("li", { dir: "auto" }),
  table_open: () => el("table"),
  thead_open: () => el("thead"),
  tbody_open: () => el("tbody"),
  tr_open: () => el("tr"),
  th_open: (token) => el("th", { dir: "auto", ...aligned(token) }),
  td_open: (token) => el("td", { dir: "auto", ...aligned(token) }),
  em_open: () => el("em"),
  strong_open: () => el("strong"),
  s_open: () => el("s"),
  link_open: (token, at, tokens) => named(token.attrGet("href"), labelOf(tokens, at)),
};

// Appends the elements of tokens; code that still grows keeps its plain color.
function place(tokens, parent, growing) {
  const open = [parent];
  tokens.forEach((token, at) => {
    if (token.hidden) return; // the paragraph of an item that is one
    if (token.nesting < 0) {
      const { outer, ends } = open.pop();
      if (ends) outer.append(...ends);
      return;
    }
    const here = open.at(-1).inner ?? open.at(-1);
    if (token.type === "inline") place(token.children, here, growing);
    else if (token.type === "text") here.append(token.content.replace(BIDI, ""));
    else if (token.type === "softbreak" || token.type === "hardbreak") here.append("\n");
    else if (token.type === "code_inline") here.append(el("code", { dir: "ltr" }, token.content));
    else if (token.type === "fence" || token.type === "code_block") here.append(code(token, growing && at === tokens.length - 1));
    else if (token.type === "hr") here.append(el("hr"));
    else if (token.nesting > 0) {
      const made = ELEMENTS[token.type](token, at, tokens);
      const { outer, inner } = made.outer ? made : { outer: made, inner: made };
      here.append(token.type === "table_open" ? scrolled(outer) : outer);
      open.push({ outer, inner, ends: made.ends });
    } else here.append(token.content);
  });
}

function labelOf(tokens, at) {
  let label = "";
  for (let next = at + 1; tokens[next].type !== "link_close"; next += 1) {
    label += tokens[next].type.endsWith("break") ? "\n" : tokens[next].content;
  }
  return label.replace(BIDI, "");
}

// The parser says how a cell is aligned in a style, which the page's policy does not let in.
function aligned(token) {
  const side = /:(right|center)$/.exec(token.attrGet("style") ?? "");
  return side ? { class: side[1] } : {};
}

function scrolled(table) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function code(token, growing) {
  const language = (token.info ?? "").trim().split(/\s/)[0];
  const text = token.content.replace(/\n$/, "");
  const inside = el("code", {}, text);
  if (!growing) highlight(inside, text, language);
  const copies = button("Copy", () => copy(text, copies), { "aria-label": "Copy the code" });
  return el(
    "div",
    { class: "code" },
    el("div", { class: "row", dir: "auto" }, el("span", { class: "hint" }, language), copies),
    el("pre", { dir: "ltr", tabindex: "0", role: "region", "aria-label": "Code" }, inside),
  );
}

// The first block rule: content nested too deep becomes a paragraph. The parser itself would drop it.
function tooDeep(state, line, end, silent) {
  if (silent || state.level < DEEPEST) return false;
  const map = [line, end];
  const content = state.getLines(line, end, state.blkIndent, false).trim();
  Object.assign(state.push("paragraph_open", "p", 1), { map });
  Object.assign(state.push("inline", "", 0), { map, content, children: [] });
  state.push("paragraph_close", "p", -1);
  state.line = end;
  return true;
}
