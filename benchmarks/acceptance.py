"""Measure the acceptance of trained heads or of a draft, on the target's text, which was not used for training.

    python -m benchmarks.acceptance --model ./model --heads ./heads [--heads ./others] [--draft ./draft]

The target samples texts at temperature 1 with a separate seed.  Their first 16 tokens are the prompts, which the target
also continues greedily.  Needs the extra `train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import conditions, show
from edgespec.export.drafters.heads import TrainedHeads, check_heads, read_heads
from edgespec.export.source.source import resolve
from edgespec.export.training.data import greedy_texts, orders, write_texts
from edgespec.export.training.learners import Learner
from edgespec.export.training.options import PROMPT, TrainOptions
from edgespec.export.training.save import draft_acceptance, rank_shares
from edgespec.export.training.target import Source, Target
from edgespec.export.training.train import LEARNERS
from edgespec.export.training.windows import Windows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure trained heads and drafts on the target's own text.")
    parser.add_argument("--model", required=True, help="the target: folder or builtin:NAME")
    parser.add_argument("--heads", action="append", default=[], help="trained heads: folder or builtin:NAME")
    parser.add_argument("--draft", action="append", default=[], help="a draft model: folder or builtin:NAME")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = Target(Source.open(asked.model), "no", torch.device("cpu"))
    texts = own_texts(target, asked.texts, asked.new_tokens, asked.seed)
    found: dict[str, Any] = {}
    for name in asked.heads:
        folder = resolve(name)
        heads = read_heads(folder)
        check_heads(heads, target.source.arch, target.source.codec, folder)
        learner = loaded(target, heads)
        ranks = {kind: rank_shares(learner, windows, PROMPT) for kind, windows in texts.items()}
        found[name] = {
            kind: {"top1": [each[0] for each in heads], "top5": [round(sum(each[:5]), 4) for each in heads]}
            for kind, heads in ranks.items()
        }
    for name in asked.draft:
        draft = AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()
        found[name] = {
            kind: draft_acceptance(lambda tokens, draft=draft: draft(tokens).logits, target, windows, PROMPT)
            for kind, windows in texts.items()
        }
    positions = {kind: int((windows.lengths - PROMPT).sum()) for kind, windows in texts.items()}
    show(
        {
            "model": asked.model,
            "positions": positions,
            "found": found,
            "conditions": conditions(torch=torch.__version__),
        }
    )


def own_texts(target: Target, count: int, new_tokens: int, seed: int) -> dict[str, Windows]:
    """Give the target's text by kind; the first ``PROMPT`` tokens of every text are its prompt."""
    length = min(PROMPT + new_tokens, target.facts.context)
    sampled = Windows.joined(write_texts(target, order, seed, ()) for order in orders("benchmark", count, length))
    sampled = sampled.take((sampled.lengths > PROMPT).nonzero()[0])
    return {"sampled": sampled, "greedy": greedy_texts(target, sampled, PROMPT, length)}


@torch.no_grad()
def loaded(target: Target, heads: TrainedHeads) -> Learner:
    """Trained heads, ready to guess."""
    file = heads.file
    options = TrainOptions(file.kind, "", Path(), heads=file.count, own_lm_heads=file.own, hidden_size=file.inner,
                           exits=tuple(file.exits))  # fmt: skip
    learner = LEARNERS[file.kind](target, options)
    for name, place in learner.tensors().items():
        place.copy_(torch.from_numpy(heads.tensors[name].read(slice(None), None)))
    return learner


if __name__ == "__main__":
    main()
