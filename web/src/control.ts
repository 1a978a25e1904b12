// Special tokens in messages stay text, as edgespec/runtimes/text/control_tokens.py keeps them: a mark in each of them
// before a template sees the conversation. Afterwards the ones that the template wrote are renamed, and a tokenizer
// that knows them by those names alone encodes the text, without the marks.
import { Tokenizer } from "@huggingface/tokenizers";

import { OWN } from "./own.js";
import { EdgespecError } from "./types.js";

interface AddedToken {
  content: string;
  special?: boolean;
  normalized?: boolean;
}
export interface Rules {
  added_tokens?: AddedToken[];
  normalizer?: unknown;
}
type Data = unknown;

export class Control {
  private readonly everyone: Words;
  private readonly assistant: Words; // without what the model itself writes around thoughts and calls
  private readonly words: string[];
  private readonly folded: boolean; // whether normalization can produce a control token
  constructor(
    private readonly rules: Rules,
    private readonly config: object,
    templates: string[],
  ) {
    const known = (rules.added_tokens ?? []).filter(
      ({ content, special }) =>
        [...content.trim()].length > 1 &&
        !/^[\p{L}\p{N}]+$/u.test(content) &&
        (special || /^<[|\uff5c]|[|\uff5c]>$/u.test(content) || templates.some((text) => text.includes(content))),
    );
    this.words = [...new Set(known.map(({ content }) => content))].sort((a, b) => b.length - a.length);
    this.everyone = new Words(this.words);
    this.assistant = new Words(this.words.filter((word) => !OWN.includes(word)));
    this.folded = !!rules.normalizer && known.some(({ normalized }) => normalized);
  }

  /** Puts a mark into each control token of messages and tools; "" where there is none. */
  hide(messages: Record<string, Data>[], tools: Data): { messages: Record<string, Data>[]; tools: Data; marks: string } {
    const words = ({ role }: Record<string, Data>): Words => (role === "assistant" ? this.assistant : this.everyone);
    const has = (data: Data, of: Words): boolean => textsOf(data).some((text) => of.find(text, 0) !== null);
    const said = textsOf([messages, tools]);
    const foreign = this.folded && said.some((text) => /[^\x00-\x7f]/.test(text));
    if (!foreign && !messages.some((one) => has(one, words(one))) && !has(tools, this.everyone))
      return { messages, tools, marks: "" };
    let marks = "";
    for (let code = 0xe000; code < 0xf900 && marks.length < 2; ++code) {
      const [mark, escaped] = [String.fromCharCode(code), `\\u${code.toString(16)}`];
      if (!said.some((text) => text.includes(mark) || text.includes(escaped))) marks += mark;
    }
    if (marks.length < 2) throw new EdgespecError("a conversation that has all characters for private use");
    const marked = (of: Words) => (text: string) => of.marked(text, marks[0]!);
    return {
      messages: messages.map((one) => mapped(one, marked(words(one))) as Record<string, Data>),
      tools: mapped(tools, marked(this.everyone)),
      marks,
    };
  }

  /** Encodes a template's text: its own control tokens as such, those that hold the mark as text. */
  encode(written: string, marks: string): number[] {
    const [mark, other] = [marks[0]!, marks[1]!];
    const renamed = (word: string): string => `${first(word)}${other}${word.slice(first(word).length)}`;
    const pattern = new RegExp(this.words.map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("|") || "$^", "g");
    const text = written
      .replaceAll(`\\u${mark.charCodeAt(0).toString(16)}`, mark) // a template may write JSON
      .replace(pattern, renamed)
      .replaceAll(mark, "");
    const names = new Set(this.words);
    const tokens = this.rules.added_tokens ?? [];
    const added_tokens = tokens.map((one) => (names.has(one.content) ? { ...one, content: renamed(one.content) } : one));
    const tokenizer = new Tokenizer({ ...this.rules, added_tokens }, this.config); // rare, so it is not kept
    return Array.from(tokenizer.encode(text, { add_special_tokens: false }).ids, Number);
  }
}

// Words, and the beginnings of words at the end of a text, which a next text may complete.
class Words {
  private readonly by = new Map<string, string[]>(); // their first unit
  constructor(all: string[]) {
    for (const word of all) this.by.set(word[0]!, [...(this.by.get(word[0]!) ?? []), word]);
  }
  find(text: string, from: number): [number, number] | null {
    for (let at = from; at < text.length; ++at)
      for (const word of this.by.get(text[at]!) ?? []) {
        if (text.startsWith(word, at)) return [at, at + word.length];
        if (text.length - at < word.length && word.startsWith(text.slice(at))) return [at, text.length];
      }
    return null;
  }
  marked(text: string, mark: string): string {
    let made = "";
    let at = 0;
    for (let found = this.find(text, 0); found; found = this.find(text, at)) {
      const begin = found[0] + first(text.slice(found[0])).length;
      made += text.slice(at, begin) + mark + text.slice(begin, found[1]);
      at = found[1];
    }
    return made + text.slice(at);
  }
}

function first(text: string): string {
  return String.fromCodePoint(text.codePointAt(0)!);
}

// All texts in plain data, keys of objects included.
function textsOf(data: Data): string[] {
  if (typeof data === "string") return [data];
  if (Array.isArray(data)) return data.flatMap(textsOf);
  if (data && typeof data === "object") return Object.entries(data).flatMap(([key, value]) => [key, ...textsOf(value)]);
  return [];
}

function mapped(data: Data, change: (text: string) => string): Data {
  if (typeof data === "string") return change(data);
  if (Array.isArray(data)) return data.map((item) => mapped(item, change));
  if (data && typeof data === "object")
    return Object.fromEntries(Object.entries(data).map(([key, value]) => [change(key), mapped(value, change)]));
  return data;
}
