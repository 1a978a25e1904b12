"""Train builtin:restore and builtin:restore-draft: English without capitals and punctuation to the text as it was.

Needs torch, transformers, tokenizers and plain text whose paragraphs are speeches ("NAME:" or "**NAME**" above each,
which is left out).  The committed weights come from Shakespeare's plays, which are in the public domain:

    python -m tools.train_restore --text tinyshakespeare.txt --more PLAYS/*.md -o edgespec/builtin --minutes 5

The last tenth of ``--text`` is held out; ``--more`` may not hold it.  Both models have T5 1.1's layers (gated GELU,
relative positions, no biases) and T5's tied head.  The target's decoder is trained with stochastic depth: self- and
cross-attention (together) and MLP of a layer are left out at a random rate per text from U(0, 0.2), so that training
covers passes that skip some.  The draft learns the target's distributions at the same time.  With --resume, both
continue from the models in the output folder.  A report is printed as JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm

from tools.train_loop import Plan, ahead, distilled_loss, error_rate, optimise, save, spread_loss

PAD, EOS, UNK, VOCAB, WORDS, LONGEST = 0, 1, 2, 2048, 64, 256
BATCH, DEPTH_RATE, DROPOUT = 512, 0.1, 0.1
TARGET = {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 384, "num_layers": 4, "num_decoder_layers": 4}
DRAFT = {"d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 192, "num_layers": 2, "num_decoder_layers": 1}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": LONGEST,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}
_HEADER = re.compile(r"(\*\*.*\*\*|[^.!?,;]+:)\s*")
_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bSt\.) ")


def speeches(text: str) -> list[str]:
    """Return the speeches of a play, each a string of lines, without names, headings and directions."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().split("\n")]
        if _HEADER.fullmatch(lines[0]):
            said = "\n".join(line for line in lines[1:] if line)
            said = re.sub(r"_[^_]*_|\[[^]]*\]|\([^)]*\)|\*", "", said)
            found += [re.sub(r" *\n\s*", "\n", re.sub(r" +", " ", said)).strip()]
    return [said.replace("—", "--") for said in found if said and not set(said) & set('#$&"\\_')]


class Prose:
    """Joins lines of verse: their first words get the capitals that they have within lines."""

    def __init__(self, said: list[str]) -> None:
        words = [word for one in said for word in re.findall(r"(?<=[a-z,;'] )[A-Za-z'-]+", one)]
        self.counts = Counter(words)

    def joined(self, said: str) -> str:
        """Return a speech as one line."""
        return re.sub(r"(?<![.?!])\n([A-Z][\w'-]*)", self._inner, said).replace("\n", " ")

    def _inner(self, found: re.Match[str]) -> str:
        word = found[1]
        small = word[0].lower() + word[1:]
        return f" {word if self.counts[word] > self.counts[small] else small}"


def plain(text: str) -> str:
    """Take capitals and punctuation away: letters, digits and apostrophes within words stay."""
    kept = re.sub(r"[^\w' ]|_", " ", text.lower())
    return re.sub(r"\s+", " ", re.sub(r"(?<!\w)'|'(?!\w)", " ", kept)).strip()


def passages(said: str, most: int) -> list[str]:
    """Cut a speech at ends of sentences into passages of at most ``most`` words; longer sentences are left out."""
    found = [""]
    for sentence in _END.split(said):
        joined = f"{found[-1]} {sentence}".strip()
        if len(joined.split()) <= most:
            found[-1] = joined
        else:
            found.append(sentence if len(sentence.split()) <= most else "")
    return [passage for passage in found if plain(passage)]


def train_tokenizer(said: list[str]) -> Tokenizer:
    """Make a byte-level BPE tokenizer for both sides, which puts </s> after every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "</s>", "<unk>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([*said, *map(plain, said)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


class Texts:
    """Random passages of speeches, as batches of sources and labels."""

    def __init__(self, said: list[str], tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed, self.random = tokenizer, seed, random.Random(seed)
        self.sentences: list[list[str]] = [_END.split(one) for one in said]
        self.weights = [sum(len(part) for part in one) for one in self.sentences]

    def passage(self, sentences: list[str]) -> str:
        """Draw some sentences that follow one another, at most ``WORDS`` words."""
        start = self.random.randrange(len(sentences))
        most = self.random.randint(4, WORDS)
        text = sentences[start]
        for sentence in sentences[start + 1 :]:
            if len(text.split()) + len(sentence.split()) > most:
                break
            text += " " + sentence
        return text

    def batches(self, worker: int, pool: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Passages in batches of about the same length, in a random order, without end."""
        self.random.seed(f"{self.seed}.{worker}")
        while True:
            drawn = [self.passage(one) for one in self.random.choices(self.sentences, self.weights, k=pool * BATCH)]
            drawn = [one for one in drawn if len(one.split()) <= WORDS]
            made = _parts(sorted(drawn, key=len), BATCH)
            self.random.shuffle(made)
            yield from (pairs(self.tokenizer, part) for part in made)


def _parts(items: list[str], size: int) -> list[list[str]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def pairs(tokenizer: Tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids of sources [n, s], padded with 0, and labels [n, t], padded with -100."""
    sources = tokenizer.encode_batch([plain(text) for text in texts])
    labels = tokenizer.encode_batch(texts)
    return _padded([one.ids for one in sources], PAD), _padded([one.ids for one in labels], -100)


def _padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    size = -(-max(map(len, rows)) // 16) * 16
    return torch.tensor([row + [filler] * (size - len(row)) for row in rows])


def new_model(shape: dict[str, int], dropout: float) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            n_positions=LONGEST,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            dropout_rate=dropout,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
            **shape,
        )
    )


def fused(model: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """Have norms and GELU computed by one kernel each: a small model's step is as long as its list of kernels."""
    for module in model.modules():
        if isinstance(module, T5LayerNorm):
            size, eps = tuple(module.weight.shape), module.variance_epsilon
            module.forward = partial(F.rms_norm, normalized_shape=size, weight=module.weight, eps=eps)
        elif isinstance(module, T5DenseGatedActDense):
            module.act = torch.nn.GELU("tanh")
    return model


class Depth:
    """Leaves out sub-layers of the decoder, at random by text or by name: attention (self and cross) and MLP."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        self.names: list[str] = []
        self.skip = ""
        self.kept: dict[str, torch.Tensor] = {}
        model.decoder.register_forward_pre_hook(self._draw, with_kwargs=True)
        for index, block in enumerate(model.decoder.block):
            for kind, modules in (
                ("attn", (block.layer[0].SelfAttention, block.layer[1].EncDecAttention)),
                ("mlp", (block.layer[2].DenseReluDense,)),
            ):
                self.names.append(f"{index}.{kind}")
                for module in modules:
                    module.register_forward_hook(self._hook(self.names[-1]))

    def _draw(self, module: torch.nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        ids = named["input_ids"]
        rates = torch.rand(len(ids), 1, 1, device=ids.device) * 2 * DEPTH_RATE
        draws = torch.rand(len(self.names), len(ids), 1, 1, device=ids.device) >= rates
        self.kept = dict(zip(self.names, draws, strict=True)) if module.training else {}

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if name == self.skip:
                hidden = torch.zeros_like(hidden)
            elif name in self.kept:
                hidden = hidden * self.kept[name]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook


def run(model: T5ForConditionalGeneration, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # [n, t, V]
    sources, labels = (part.to(model.device) for part in batch)
    given = torch.cat([torch.full_like(labels[:, :1], PAD), labels[:, :-1].clamp(min=PAD)], 1)
    return model(input_ids=sources, attention_mask=sources != PAD, decoder_input_ids=given).logits


def losses(model: T5ForConditionalGeneration, held_out: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Compute the mean loss on held-out batches, in nats per token."""
    with torch.no_grad():
        found = [spread_loss(run(model, batch), batch[1].to(model.device)) for batch in held_out]
    return torch.stack(found).mean().item()


def restored(model: T5ForConditionalGeneration, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the greedy tokens for each text, which lacks capitals and punctuation; </s> at their ends."""
    found: list[list[int]] = []
    for part in _parts(texts, 256):
        sources = _padded([one.ids for one in tokenizer.encode_batch(part)], PAD).to(model.device)
        made = model.generate(sources, attention_mask=sources != PAD, do_sample=False)
        for row in made[:, 1:].tolist():
            found.append(row[: row.index(EOS) + 1] if EOS in row else row)
    return found


def guessed_right(draft: T5ForConditionalGeneration, sources: list[list[int]], texts: list[list[int]]) -> list[Any]:
    """Return, for each text of the target, at which tokens the draft's likeliest is the same."""
    found = []
    with torch.no_grad():
        for source, text in zip(sources, texts, strict=True):
            batch = (torch.tensor([source]), torch.tensor([text]))
            found.append((run(draft, batch).argmax(-1).cpu()[0] == batch[1][0]).tolist())
    return found


def tokens_a_round(right: list[list[bool]], guesses: int) -> float:
    """Tokens of the target a pass, when each pass checks ``guesses`` tokens of the draft."""
    rounds = 0
    for text in right:
        at = 0
        while at < len(text):
            accepted = next((n for n in range(guesses) if at + n >= len(text) or not text[at + n]), guesses)
            at, rounds = at + accepted + 1, rounds + 1
    return sum(map(len, right)) / rounds


def copied_a_round(source: list[int], text: list[int], guesses: int, order: int = 3) -> int:
    """Return the passes of one text whose guesses follow the last like n-gram of the source and the text so far."""
    at, rounds = 0, 0
    while at < len(text):
        seen = source + text[:at]
        proposal: list[int] = []
        for size in range(order, 0, -1):
            tail = seen[-size:]
            places = [p for p in range(len(seen) - size - 1, -1, -1) if seen[p : p + size] == tail]
            if at and places:
                proposal = seen[places[0] + size : places[0] + size + guesses]
                break
        right = next((n for n, one in enumerate(proposal) if text[at + n : at + n + 1] != [one]), len(proposal))
        at, rounds = at + right + 1, rounds + 1
    return rounds


def report(
    target: T5ForConditionalGeneration, draft: T5ForConditionalGeneration, tokenizer: Tokenizer, lines: list[str]
) -> dict[str, Any]:
    """Return error rates on held-out lines, agreement of the draft and with skipped sub-layers, tokens per round."""
    sources = [plain(line) for line in lines]
    ids = [one.ids for one in tokenizer.encode_batch(sources)]
    found: dict[str, Any] = {"lines": len(lines), "given": error_rate(list(map(list, sources)), list(map(list, lines)))}
    texts: dict[str, list[list[int]]] = {}
    for name, model in (("target", target), ("draft", draft)):
        texts[name] = restored(model.eval(), tokenizer, sources)
        written = [tokenizer.decode(text).strip() for text in texts[name]]
        found[name] = {
            "character error rate": round(error_rate(list(map(list, written)), list(map(list, lines))), 5),
            "exact lines": round(sum(map(str.__eq__, written, lines)) / len(lines), 4),
            "samples": written[:8],
        }
    few = slice(0, 300)
    right = guessed_right(draft, ids[few], texts["target"][few])
    found["draft agrees"] = round(sum(map(sum, right)) / sum(map(len, right)), 4)
    found["draft tokens a round"] = {n: round(tokens_a_round(right, n), 3) for n in (2, 4, 6, 8)}
    own = list(zip(ids[few], texts["target"][few], strict=True))
    total = sum(len(text) for _, text in own)
    found["n-grams tokens a round"] = {
        n: round(total / sum(copied_a_round(a, b, n) for a, b in own), 3) for n in (2, 4, 6, 8)
    }
    layers = Depth(target)
    for name in layers.names:
        layers.skip = name
        alike = guessed_right(target, ids[few], texts["target"][few])
        found[f"without {name}"] = round(sum(map(sum, alike)) / sum(map(len, alike)), 4)
    layers.skip = ""
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="its last tenth is held out")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="more text to train on")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of both models")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--resume", action="store_true", help="go on from the models in the output folder")
    parser.add_argument("--lines", type=int, default=1000, help="most held-out lines to report on; 0: no report")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = args.text.read_text("utf-8")
    cut = text.index("\n\n", int(len(text) * 0.9)) + 2
    verses = sorted({*speeches(text[:cut]), *(one for file in args.more for one in speeches(file.read_text("utf-8")))})
    prose = Prose(verses)
    said = sorted({prose.joined(one) for one in verses})
    lines = [line for one in speeches(text[cut:]) for line in passages(prose.joined(one), WORDS)]
    kept = args.output / "restore" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(kept)) if args.resume else train_tokenizer(said)
    held_out = [pairs(tokenizer, part) for part in _parts(sorted(lines, key=len), 128)]
    print(f"{len(said)} speeches of {sum(len(s.split()) for s in said)} words, {len(lines)} held-out lines", flush=True)

    target, draft = new_model(TARGET, DROPOUT), new_model(DRAFT, 0.0)
    if args.resume:
        target.load_state_dict(T5ForConditionalGeneration.from_pretrained(args.output / "restore").state_dict())
        draft.load_state_dict(T5ForConditionalGeneration.from_pretrained(args.output / "restore-draft").state_dict())
    Depth(target)
    both = torch.nn.ModuleDict({"target": fused(target), "draft": fused(draft)})

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch = (batch[0].to(device), batch[1].to(device))
        theirs = run(target, batch)
        return spread_loss(theirs, batch[1]) + distilled_loss(run(draft, batch), theirs.detach(), batch[1])

    optimise(
        both,
        ahead(Texts(said, tokenizer, args.seed).batches, device),
        loss,
        lambda: " ".join(f"{losses(one, held_out):.4f}" for one in (target, draft)),
        Plan(args.minutes, args.output / "restore.pt", device, args.rate),
    )
    for name, model in (("restore", target), ("restore-draft", draft)):
        model.generation_config = GenerationConfig(
            decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS, max_length=LONGEST
        )
        save(model, tokenizer, args.output / name, SETTINGS)
        model.to(device)
    if args.lines:
        found = report(target, draft, tokenizer, random.Random(3).sample(lines, min(len(lines), args.lines)))
        (args.output / "restore.json").write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found, indent=2), f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
