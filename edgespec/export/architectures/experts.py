"""Mixtures of experts: which layers have one, and how their matrices are named and stored by checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import LAYERS, Part, Switch
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import ExpertsRule
from edgespec.export.architectures.settings import part_of
from edgespec.export.source.derived import Extra, Floats, columns_of, joined, joined_rows, original
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import FileRows
from edgespec.runtimes.files.facts import ExpertFacts
from edgespec.runtimes.files.formats import FILE_KINDS, SPECS, acts_of

INT8 = SPECS["int8"].kind  # of matrices that do not stay as they are


def stacked(of: tuple[Extra, ...], experts: int, n: int, k: int, first: int = 0) -> Extra:
    """Put matrices [n, k] of all experts below each other -> [experts * n, k].

    Args:
        of: one of each expert, or one of all, [experts, m, k].
        experts, n, k: sizes.
        first: of the n rows among the m of each expert.
    """

    def read(rows: slice, columns: slice | None) -> Floats:
        start, stop, _ = rows.indices(experts * n)
        at, end = start // n, -(-stop // n)
        if len(of) == 1:
            whole = of[0].read(slice(at, end), None)[:, first : first + n]
        else:
            whole = np.stack([each.read(slice(None), None) for each in of[at:end]])
        found = whole.reshape(-1, k)[start - at * n : stop - at * n]
        return found if columns is None else found[:, columns]

    origins = frozenset[str]().union(*(each.origins for each in of))
    return Extra(lambda: (experts * n, k), read, origins, lambda: joined_rows(of) if len(of) == experts else None)


def alike(parts: dict[str, Extra]) -> dict[str, Extra]:
    """Keep the matrices of a mixture as their file has them, as far as its kernel reads them.

    Gate and up must be of one type; down may be of another one that multiplies the same activations, as all types of
    blocks do.  What is not kept becomes int8, which does so too.

    Args:
        parts: gate, up and down, by their names.
    """
    gate, up, down = parts  # names

    @cache
    def kept() -> frozenset[str]:
        types = {name: rows.type for name, part in parts.items() if (rows := part.blocks()) is not None}
        if types.get(gate) != types.get(up):
            types = {name: its for name, its in types.items() if name == down}
        acts = {acts_of(FILE_KINDS.get(types.get(name, ""), INT8)) for name in parts}
        return frozenset(types) if len(acts) == 1 else frozenset()

    def blocks(name: str) -> Callable[[], FileRows | None]:
        return lambda: parts[name].blocks() if name in kept() else None

    return {name: replace(part, blocks=blocks(name)) for name, part in parts.items()}


@dataclass(frozen=True)
class Experts(Part):
    """Mixtures of experts in the layers that ``Architecture.is_moe_layer`` names."""

    size: str = "intermediate_size"  # the key of an expert's width
    count: str = "num_experts"  # the key of how many there are
    chosen: str = "num_experts_per_tok"  # the key of how many a row is sent to
    # names of a router's matrix, below a layer, of which a checkpoint has one
    routers: tuple[str, ...] = ("mlp.gate.weight",)
    # names of gate and up of all experts as one tensor, and of down
    fused: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    # where each expert's own are, by its number and the part, if they are stored one by one; "" = never
    single: str = "mlp.experts.{}.{}.weight"
    # names of gate, up and down in the checkpoint
    parts: dict[str, str] = field(default_factory=lambda: {part: f"{part}_proj" for part in ("gate", "up", "down")})
    # an MLP that gets every row, and the key of its width; it counts as experts of the others' width
    shared: tuple[str, str] = ("", "")
    shared_gate: str = ""  # the matrix [1, hidden] of its gate
    sigmoid: bool = False  # probabilities are sigmoids
    normed: Switch = ("norm_topk_prob", False)  # the weights of a row's experts add up to one
    scale: str = ""  # the key of a factor of the output; "" = none
    # a vector below a layer that is added to probabilities when experts are chosen, and the switch for it
    bias: tuple[str, Switch] = ("", False)

    def configure(self, arch: Architecture) -> dict[str, Any]:
        settings, hidden = arch.settings, arch.facts.hidden
        layers = [layer for layer in range(arch.facts.layers) if arch.is_moe_layer(layer)]
        if not layers:
            return {}
        count, inner = settings.integer(self.count), settings.integer(self.size)
        chosen = settings.integer(self.chosen)
        size = settings.integer(self.shared[1]) if self.shared[1] else 0
        always = size // inner
        if inner % 32 or hidden % 32 or chosen > count or count + always > 1024 or size % inner:
            raise UnsupportedModel(
                f"{settings.file}: {chosen} of {count} experts of {inner} in {hidden}, {size} shared: "
                "expected at most 1024, widths that are multiples of 32, and a shared one of whole experts"
            )
        facts = part_of(ExpertFacts, settings.file, count=count + always, chosen=chosen + always, inner=inner,
                        layers=layers, always=always)  # fmt: skip
        return {"experts": facts}

    def run(self, arch: Architecture, ops: Ops, h: Value, layer: int) -> Value:
        return ops.experts(h, self.rule(arch, layer), arch.activation)

    def rule(self, arch: Architecture, layer: int) -> ExpertsRule:
        """Say how a layer mixes experts."""
        at, mixed = f"{LAYERS}.{layer}.mlp", arch.facts.experts
        assert mixed is not None
        gate, up, down = (f"{at}.experts.{part}.weight" for part in ("gate", "up", "down"))
        bias = f"{LAYERS}.{layer}.{self.bias[0]}" if arch.on(self.bias[1]) else None
        scale = arch.settings.number(self.scale, 1.0) if self.scale else 1.0
        return ExpertsRule(f"{at}.router.weight", gate, up, down, arch.on(self.normed), scale, mixed.always,
                           self.sigmoid, bias)  # fmt: skip

    def derived(self, arch: Architecture, source: Checkpoint) -> dict[str, Extra]:
        facts, hidden, found = arch.facts.experts, arch.facts.hidden, dict[str, Extra]()
        if facts is None:
            return found
        count, inner = facts.count - facts.always, facts.inner
        sizes = {"gate": (inner, hidden, 0), "up": (inner, hidden, inner), "down": (hidden, inner, 0)}
        for layer in facts.layers:
            at = f"{LAYERS}.{layer}."
            gates = (original(source, at + self.shared_gate),) * facts.always
            found[f"{at}mlp.router.weight"] = joined(original(source, at + first_of(source, at, self.routers)), *gates)
            parts: dict[str, Extra] = {}
            both = next((pair for pair in self.fused if source.has(at + pair[0])), self.fused[0])
            for part, (n, k, first) in sizes.items():
                if source.has(f"{at}mlp.experts.{part}.weight"):  # those of all below each other, as in GGUF
                    experts = original(source, f"{at}mlp.experts.{part}.weight")
                elif self.single and source.has(at + self.single.format(0, self.parts[part])):
                    names = (self.single.format(number, self.parts[part]) for number in range(count))
                    experts = stacked(tuple(original(source, at + name) for name in names), count, n, k)
                else:
                    experts = stacked((original(source, at + both[part == "down"]),), count, n, k, first)
                shared: tuple[Extra, ...] = ()
                if facts.always:
                    whole = original(source, f"{at}{self.shared[0]}.{part}_proj.weight")
                    slices = tuple(columns_of(whole, inner * number, inner) for number in range(facts.always))
                    shared = slices if part == "down" else (whole,)
                parts[f"{at}mlp.experts.{part}.weight"] = joined(experts, *shared)
            found |= alike(parts)
        return found


def first_of(source: Checkpoint, at: str, names: tuple[str, ...]) -> str:
    """Return the first of some names that a checkpoint has."""
    return next((name for name in names if source.has(at + name)), names[0])
