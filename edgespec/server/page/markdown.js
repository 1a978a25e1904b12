// A light Markdown: headings, lists, quotes, code, tables, rules, emphasis, links. Each piece of a model's text becomes an element
// or a text node; no HTML is read, no image is loaded, and only links to the web and to mail can be followed.

import { el } from "./dom.js";

const DEEPEST = 6; // lists in lists, quotes in quotes, emphasis in emphasis
const LONGEST = 20000; // characters of a paragraph that are looked at
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const COLUMNS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const BARE = /https?:\/\/[^\s<>"'`)\]]+/y;

// Shows a text in an element. Blocks that are as before stay: a text that grows costs what its last block costs.
export function show(parent, text) {
  const blocks = split(text.split("\n"));
  const there = [...parent.children];
  blocks.forEach((source, at) => {
    const old = there[at];
    if (old && old.source === source) return;
    const made = block(source.split("\n"), 0);
    made.source = source;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  for (const old of there.slice(blocks.length)) old.remove();
}

// Lines -> the source of each block.
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function endOf(lines, start) {
  const fence = FENCE.exec(lines[start]);
  let at = start + 1;
  if (fence) {
    const closes = (line) => line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
    while (at < lines.length && !closes(lines[at])) at += 1;
    return Math.min(at + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || isRule(lines[start])) return at;
  const list = ITEM.test(lines[start]);
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) {
      const next = lines[at + 1] ?? "";
      if (list && (ITEM.test(next) || /^ {2,}\S/.test(next))) continue;
      return at;
    }
    if (list ? !/^\s/.test(line) && isRule(line) : isRule(line)) return at;
    if (!/^\s/.test(line) && (FENCE.test(line) || HEADING.test(line))) return at;
    if (QUOTE.test(line) !== QUOTE.test(lines[start]) && !list) return at;
    if (!list && !QUOTE.test(line) && ITEM.test(line)) return at;
  }
  return at;
}

const isRule = (line) => line.length < 200 && RULE.test(line);

function block(lines, depth) {
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    return el("pre", { dir: "ltr", tabindex: "0", role: "region", "aria-label": "Code" }, el("code", {}, code));
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2); // below the page's own two
    return inline(el(`h${level}`, { dir: "auto" }), heading[2].replace(/\s#+\s*$/, ""));
  }
  if (isRule(lines[0])) return el("hr");
  if (depth < DEEPEST && QUOTE.test(lines[0])) {
    return within(el("blockquote", { dir: "auto" }), lines.map((line) => line.replace(QUOTE, "")), depth + 1);
  }
  if (depth < DEEPEST && ITEM.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && lines[1].includes("-") && COLUMNS.test(lines[1])) return table(lines);
  return inline(el("p", { dir: "auto" }), lines.join("\n"));
}

function within(parent, lines, depth) {
  for (const source of split(lines)) parent.append(block(source.split("\n"), depth));
  return parent;
}

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const numbered = /\d/.test(marker);
  const made = el(numbered ? "ol" : "ul", numbered ? { start: String(parseInt(marker, 10)) } : {});
  let item = [];
  let inside = 0; // columns of the item's own text
  const close = () => {
    if (item.length) made.append(entry(item, depth));
    item = [];
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) {
      close();
      inside = found[0].length;
      item.push(line.slice(inside));
    } else {
      item.push(line.startsWith("\t") ? line.slice(1) : line.slice(Math.min(inside, line.search(/[^ ]|$/))));
    }
  }
  close();
  return made;
}

// An item of one paragraph is its text alone.
function entry(lines, depth) {
  const made = within(el("li", { dir: "auto" }), lines, depth + 1);
  const [first] = made.children;
  if (first?.tagName === "P") first.replaceWith(...first.childNodes);
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (line, name) => {
    const made = cells(line).map((cell) => inline(el(name, { dir: "auto" }), cell.trim()));
    return el("tr", {}, ...made);
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  const made = el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, made);
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];

function inline(parent, text, depth = 0) {
  if (text.length > LONGEST || depth > DEEPEST) {
    parent.append(text);
    return parent;
  }
  const missing = new Set(); // marks that are not closed behind here: nobody looks twice
  let plain = 0;
  let at = 0;
  const put = (node, end) => {
    if (at > plain) parent.append(text.slice(plain, at));
    parent.append(node);
    at = plain = end;
  };
  while (at < text.length) {
    const sign = text[at];
    if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) put(text[at + 1], at + 2);
    else if (sign === "`") code(text, at, missing, put) || (at += run(text, at));
    else if (sign === "[") link(text, at, missing, put, depth) || (at += 1);
    else if (sign === "h" && (text.startsWith("https://", at) || text.startsWith("http://", at))) bare(text, at, put) || (at += 1);
    else if ("*_~".includes(sign)) mark(text, at, missing, put, depth) || (at += run(text, at));
    else at += 1;
  }
  if (text.length > plain) parent.append(text.slice(plain));
  return parent;
}

// How many of the same sign stand together.
function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function closing(text, what, from, missing) {
  if (missing.has(what)) return -1;
  const found = text.indexOf(what, from);
  if (found < 0) missing.add(what);
  return found;
}

function code(text, at, missing, put) {
  const ticks = "`".repeat(run(text, at));
  const start = at + ticks.length;
  const end = closing(text, ticks, start, missing);
  if (end < 0 || text[end + ticks.length] === "`") return false;
  put(el("code", { dir: "ltr" }, text.slice(start, end).replace(/^ (.+) $/s, "$1")), end + ticks.length);
  return true;
}

function mark(text, at, missing, put, depth) {
  const found = MARKS.find(([sign]) => text.startsWith(sign, at));
  if (!found) return false;
  const [sign, name] = found;
  const start = at + sign.length;
  const inWord = sign[0] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "");
  if (inWord || !/\S/.test(text[start] ?? "")) return false;
  const end = closing(text, sign, start + 1, missing);
  if (end < 0 || /\s/.test(text[end - 1])) return false;
  put(inline(el(name), text.slice(start, end), depth + 1), end + sign.length);
  return true;
}

function link(text, at, missing, put, depth) {
  const middle = closing(text, "](", at + 1, missing);
  const end = middle < 0 ? -1 : closing(text, ")", middle + 2, missing);
  if (end < 0) return false;
  const [label, target] = [text.slice(at + 1, middle), text.slice(middle + 2, end).split(/\s/)[0]];
  const made = label.includes("[") || !label ? null : anchor(target);
  if (!made) return false;
  inline(made, label, depth + DEEPEST); // no link in a link
  const where = new URL(target).host;
  put(where && !label.includes(where) ? el("span", {}, made, ` (${where})`) : made, end + 1);
  return true;
}

function bare(text, at, put) {
  BARE.lastIndex = at;
  const target = BARE.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
  const made = target && anchor(target);
  if (!made) return false;
  made.append(target);
  put(made, at + target.length);
  return true;
}

function anchor(target) {
  if (!URL.canParse(target) || !["http:", "https:", "mailto:"].includes(new URL(target).protocol)) return null;
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer", title: target });
}
