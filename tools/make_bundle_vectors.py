"""Make vectors of manifests: all keys and choices that the exporter may write, and the memory that follows from them.

A new key is in no vector: ``python -m tools.make_bundle_vectors`` names it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from edgespec.drafters.registry import ASSISTANT, METHODS
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.formats import FILE, FORMATS, Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import SCHEMA, Manifest

HASH = "0" * 64
FACTS: dict[str, Any] = {
    "architecture": "llama", "layers": 6, "hidden": 64, "intermediate": 160, "heads": 4, "kv_heads": 2, "head_dim": 24,
    "vocab": 300, "context": 512, "rope": {"base": 1e4}, "tied": True, "parameters": 1000,
}  # fmt: skip
DELTA = {"keys": 2, "values": 4, "key_dim": 16, "value_dim": 32, "space": False}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"convolutions": [0, 2, 3], "taps": 3},
    {"convolutions": [0, 1, 3, 4], "taps": 4, "delta": DELTA},
    {"head_dims": [16, 16, 48], "shared": 3, "layer_embedding": 8},
    {"experts": {"count": 8, "chosen": 2, "inner": 32, "always": 1, "layers": [1, 2]}},
)
"""Facts of several kinds of models, beside ``FACTS``."""
BYTES = {"layers": 0.578125, "head": 0.8203125, "embedding": 0.5625}  # of a weight, in a file
DRAFTERS = ("eagle", "eagle1", "peagle", "mtp", "dflash", "dspark", ASSISTANT)
"""Kinds that runtimes read and some decode with: of a further one they have nothing more to show."""


def _model(facts: dict[str, Any], form: str, attention: str) -> dict[str, Any]:
    gates = {"nomad": {"perplexity_change": 0.01, "agreement": 0.9, "passed": True}}
    return {
        "facts": FACTS | facts,
        "format": form,
        "quantizer": "rtn",
        "head_format": "int8",
        "embedding_format": "int8" if form == "int4" else None,
        "graphs": {
            "native": {"file": "model.native.onnx", "device": "cpu", "precision": "fp32", "gated": True,
                       "padded": False, "hidden": True, "operators": "native"},
            "webgpu-fp16/draft": {"file": "draft.onnx", "device": "webgpu", "precision": "fp16",
                                  "skip": {"attention": [1], "mlp": [2]}},
        },
        "weights": "model.data",
        "index": "index.json",
        "layout": "native",
        "converted": "model.stock.data",
        "extra_rows": 64,
        "min_rows": 0,
        "attention": {"default": attention, "tables": "tables.safetensors", "learnt": ["int4", "nomad1", "nomad2"],
                      "gates": gates, "positions": 9, "depth": 9, "text": "a text", "text_sha256": HASH},
        "heads": [
            {"name": "tree", "kind": "medusa", "count": 3, "own": False},
            {"name": "block", "kind": "blockwise", "count": 3, "inner": 32},
            {"name": "after-2", "kind": "exit", "count": 1, "layer": 2},
        ],
        "head_vocab": {"file": "head.bin", "size": 100},
        "cut": False,
        "origin": "edgespec",
        "aux_hidden_layers": [1, 3],
    }  # fmt: skip


def _encoded(shared: bool) -> dict[str, Any]:
    """Return the parts that an encoder-decoder of sound adds; ``shared``: of a draft without an encoder."""
    source = {"kind": "features", "max_rows": FACTS["context"], "width": FACTS["hidden"],
              "features": {"bands": 80, "frames": 2 * FACTS["context"], "columns": 256},
              "shares_encoder": shared}  # fmt: skip
    return {"source": source} | ({} if shared else {"encoder": _model({}, "int8", "f32") | {"heads": []}})


TEXT = {
    "source": ["from", "text", 2], "prefix_tokens": [2, "to"], "languages": {"eng_Latn": 5, "kor_Hang": 6},
    "prefixes": {"translation_en_to_de": "translate: "}, "default_from": "eng_Latn", "default_to": "kor_Hang",
    "rules": {"suppress_tokens": [3], "begin_suppress_tokens": [4], "bad_words_ids": [[5, 6]],
              "no_repeat_ngram_size": 3, "min_length": 1, "max_length": 200, "forced_eos_token_id": 2, "beams": 4,
              "length_penalty": 1.5, "early_stopping": True},
}  # fmt: skip
SPEECH = {"start": 7, "languages": {"en": 8}, "tasks": {"transcribe": 9}, "no_timestamps": 10, "previous": 11,
          "no_speech": 12, "suppress_tokens": [1], "begin_suppress_tokens": [2],
          "max_initial_timestamp_index": 50}  # fmt: skip


def manifests() -> Iterator[dict[str, Any]]:
    """Manifests with every key: all formats, attentions, methods and kinds of models; bytes of keys and values."""
    attentions = get_args(Attention)
    methods = [name for name, method in METHODS.items() if method.needs != "drafter" or name in DRAFTERS]
    for number in range(len(attentions)):
        facts = KINDS[number % len(KINDS)]
        target = _model(facts, FORMATS[number % len(FORMATS)], attentions[number])
        decoder = {
            "kind": ASSISTANT if number == 5 else DRAFTERS[number % 6],
            "columns": 3 * FACTS["hidden"],
            "block": 8,
            "mask": 2,
        }
        if number == 3:  # weights as a file has them
            target |= {"format": FILE, "bytes_per_weight": BYTES | {"planes": False}}
        borrows = decoder["kind"] == ASSISTANT
        decoder |= {"reads": [1] * FACTS["layers"]} if borrows else {}
        drafter = _model({"shared": FACTS["layers"]} if borrows else {}, "int8", "f16") | {
            "heads": [],
            "decoder": decoder,
            "cut": True,
        }
        measured = {"acceptance": [0.5, 0.25], "positions": 8, "text": "a text", "text_sha256": HASH,
                    "confidence": [0.25, 0.5, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0]}  # fmt: skip
        method = {"gamma": 5, "measured": [measured], "draft_cost": 0.25, "first_cost": 0.5, "predicted_speedup": 1.5,
                  "notes": "none"}  # fmt: skip
        more: dict[str, dict[str, Any]] = {
            "self-spec": {"skip": {"attention": [1], "mlp": [2, 3], "high_head": True, "head_rows": 64}},
            "speculative": {"branch": [2, 1]},
            "medusa": {"heads": ["tree"], "ranks": [[0.5, 0.25], [0.25, 0.125]]},
            "blockwise": {"heads": ["block"]},
            "paradecode": {"heads": ["after-2"], "threshold": 0.75},
        }
        data = {
            "schema_version": SCHEMA,
            "edgespec_version": "0",
            "target": target | (_encoded(False) if number == 1 else {}),
            "draft": _model({}, "int4", "f16") | {"cut": True} | (_encoded(True) if number == 1 else {}),
            "drafter": drafter,
            "methods": {name: method | more.get(name, {}) for name in methods},
            "tokenizer": {"bos": 1, "eos": [2], "chat_template": True},
            "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
            "parity": {"top1_agreement": 1.0, "positions": 9, "perplexity": 9.0, "perplexity_source": 9.0},
            "cost": {"step_ms": 2.0, "verify_ms": {"1": 2.0, "2": 2.5}},
            "memory": {"weight_bytes": {"model.data": 9}},
            "provenance": {"model": "a model", "notes": ["a note"]},
            "golden": [{"prompt": [1, 2], "method": "ar", "tokens": [3, 4]}],
            "files": {"model.data": {"size": 9, "sha256": HASH}},
        }
        if number == 1:
            data |= {"text": TEXT, "speech": SPEECH}
            data["golden"] = [{"prompt": [1, 2], "prefix_tokens": [7], "method": "ar", "tokens": [3, 4]}]
        made = Manifest.model_validate(data).target.facts
        sizes = {name: [kv.nbytes(made, tokens) for tokens in (1, 128, 1000)] for name, kv in ATTENTION.items()}
        yield {"manifest": data, "kv_bytes": sizes}


def set_keys(part: BaseModel, found: dict[str, set[str]]) -> None:
    """Keys that are set in any part of a manifest, by the part's class."""
    found.setdefault(type(part).__name__, set()).update(part.model_fields_set)
    for value in part.__dict__.values():
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                set_keys(one, found)


def uncovered() -> list[str]:
    """Return the keys of the schema that are in none of these manifests."""
    found: dict[str, set[str]] = {}
    for case in manifests():
        set_keys(Manifest.model_validate(case["manifest"]), found)
    parts = [one for one in Part.__subclasses__() if one.__module__.startswith("edgespec.runtimes.files.")]
    return [
        f"{one.__name__}.{key}" for one in parts for key in one.model_fields if key not in found.get(one.__name__, ())
    ]


if __name__ == "__main__":
    sys.exit(f"new: {', '.join(missing)}" if (missing := uncovered()) else 0)
