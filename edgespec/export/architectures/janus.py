"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811): the half that draws, as transformers saves it.

Codes are tokens after those of texts.  Their embeddings are what an aligner makes of learnt ones, which is computed
here once.  The LM head is two matrices with GELU between; its last one has rows of zeros for texts, which are never
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.formula import EMBEDDING, FINAL_NORM, HEAD
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import Linear
from edgespec.export.source.activations import ACTIVATE
from edgespec.export.source.derived import Extra, Floats, joined, original
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed
from edgespec.export.source.stored import read_object

INNER, ALIGNER, CODES, VQ = "generation_head.proj_out", "generation_aligner", "generation_embeddings", "vqmodel."
KEPT = "language_model.", "generation_", VQ
# the decoder of pictures, by LlamaGen's names
PLACES = {"decoder.up.": "decoder.conv_blocks.", ".block.": ".res.", "decoder.mid.block_1.": "decoder.mid.0.",
          "decoder.mid.attn_1.": "decoder.mid.1.", "decoder.mid.block_2.": "decoder.mid.2."}  # fmt: skip
GUIDANCE = 5  # as in transformers, and in the authors' generation_inference.py
TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:"


def generating_half(source: Checkpoint) -> Checkpoint:
    """Take what draws out of a checkpoint, with the decoder's configuration, and ``vq_config`` and ``side`` in it."""
    text, vision, vq = (dict(source.config.get(f"{part}_config") or {}) for part in ("text", "vision", "vq"))
    side = int(vision.get("image_size", 384)) // int(vision.get("patch_size", 16))
    config = {**text, "model_type": "janus", "tie_word_embeddings": False, "vq_config": vq, "side": side}
    if isinstance(source, ConfigOnly):
        return ConfigOnly(source.path, config)
    names: dict[str, str] = {}
    for theirs in source.index:
        name = theirs.removeprefix("model.")
        if name.startswith(KEPT):
            names[f"model.{name.removeprefix('language_model.').replace('vision_head', 'out')}"] = theirs
    found = renamed(source, names)
    found.config = config
    return found


@known("janus", "Janus-Pro-1B", "codes of pictures after tokens of texts; a head of two matrices")
class Janus(Architecture):
    """The decoder of Janus, a Llama, with the embeddings and the head of codes."""

    epsilon = ("rms_norm_eps", 1e-6)
    head_bias = True

    def configure(self) -> dict[str, Any]:
        vq, self.texts = self.config["vq_config"], self.facts.vocab
        self.size, self.inner = vq.get("num_embeddings", 16384), vq.get("projection_dim", 2048)
        self.act = self.settings.activation("", str(vq.get("hidden_act", "gelu")))
        return super().configure() | {"vocab": self.texts + self.size, "tied": False}

    def end(self, ops: Ops, x: Value) -> Value:
        inner = Linear(f"model.{INNER}.weight", f"model.{INNER}.bias")
        (y,) = ops.linear(ops.norm(x, self.norm(FINAL_NORM)), inner)
        return ops.head(ops.activate(y, self.act), None, self.head)

    def width(self, weight: str) -> int | None:
        return self.inner if INNER in weight else super().width(weight)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        found[f"{EMBEDDING}.weight"] = joined(original(source, f"{EMBEDDING}.weight"), self._aligned(source))
        for kind, shape in (("weight", (self.texts, self.inner)), ("bias", (self.texts,))):
            own = original(source, f"model.generation_head.out.{kind}")
            found[f"{HEAD}.{kind}"] = joined(_zeros(*shape), own)
        self.codes = self._picture(), {_ours(name): name for name in source.index if name.startswith(f"model.{VQ}")}
        return found

    def _picture(self) -> dict[str, Any]:
        file, side = self.settings.file.parent / "generation_config.json", self.config["side"]
        said = read_object(file, "download it again") if file.is_file() else {}
        begin, pad = said.get("generation_kwargs", {}).get("boi_token_id"), said.get("pad_token_id")
        if not isinstance(begin, int) or not isinstance(pad, int):
            raise ExportError(
                f"{file}: expected pad_token_id, and boi_token_id among generation_kwargs, which begins a picture",
                "take a checkpoint as transformers saves it, such as deepseek-community/Janus-Pro-1B",
            )
        image = {"rows": side, "columns": side, "template": TEMPLATE, "end": [begin], "pad": pad,
                 "guidance": said.get("guidance_scale") or GUIDANCE}  # fmt: skip
        return {"model_type": "vq", "first": self.texts, "image": image}

    def _aligned(self, source: Checkpoint) -> Extra:
        """Embeddings of codes after their aligner, computed row by row."""
        layers = [
            "fc1",
            *(f"hidden_layers.{at}" for at in range(self.config["vq_config"].get("num_hidden_layers", 2) - 1)),
        ]
        names = [f"model.{ALIGNER}.{layer}" for layer in layers]

        def read(rows: slice, columns: slice | None) -> Floats:
            x = source.read(f"model.{CODES}.weight", rows)
            for at, name in enumerate(names):
                x = ACTIVATE[self.act](x) if at else x
                x = x @ source.read(f"{name}.weight").T + source.read(f"{name}.bias")
            return x if columns is None else x[:, columns]

        kinds = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
        return Extra(lambda: (self.size, self.facts.hidden), read, frozenset({f"model.{CODES}.weight", *kinds}))


def _ours(name: str) -> str:
    name = name.removeprefix(f"model.{VQ}")
    for theirs, ours in PLACES.items():
        name = name.replace(theirs, ours)
    return name


def _zeros(*shape: int) -> Extra:
    def read(rows: slice, columns: slice | None) -> Floats:
        size = [
            len(range(*own.indices(most))) for own, most in zip((rows, columns or slice(None)), shape, strict=False)
        ]
        return np.zeros(size, np.float32)

    return Extra(lambda: shape, read)
