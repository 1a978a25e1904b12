// Where a link leads, and how it is shown: a label cannot name another host than the link's own.

import { el } from "./dom.js";

const UNSEEN = /[\p{Cf}\p{Cc}]/gu; // characters that a name can hide without a trace
const DOTS = /[.\u3002\uff0e\uff61\u2024]/g; // that browsers, or eyes, take for the dot of a host

// A URL that may be followed -> {href, host, name}; null where it may not: another scheme, relative, or with a name before its host.
export function linkTarget(text) {
  if (!URL.canParse(text)) return null;
  const url = new URL(text);
  if (url.protocol === "mailto:") {
    const address = decoded(url.pathname); // what follows it, as a subject or a text, is not taken
    return { href: `mailto:${url.pathname}`, host: address.split("@").at(-1), name: address };
  }
  if (!["http:", "https:"].includes(url.protocol) || url.username || url.password) return null;
  return { href: url.href, host: url.host, name: url.host };
}

// Creates the elements of a link whose label is filled in later -> {outer, inner, ends}: `inner` takes the label, and
// `outer` takes the ends after it. A label that looks like another host is shown as text, followed by a link that shows
// its own address.
export function named(href, label) {
  const target = linkTarget(href);
  const outer = el("span");
  if (!target) return { outer, inner: outer, ends: [] };
  if (label !== target.href && label !== target.name && hosts(label).some((host) => !same(host, target.host))) {
    const shown = target.href.startsWith("mailto:") ? target.name : target.href;
    return { outer, inner: outer, ends: [" (", anchor(target, shown), ")"] };
  }
  const inner = anchor(target);
  outer.append(inner);
  return { outer, inner, ends: label.toLowerCase().includes(target.name) ? [] : [` (${target.name})`] };
}

function anchor({ href }, ...label) {
  return el("a", { href, target: "_blank", rel: "noopener noreferrer", title: href }, ...label);
}

// Finds parts of a label that look like hosts: words with dots, or words after a scheme.
function hosts(label) {
  const seen = label.normalize("NFKC").replace(UNSEEN, "").replace(DOTS, ".").toLowerCase();
  const schemes = /:\s*\/\s*\//.test(seen) || seen.trimStart().startsWith("//");
  const words = seen.split(/[^\p{L}\p{M}\p{N}_.:-]+/u).map((word) => word.replace(/^[.:-]+|[.:-]+$/g, ""));
  const found = words.filter((word) => /\.[^.]*\p{L}/u.test(word) || /^\d+(\.\d+){3}(:\d+)?$/.test(word));
  return schemes && !found.length ? [seen] : found;
}

function same(word, host) {
  const plain = (name) => name.replace(/:\d+$/, "").replace(/^www\./, "");
  return plain(word) === plain(host);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
