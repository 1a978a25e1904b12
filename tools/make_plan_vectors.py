"""Vectors of plans: what of a bundle fits which memory, method by method, and what auto chooses from.

Budgets are the very bytes that something takes, and one less, so that no rounding can hide a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgespec.decoding.settings import DraftOptions
from edgespec.engine.methods import MethodChoice, choose_method
from edgespec.errors import EdgespecError
from edgespec.planning.footprint import PROCESS, memory_of
from edgespec.planning.memory_budget import OFF, AdmissionDecision, MemoryBudget
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.formats import FILE, FORMATS
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.slots.checkpoints import ends_of_turns
from tools.make_bundle_vectors import BYTES, FACTS, HASH, KINDS, manifests

LARGE = {
    "layers": 24, "hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "head_dim": 64, "vocab": 151_936,
    "context": 4096,
}  # fmt: skip
WIDE = {"hidden": 896, "vocab": 151_936}  # of the models that accompany it
SPEEDS = {"speculative": 1.9, "medusa": 1.45, "ngram": 1.01, "eagle": 2.3, "self-spec": 1.12, "mtp": 1.6}
METHODS = ("ar", "ngram", "speculative", "medusa", "mtp")
SHAPES = ((1, True, 128, 8, 0), (700, True, 32, 6, 4), (4096, False, 128, 3, 4))  # context, greedy, chunk, gamma, kept


def _bundles() -> Iterator[dict[str, Any]]:
    """Small and large models of every kind for native operators, and one of every format for stock ones."""
    for number, case in enumerate([*manifests()][: len(KINDS)]):
        data = case["manifest"]
        for part in ("target", "draft"):
            for of in ("source", "encoder"):
                data[part].pop(of, None)
        facts = FACTS | KINDS[number]
        if number % 2:
            facts |= {**LARGE, **({"head_dims": [64] * 20 + [256]} if "head_dims" in facts else {})}
            data["draft"]["facts"] = data["drafter"]["facts"] = FACTS | WIDE
            data["drafter"]["decoder"]["columns"] = 3 * WIDE["hidden"]
        data["target"]["facts"] = facts
        yield data
    yield next(case["manifest"] for case in manifests() if "source" in case["manifest"]["target"])
    for number, form in enumerate((*FORMATS, FILE)):
        data = next(manifests())["manifest"]
        data["draft"]["facts"] = data["drafter"]["facts"] = FACTS | WIDE
        data["drafter"]["decoder"]["columns"] = 3 * WIDE["hidden"]
        rope = {"dims": 32, "other_dims": [16]} if number % 2 else {}
        more = {"facts": FACTS | LARGE | {"tied": number < 2, "rope": rope}, "format": form, "layout": "stock"}
        data["target"] |= more | {"head_format": ("fp32", None)[number % 2], "attention": None}
        if form == FILE:
            data["target"] |= {"head_format": None, "bytes_per_weight": BYTES}
        for part in ("target", "draft", "drafter"):
            data[part]["graphs"] = {"gated": {"file": "model.strict.onnx", "gated": True, "hidden": True}}
            data[part]["layout"] = "stock"
        yield data


def _limits(manifest: Manifest, use: RunOptions) -> Iterator[int]:
    """Bytes that something takes, and one less."""
    for method in METHODS:
        for context, chunk in ((64, 16), (704, 128)):
            chosen = RunOptions(method, use.operators, context, use.attention, chunk=chunk, checkpoints=0)
            takes = memory_of(manifest, chosen).private
            yield from (takes, takes - 1)


def plans() -> Iterator[dict[str, Any]]:
    """Bytes of every part by method and shape; what is admitted under which limit; what auto and chains choose."""
    for number, data in enumerate(_bundles()):
        sizes = {
            "model.data": 400 << 20,
            "model.strict.onnx": 3_000_001,
            "model.native.onnx": 70_007,
            "tokenizer.json": 7 << 20,
        }
        data["files"] = {name: {"size": size, "sha256": HASH} for name, size in sizes.items()}
        data["methods"] = {name: data["methods"][name] for name in ("ar", "self-spec", "blockwise", *SPEEDS)}
        for name, method in data["methods"].items():
            method["predicted_speedup"] = SPEEDS.get(name, 0) * (1, 0.6, 0)[number % 3] or None
        manifest = Manifest.model_validate(data)
        stock = manifest.target.layout == "stock"
        use = RunOptions(
            operators="stock" if stock else "native",
            attention=None if stock else default_attention(manifest.target),
            context=manifest.target.facts.context,
        )
        memory = []
        for name in METHODS:
            for context, greedy, chunk, gamma, kept in SHAPES:
                chosen = RunOptions(name, use.operators, context, use.attention, gamma, chunk=chunk, greedy=greedy,
                                    checkpoints=kept)  # fmt: skip
                parts = {part.name: part.private for part in memory_of(manifest, chosen).parts if part.private}
                memory.append({"method": name, "context": context, "greedy": greedy, "chunk": chunk, "gamma": gamma,
                               "checkpoints": kept, "parts": parts})  # fmt: skip
        memory_budget = MemoryBudget(manifest, use, OFF)
        admitted = []
        for limit in sorted(set(_limits(manifest, use))):
            memory_budget.limit = limit
            together = memory_budget.together([name for name in METHODS if name != "ar"], 700)
            admitted.append({"limit": limit, "bundle": _said(memory_budget.admit_bundle, None), "together": together})
            for at, name in enumerate(METHODS[len(admitted) % 2 :: 2]):
                busy, idle = (0, 0) if at else (1 << 16, 1 << 20)
                how = {"gamma": 8, "greedy": at % 2 == 0, "busy": busy, "idle": idle}
                found = _said(memory_budget.admit, name, 700, **how, methods=list(manifest.methods))
                admitted[-1][name] = {**how, "found": found}
        choices = []
        for wanted, proposers in ((None, ()), ("medusa", ()), ("chain", ()), (None, ("ngram", "eagle")), ("x", ())):
            found = _said(choose_method, manifest, wanted, DraftOptions(proposers=proposers))
            choices.append({"method": wanted, "proposers": list(proposers), "found": found})
        yield {"manifest": data, "operators": use.operators, "process": PROCESS.private, "memory": memory,
               "admitted": admitted, "choices": choices}  # fmt: skip


def _said(run: Any, *given: Any, **more: Any) -> Any:
    """Give what a function gave, or the error that it raised, as JSON."""
    try:
        found = run(*given, **more)
    except EdgespecError as error:
        hint = error.hint and error.hint.split("; there are: ")[0]  # ports have no methods of other packages
        return {"error": error.message, "hint": hint}
    if isinstance(found, AdmissionDecision):
        return [found.method, found.chunk, found.reason, found.crowded, found.checkpoints]
    return _choice(found) if isinstance(found, MethodChoice) else found


def _choice(choice: MethodChoice) -> dict[str, Any]:
    several = [_choice(one) for one in (*choice.proposers, *choice.candidates)]
    return {"name": choice.name, "gamma": choice.gamma, "reason": choice.reason, "promise": choice.promise,
            "several": several if len(several) > 1 or choice.proposers else []}  # fmt: skip


def turns() -> Iterator[dict[str, Any]]:
    """Lengths of prompts at which states are kept."""
    prompts = ([5] * 20 + [1] + [5] * 20 + [1] + [5] * 9, [5] * 20 + [2] + [5] * 60, [5] * 60,
               [5] * 20 + [1] + [5] * 4 + [1], [5] * 9, [1], [1, 2, 1] + [7] * 33)  # fmt: skip
    for tokens in prompts:
        yield {"tokens": tokens, "eos": [1, 2], "lengths": ends_of_turns(tokens, {1, 2})}
