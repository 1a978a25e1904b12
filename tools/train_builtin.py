"""Train the two models edgespec embeds: builtin:shakespeare and builtin:shakespeare-draft.

Needs torch, transformers, tokenizers and one plain-text file (the committed weights
come from "tinyshakespeare", a megabyte of Shakespeare's plays in the public domain):

    python tools/train_builtin.py --text tinyshakespeare.txt -o edgespec/builtin

The target is a small Llama trained from scratch with stochastic depth: the residual
branch of each attention and MLP sub-layer is dropped independently, at a random rate per
window from U(0, 0.3), so that training covers passes that skip sub-layers
(self-speculation). The draft is a smaller Llama distilled from the target (KL divergence
on next-token distributions) over the training text and text the target generated.

One seed and one thread give one result on one machine (40 minutes of a CPU core). A report
(losses, agreement figures, samples) is printed as JSON at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

BOS, EOS, VOCAB, MAX_POSITIONS = 0, 1, 1024, 1024
BATCH_TOKENS, RATE, DEPTH_RATE, DROPOUT = 2048, 3e-3, 0.15, 0.1
TARGET_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
}
DRAFT_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 160,
}
# Window lengths and the cumulated share of the steps: all positions of the context are seen.
WINDOWS = ((256, 0.65), (512, 0.9), (1024, 1.0))
PROMPTS = ("ROMEO:", "JULIET:\n", "KING RICHARD III:\nWhat", "First Citizen:\nSpeak,")


def train_tokenizer(text: str) -> Tokenizer:
    """Make a byte-level BPE tokenizer that puts <s> in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


class Corpus:
    """The training text as tokens; a speech is what follows a blank line."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        self.train = torch.tensor(encoding.ids)
        self.lines = torch.tensor([i for i, c in enumerate(starts) if text[c - 1 : c] == "\n"])
        self.speeches = torch.tensor([i for i, c in enumerate(starts) if text[c - 2 : c] == "\n\n"])

    def window(self, length: int) -> torch.Tensor:
        """<s> and `length` tokens from a speech start (mostly), a line or anywhere."""
        draw = torch.rand(()).item()
        pool = self.speeches if draw < 0.7 else self.lines
        start = int(pool[torch.randint(len(pool), ())])
        if draw > 0.85:
            start = int(torch.randint(len(self.train), ()))
        start = min(start, len(self.train) - length)
        ids = torch.cat([torch.tensor([BOS]), self.train[start : start + length]])
        if torch.rand(()).item() < 0.1:  # one text ends at a speech boundary, another begins
            low, high = start + 64, start + length - 64
            inside = self.speeches[(self.speeches > low) & (self.speeches < high)]
            if len(inside):
                end = int(inside[torch.randint(len(inside), ())]) - start
                other = int(self.speeches[torch.randint(len(self.speeches), ())])
                other = min(other, len(self.train) - length)
                following = [torch.tensor([EOS, BOS]), self.train[other : other + length]]
                ids = torch.cat([ids[: end + 1], *following])[: length + 1]
        return ids

    def batch(self) -> torch.Tensor:
        draw = torch.rand(()).item()
        length = next(size for size, bound in WINDOWS if draw < bound)
        return torch.stack([self.window(length - 1) for _ in range(BATCH_TOKENS // length)])


class SubLayers:
    """Hooks on every attention and MLP sub-layer: dropout, stochastic depth, skipping."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.names: list[str] = []
        self.skip = ""  # the sub-layer to leave out
        self.rates = torch.zeros(1)  # the drop rate of each window of the batch
        model.model.embed_tokens.register_forward_hook(self._embedded)
        for index, layer in enumerate(model.model.layers):
            for kind, module in (("attn", layer.self_attn), ("mlp", layer.mlp)):
                self.names.append(f"{index}.{kind}")
                module.register_forward_hook(self._hook(self.names[-1]))

    def _embedded(self, module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> Any:
        if not module.training:
            return output
        self.rates = torch.rand(output.shape[0], 1, 1) * 2 * DEPTH_RATE
        return F.dropout(output, DROPOUT)

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if name == self.skip:
                hidden = torch.zeros_like(hidden)
            elif module.training:
                kept = torch.rand(hidden.shape[0], 1, 1) >= self.rates
                hidden = F.dropout(hidden, DROPOUT) * kept
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook


def new_model(shape: dict[str, int]) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            initializer_range=0.05,
            **shape,
        )
    )


def chunks(ids: torch.Tensor, length: int = 512) -> torch.Tensor:
    """<s>-prefixed windows that follow one another, each `length` positions long."""
    rows = ids[: len(ids) // (length - 1) * (length - 1)].view(-1, length - 1)
    return torch.cat([torch.full((len(rows), 1), BOS), rows], dim=1)


def logits_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(part).logits for part in rows.split(8)])


def next_token_loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of our next-token distributions from theirs, given logits."""
    return F.kl_div(
        ours.log_softmax(-1).flatten(0, 1), theirs.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
    )


def optimise(
    model: LlamaForCausalLM,
    steps: int,
    decay: float,
    loss_of: Callable[[], torch.Tensor],
    validate: Callable[[], float],
) -> None:
    """Muon for the layers' matrices, AdamW for the rest; keeps the best by `validate`."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimisers = (
        torch.optim.Muon(matrices, lr=7 * RATE, weight_decay=decay),
        torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )
    warmup, every = max(1, min(100, steps // 10)), max(1, steps // 16)
    began = time.monotonic()

    def scale(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * cosine)

    schedules = [torch.optim.lr_scheduler.LambdaLR(part, scale) for part in optimisers]
    best, worse, running, kept = math.inf, 0, list[float](), dict[str, torch.Tensor]()
    for step in range(1, steps + 1):
        model.train()
        loss = loss_of()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimisers, *schedules):
            part.step()
        running.append(loss.item())
        if step % every == 0 or step == steps:
            value = validate()
            print(
                f"step {step}/{steps} train {sum(running) / len(running):.4f} "
                f"val {value:.4f} {time.monotonic() - began:.0f}s",
                flush=True,
            )
            running, worse = [], worse + 1
            if value < best:
                best, worse, kept = value, 0, copy.deepcopy(model.state_dict())
            if worse == 3:  # overfitting: no better for three evaluations
                break
    model.load_state_dict(kept)


def continued(model: LlamaForCausalLM, rows: torch.Tensor, size: int, heat: float) -> torch.Tensor:
    """`rows` continued to `size` tokens by sampling at temperature `heat` (0: greedy)."""
    sampling = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {}
    config = GenerationConfig(
        max_length=size, min_length=size, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, **sampling
    )
    mask = torch.ones_like(rows)
    return model.eval().generate(rows, attention_mask=mask, generation_config=config)


def generated(target: LlamaForCausalLM, corpus: Corpus, batches: int) -> torch.Tensor:
    """Texts of the target, 256 tokens each: a third greedy, the others sampled."""
    parts = []
    for index in range(batches):
        starts = corpus.speeches[torch.randint(len(corpus.speeches) - 9, (64,))]
        prompt = corpus.train[starts[:, None] + torch.arange(4 + index % 5)]
        prompt = torch.cat([torch.full((64, 1), BOS), prompt], dim=1)
        parts.append(continued(target, prompt, 256, (0.7, 1.0)[index % 2] if index % 3 else 0.0))
    return torch.cat(parts)


def report(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    layers: SubLayers,
    tokenizer: Tokenizer,
    texts: dict[str, torch.Tensor],
    chars: float,
) -> dict[str, Any]:
    """Losses and, teacher-forced over each of `texts`, the agreement with the target."""
    result: dict[str, Any] = {}
    val = texts["held-out"]
    for name, model in (("target", target), ("draft", draft)):
        loss = next_token_loss(logits_of(model, val), val).item()
        result[name] = {"val_loss": loss, "val_bits_per_char": loss / math.log(2) / chars}
    for label, rows in texts.items():
        picks = logits_of(target, rows).argmax(-1)
        alike = {"draft": logits_of(draft, rows).argmax(-1) == picks}
        for name in layers.names:
            layers.skip = name
            alike[f"without {name}"] = logits_of(target, rows).argmax(-1) == picks
        layers.skip = ""
        result[f"agreement on {label} text"] = {
            name: round(same.float().mean().item(), 4) for name, same in alike.items()
        }
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        result[f"sample {prompt!r}"] = [
            tokenizer.decode(continued(target, ids, 128, heat)[0].tolist()) for heat in (0.0, 0.8)
        ]
    return result


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model as float16 and keep on with the values it was rounded to."""
    model.half().save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="plain-text training file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of both models")
    parser.add_argument("--steps", type=int, default=3400, help="steps of the target")
    parser.add_argument("--draft-steps", type=int, default=1800, help="steps of the draft")
    parser.add_argument("--generated", type=int, default=15, help="batches of generated text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    text = args.text.read_text(encoding="utf-8")
    cut = text.index("\n\n", int(len(text) * 0.95)) + 2
    tokenizer = train_tokenizer(text[:cut])
    corpus = Corpus(text[:cut], tokenizer)
    held_out = torch.tensor(tokenizer.encode(text[cut:], add_special_tokens=False).ids)
    val, chars = chunks(held_out), (len(text) - cut) / len(held_out)
    print(f"train {len(corpus.train)} tokens, val {len(held_out)}, {chars:.2f} chars a token")

    target = new_model(TARGET_SHAPE)
    layers = SubLayers(target)

    def target_loss() -> torch.Tensor:
        rows = corpus.batch()
        return next_token_loss(target(rows).logits, rows)

    optimise(target, args.steps, 0.1, target_loss, lambda: next_token_loss(logits_of(target, val), val).item())
    save(target, tokenizer, args.output / "shakespeare")

    own = generated(target, corpus, args.generated)
    val_logits = logits_of(target, val)
    draft = new_model(DRAFT_SHAPE)

    def draft_loss() -> torch.Tensor:
        rows = corpus.batch()
        if torch.rand(()).item() < 0.5:
            rows = own[torch.randint(len(own), (BATCH_TOKENS // 256,))]
        return divergence(draft(rows).logits, logits_of(target, rows))

    optimise(draft, args.draft_steps, 0.01, draft_loss, lambda: divergence(logits_of(draft, val), val_logits).item())
    save(draft, tokenizer, args.output / "shakespeare-draft")

    torch.manual_seed(args.seed + 1)
    texts = {"held-out": val, "greedy": generated(target, corpus, 1)}  # the first batch is greedy
    print(json.dumps(report(target, draft, layers, tokenizer, texts, chars), indent=2))


if __name__ == "__main__":
    main()
