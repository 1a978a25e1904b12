"""Which tensors a decoder reads and what shapes they must have: found by running the architecture over sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.ops import Activation, AttentionRule, Kind, Linear, Norm
from edgespec.export.source.derived import DerivedCheckpoint
from edgespec.export.source.source import Checkpoint, ConfigOnly

if TYPE_CHECKING:
    from edgespec.export.architectures.base import Architecture

# not weights: tables that old versions of transformers saved with the model, scales of a quantized cache, an epsilon
BUFFERS = re.compile(r"\.(act_fn\.eps|inv_freq|masked_bias|attn\.bias|attention\.bias|[qkv]_scale|kv_scale)$")
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


class ShapeOps:
    """Runs a decoder over the widths of its activations and notes the tensors; see ``traced``."""

    def __init__(self, arch: Architecture) -> None:
        self.facts = arch.facts
        self.found: dict[str, tuple[int, ...]] = {}
        facts = self.facts
        query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        self._widths = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": facts.hidden,
                        "gate_proj": facts.intermediate, "up_proj": facts.intermediate,
                        "down_proj": facts.hidden}  # fmt: skip

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> int:
        self.found[weight] = self.facts.vocab, self.facts.hidden
        if positions is not None:
            self.found[positions] = self.facts.context, self.facts.hidden
        return self.facts.hidden

    def norm(self, x: int, norm: Norm) -> int:
        self.found[norm.weight] = (x,)
        if norm.bias is not None:
            self.found[norm.bias] = (x,)
        return x

    def linear(self, x: int, *parts: Linear, joined: bool = False) -> tuple[int, ...]:
        return tuple(self._linear(x, part, self._widths[part.weight.split(".")[-2]]) for part in parts)

    def attention(self, q: int, k: int, v: int, rule: AttentionRule) -> int:
        for norm in (rule.q_norm, rule.k_norm):
            if norm is not None:
                self.norm(self.facts.head_dim, norm)
        return q

    def gated(self, gate: int, up: int, activation: Activation) -> int:
        return up

    def activate(self, x: int, activation: Activation, numbers: str | None = None) -> int:
        if numbers is not None:
            self.found[numbers] = (3,)
        return x

    def sublayer(self, kind: Kind, layer: int, x: int, body: Callable[[int], int]) -> int:
        body(x)
        return x

    def head(self, x: int, norm: Norm, head: Linear) -> int:
        return self._linear(self.norm(x, norm), head, self.facts.vocab)

    def _linear(self, x: int, part: Linear, width: int) -> int:
        self.found[part.weight] = width, x
        if part.bias is not None:
            self.found[part.bias] = (width,)
        return width


def traced(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that a decoder reads, in its order, with the shape that config.json implies."""
    ops = ShapeOps(arch)
    arch.build(ops)
    return ops.found


def check_tensors(arch: Architecture, source: Checkpoint) -> None:
    """Every tensor the decoder asks for is there with its shape, and its layers hold nothing else.

    Of a config.json without weights only what it says itself is checked.

    A tensor that nothing reads is a bias or a norm of a variant that this architecture does not describe: the export
    would be wrong.

    Raises:
        ExportError: a tensor that is missing, of another shape, or left over.
    """
    _check_heads(arch)
    if isinstance(source, ConfigOnly):
        return
    wanted = traced(arch)
    for name, shape in wanted.items():
        got = arch.source.shape(name)
        # position tables are cut to the context
        longer = name == arch.positions and got[0] >= shape[0] and got[1:] == shape[1:]
        if got != shape and not longer:
            raise ExportError(
                f"{arch.source.path}: {name} has shape {list(got)}, but config.json implies {list(shape)}",
                "config.json and the weights belong to different models",
            )
    assert isinstance(arch.source, DerivedCheckpoint)
    used = set().union(*(arch.source.origins(name) for name in wanted))
    for name in source.index:
        layer = LAYER.search(name)
        ours = layer is not None and int(layer[1]) < arch.facts.layers and name.startswith(arch.layers_at)
        if ours and name not in used and not BUFFERS.search(name) and not _adds_nothing(source, name):
            raise ExportError(
                f"{arch.source.path}: {name} is part of the checkpoint, but {arch.model_type} has no use for it",
                "this is a variant that would come out wrong: open an issue with the config.json",
            )


def _adds_nothing(source: Checkpoint, name: str) -> bool:
    """Whether a tensor is a bias of zeros: GPTQ tools give one to every projection."""
    return name.endswith(".bias") and len(source.shape(name)) == 1 and not source.read(name).any()


def _check_heads(arch: Architecture) -> None:
    """Refuse heads that do not divide, or that no operator takes."""
    facts, file = arch.facts, arch.settings.file
    turned = max((rotary.dims for rotary in arch.rotaries.values()), default=0)
    if facts.heads % facts.kv_heads or facts.head_dim % 2 or turned % 2:
        raise ExportError(
            f"{file}: {facts.heads} heads of {facts.head_dim} ({turned} turned) on {facts.kv_heads} key heads: "
            "expected a whole number of heads for each key head, and even sizes"
        )
    if facts.head_dim % 8:
        raise UnsupportedModel(
            f"{file}: heads of {facts.head_dim}: expected a multiple of 8", "ONNX Runtime's attention takes no other"
        )
