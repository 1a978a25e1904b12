"""LlamaGen: a Llama over codes of pictures, with rotary positions of lines and columns (arXiv 2406.06525).

The condition is a class, or a caption that a T5 encoder and two matrices turn into embeddings.  Class tokens come after
the codes in the vocabulary.  The LM head has rows of zeros for them, so only codes are generated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, AudioEncoderSpec, known
from edgespec.export.architectures.formula import EMBEDDING, HEAD, QKV
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.t5 import T5
from edgespec.export.architectures.towers import FIRST, SECOND, Projector
from edgespec.export.source.derived import Extra, held, joined, original, taken
from edgespec.export.source.source import Checkpoint, ConfigOnly, renamed

CLASSES, PROJECTOR = "cls_embedding.embedding_table.weight", "cls_embedding.cap_proj"
CAPTIONS = "t5"  # folder of the encoder of captions


@known(
    "llamagen", "LlamaGen c2i_B_256", "codes of pictures, of classes or captions; channels turn by lines and columns"
)
class LlamaGen(Architecture):
    """The authors' checkpoint of https://github.com/FoundationVision/LlamaGen, with its arguments as config.json."""

    aliases = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
    }
    layers_at = "layers"
    outer_names = {"model.norm": "norm"}
    layer_names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    stacked = {"attention.wqkv": QKV}
    epsilon = ("norm_eps", 1e-5)
    biases = {}
    windows = "none"
    pairs = "neighbours"
    context_default = 257

    @property
    def side(self) -> int:
        """Codes of a line of a picture."""
        return math.isqrt(self.settings.integer("block_size", 256))

    @property
    def captions(self) -> bool:
        return bool(self.config.get("cond") == "t2i")

    @property
    def before(self) -> int:
        """Positions before the first code."""
        return self.settings.integer("cls_token_num", 120 if self.captions else 1)

    @property
    def most_context(self) -> int:
        return self.before + self.side**2

    def inner_size(self, hidden: int) -> int:
        size, multiple = int(2 * 4 * hidden / 3), self.settings.integer("multiple_of", 256)
        if factor := self.settings.get("ffn_dim_multiplier", None):
            size = int(factor * size)
        return -(-size // multiple) * multiple

    def configure(self) -> dict[str, Any]:
        if not self.captions and self.before != 1:
            raise UnsupportedModel(f"{self.settings.file}: {self.before} tokens of a class: expected one")
        classes = 0 if self.captions else self.settings.integer("num_classes", 1000) + 1  # the last one is none
        return super().configure() | {"vocab": self.facts.vocab + classes, "context": self.most_context, "tied": False}

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        if self.captions:
            self.hearing, self.inserts = self._reader(source), self.facts.hidden

    def _reader(self, source: Checkpoint) -> AudioEncoderSpec:
        kind = ConfigOnly if isinstance(source, ConfigOnly) else Checkpoint
        tower = T5(kind.open(source.path / CAPTIONS), encodes=True)
        tower.facts = tower.facts.model_copy(update={"context": self.before})
        own = source if isinstance(source, ConfigOnly) else renamed(source, {name: name for name in source.index})
        tensors = taken(own, {FIRST: f"{PROJECTOR}.fc1", SECOND: f"{PROJECTOR}.fc2"})
        sizes = tower.facts.hidden, self.facts.hidden, self.facts.hidden
        return AudioEncoderSpec(
            None, tower, [Projector(own, sizes, self.before, tensors, activation="gelu_pytorch_tanh")], []
        )

    def rotations(self) -> dict[str, Rotary]:
        theta = self.settings.number("rope_base", 10000.0)
        axes = (0,) * (self.facts.head_dim // 2) if self.captions else ()  # codes start after the longest caption
        return {"rope": Rotary({"rope_type": "grid", "rope_theta": theta, "side": self.side, "before": self.before},
                               self.facts.head_dim, axes)}  # fmt: skip

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        embedding, head = original(source, "tok_embeddings.weight"), original(source, "output.weight")
        if not self.captions:
            classes = original(source, CLASSES)
            embedding, head = joined(embedding, classes), joined(head, held(np.zeros(classes.shape, np.float32)))
        return {**super().derived(source), f"{EMBEDDING}.weight": embedding, f"{HEAD}.weight": head}
