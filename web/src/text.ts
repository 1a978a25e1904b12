// Texts and conversations as token ids, by Hugging Face's libraries.
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";

import { type Source, parsed, whole } from "./bundle.js";
import { Control, type Rules } from "./control.js";
import { EdgespecError } from "./types.js";

export interface Message {
  role: string;
  /** null: none, as of a message that only calls tools. */
  content: string | null;
  /** Other fields that the template reads, such as calls of tools. */
  [field: string]: unknown;
}

/** Variables of a chat template, besides messages. */
export interface TemplateOptions {
  tools?: unknown[] | null;
  /** The answer continues the last message. */
  continueFinal?: boolean;
  /** Variables of the template, such as enable_thinking. */
  [variable: string]: unknown;
}

const NAMED = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const REASONING = ["reasoning_content", "thinking", "reasoning"];
const TAG = "EDGESPEC_THE_ANSWER_GOES_ON_HERE "; // after the text of a message that is continued

export class Text {
  private constructor(
    private readonly tokenizer: Tokenizer,
    private readonly control: Control,
    private readonly templates: ReadonlyMap<string, Template>,
    private readonly variables: Record<string, unknown>,
  ) {}

  static async load(source: Source): Promise<Text> {
    const rules = parsed("tokenizer.json", await whole(source, "tokenizer.json"));
    const inexact = kindsIn(rules).filter((kind) => kind === "Unigram" || kind === "Precompiled");
    if (inexact.length)
      throw new EdgespecError(
        `tokenizer.json: of kind ${inexact.join(", ")}, which gives other tokens here than in Python: ` +
          "open the bundle with ids: true, and give token ids",
      );
    const config = parsed("tokenizer_config.json", await optional(source, "tokenizer_config.json", "{}"));
    const other = parsed("special_tokens_map.json", await optional(source, "special_tokens_map.json", "{}"));
    const file = new TextDecoder().decode(await optional(source, "chat_template.jinja", ""));
    const listed = Array.isArray(config.chat_template) ? config.chat_template : [];
    const texts = new Map<string, string>(listed.map((one: { name: string; template: string }) => [one.name, one.template]));
    if (typeof config.chat_template === "string") texts.set("default", config.chat_template);
    if (file) texts.clear(), texts.set("default", file);
    const special = NAMED.map((name) => [name, wordOf(name in config ? config[name] : other[name])]).filter(([, word]) => word);
    try {
      const control = new Control(rules as Rules, config, [...texts.values()]);
      const templates = new Map([...texts].map(([name, text]) => [name, new Template(text)]));
      return new Text(new Tokenizer(rules, config), control, templates, Object.fromEntries(special));
    } catch (error) {
      throw new EdgespecError(`the bundle's tokenizer or chat template: ${(error as Error).message}`);
    }
  }

  /** Token ids of a text, with those that the tokenizer puts before it. */
  encode(text: string): number[] {
    return Array.from(this.tokenizer.encode(text).ids, Number);
  }
  /** Token ids of a conversation, to which the model is to answer. Special tokens in messages are text. */
  chat(messages: Message[], { tools = null, continueFinal = false, ...more }: TemplateOptions = {}): number[] {
    if (!messages.length) throw new EdgespecError("expected a conversation of at least one message");
    const template = (tools && this.templates.get("tool_use")) ?? this.templates.get("default");
    if (!template) throw new EdgespecError("this bundle has no chat template: expected a text");
    const hidden = this.control.hide(messages.map(prepared), tools);
    if (continueFinal) hidden.messages.push(continued(hidden.messages.pop()!));
    const given = { documents: null, add_generation_prompt: !continueFinal, ...this.variables, ...more };
    const render = (all: unknown[]): string => template.render({ ...given, messages: all, tools: hidden.tools });
    let text: string;
    try {
      text = rendered(render, hidden.messages);
    } catch (error) {
      throw new EdgespecError(`the chat template refuses this conversation: ${(error as Error).message}`);
    }
    if (continueFinal) text = cut(text);
    if (hidden.marks) return this.control.encode(text, hidden.marks);
    return Array.from(this.tokenizer.encode(text, { add_special_tokens: false }).ids, Number);
  }
  decode(ids: number[]): string {
    if (!ids.length) return ""; // the library refuses none
    return this.tokenizer.decode(ids, { skip_special_tokens: true, clean_up_tokenization_spaces: false });
  }
}

async function optional(source: Source, name: string, without: string): Promise<Uint8Array> {
  try {
    return await whole(source, name);
  } catch (error) {
    if (error instanceof EdgespecError && error.code === "no file") return new TextEncoder().encode(without);
    throw error;
  }
}

// The types of all parts of a tokenizer.
function kindsIn(rules: { model?: unknown; normalizer?: unknown }): string[] {
  const of = (part: unknown): string[] => {
    const { type, normalizers = [] } = (part ?? {}) as { type?: string; normalizers?: unknown[] };
    return [...(type ? [type] : []), ...normalizers.flatMap(of)];
  };
  return [...of(rules.model), ...of(rules.normalizer)];
}

function wordOf(token: unknown): string | undefined {
  return typeof token === "string" ? token : (token as { content?: string } | null | undefined)?.content;
}

// A message without keys that have no value, and with thoughts under the names that templates know.
function prepared(message: Message): Record<string, unknown> {
  const { content } = message;
  if (typeof content !== "string" && content !== null && content !== undefined)
    throw new EdgespecError(`content of a message: expected a text, got ${JSON.stringify(content)?.slice(0, 80)}`);
  const made = Object.fromEntries(Object.entries(message).filter(([, value]) => value !== null && value !== undefined));
  const thoughts = REASONING.map((name) => made[name]).find((one) => one !== undefined);
  return thoughts === undefined ? made : { thinking: thoughts, ...made, reasoning_content: thoughts };
}

// Jinja2 takes content that is not there for an empty text, where this library refuses it.
function rendered(render: (messages: unknown[]) => string, messages: Record<string, unknown>[]): string {
  try {
    return render(messages);
  } catch (error) {
    if (messages.every(({ content }) => content !== undefined)) throw error;
    return render(messages.map((one) => ({ content: "", ...one })));
  }
}

function continued(message: Record<string, unknown>): Record<string, unknown> {
  if (typeof message.content !== "string") throw new EdgespecError("the last message has no text that an answer could continue");
  return { ...message, content: message.content + TAG };
}

// Cuts a text before the tag; a template that trims the message has also trimmed the tag's space.
function cut(text: string): string {
  const at = text.lastIndexOf(TAG.trimEnd());
  if (at < 0) throw new EdgespecError("the chat template does not write the last message, so it cannot be continued");
  return text.startsWith(TAG, at) ? text.slice(0, at) : text.slice(0, at).trimEnd();
}
