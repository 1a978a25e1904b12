// Texts and conversations as token ids, by Hugging Face's libraries.
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";

import { type Source, parsed, whole } from "./bundle.js";
import { EdgespecError } from "./types.js";

export interface Message {
  role: string;
  content: string;
  /** Other fields that the template reads, such as calls of tools. */
  [field: string]: unknown;
}

/** Variables of a chat template, besides messages. */
export interface TemplateOptions {
  tools?: unknown[];
  /** Variables of the template, such as enable_thinking. */
  [variable: string]: unknown;
}

export class Text {
  private constructor(
    private readonly tokenizer: Tokenizer,
    private readonly template: Template | null,
    private readonly variables: Record<string, unknown>,
  ) {}

  static async load(source: Source): Promise<Text> {
    const rules = parsed("tokenizer.json", await whole(source, "tokenizer.json"));
    const config = parsed("tokenizer_config.json", await optional(source, "tokenizer_config.json", "{}"));
    const file = new TextDecoder().decode(await optional(source, "chat_template.jinja", ""));
    const listed = Array.isArray(config.chat_template)
      ? config.chat_template.find((one: { name: string }) => one.name === "default")?.template
      : config.chat_template;
    const template = file || listed;
    const special = ["bos_token", "eos_token", "unk_token", "pad_token"].map((name) => [name, wordOf(config[name])]);
    try {
      const own = template ? new Template(template) : null;
      return new Text(new Tokenizer(rules, config), own, Object.fromEntries(special));
    } catch (error) {
      throw new EdgespecError(`the bundle's tokenizer or chat template: ${(error as Error).message}`);
    }
  }

  /** Token ids of a text, with those that the tokenizer puts before it. */
  encode(text: string): number[] {
    return Array.from(this.tokenizer.encode(text).ids, Number);
  }
  /** Token ids of a conversation, to which the model is to answer. */
  chat(messages: Message[], more: TemplateOptions = {}): number[] {
    if (!this.template) throw new EdgespecError("this bundle has no chat template: expected a text");
    let text: string;
    try {
      text = this.template.render({ messages, add_generation_prompt: true, ...this.variables, ...more });
    } catch (error) {
      throw new EdgespecError(`the chat template refuses this conversation: ${(error as Error).message}`);
    }
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

function wordOf(token: unknown): string | undefined {
  return typeof token === "string" ? token : (token as { content?: string } | null | undefined)?.content;
}
