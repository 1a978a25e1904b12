// Counts tokens and rounds while a text streams, and formats the counts.

const LEAST = 0.2; // seconds of a text before a rate is guessed from when its pieces came: several may come at once

export class Meter {
  tokens = 0;
  rounds = 0;
  drafted = 0;
  accepted = 0;
  #first = null; // [time, tokens] when the first of them were here: reading the prompt is not counted
  #last = 0;
  #rate = null; // as the server measured it

  // `before`: the counts of the answer that is continued.
  constructor(before) {
    for (const name of ["tokens", "rounds", "drafted", "accepted"]) this[name] = before?.[name] ?? 0;
  }

  add(said, now) {
    if (!said.tokens) return;
    this.tokens += said.tokens;
    this.rounds += 1;
    this.drafted += said.drafted;
    this.accepted += said.accepted;
    this.#first ??= [now, this.tokens];
    this.#last = now;
  }

  // Takes the rate that the server measured, once an answer has ended.
  end(how) {
    this.#rate = how.tokens_per_second || null;
  }

  get counted() {
    const { tokens, rounds, drafted, accepted } = this;
    const seconds = this.#first ? (this.#last - this.#first[0]) / 1000 : 0;
    const seen = seconds > LEAST ? (tokens - this.#first[1]) / seconds : null;
    return { tokens, rounds, drafted, accepted, rate: this.#rate ?? seen };
  }
}

// One line of figures; empty where nothing was counted.
export function figures(counted) {
  if (!counted?.tokens) return "";
  const { tokens, rounds, rate } = counted;
  const parts = [`${tokens} tokens`];
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  parts.push(`${(tokens / Math.max(1, rounds)).toFixed(2)} tokens/round`);
  return parts.join(" · ");
}

// Formats the other counts -> lines.
export function details(counted, how) {
  const lines = [];
  if (counted?.drafted) {
    const { drafted, accepted } = counted;
    lines.push(`${Math.round((100 * accepted) / drafted)} % of ${drafted} guesses accepted`);
  }
  if (how?.exact) lines.push("same text as plain decoding");
  else if (how?.lossless) lines.push("lossless");
  if (Array.isArray(how?.details)) lines.push(...how.details.map(String));
  return lines;
}

// Which method decoded, and why.
export function reason(how) {
  if (!how?.method_used) return "";
  const asked = how.method_requested ?? "auto";
  const name = asked === "auto" ? `auto: ${how.method_used}` : how.method_used;
  const notes = how.unverified?.length ? `. Unverified: ${how.unverified.join("; ")}` : "";
  return `${name}. ${how.reason}${notes}`;
}
