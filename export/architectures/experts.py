"""Mixtures of experts: which layers have one, and how their matrices are named and stored by checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import ExpertsRule, Ops, Value
from edgespec.export.architectures.settings import part_of
from edgespec.export.source.derived import Columns, Floats, Joined, Own
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.facts import ExpertFacts


@dataclass(frozen=True)
class Stacked:
    """Matrices [n, k] of all experts, stored one by one or as [experts, m, k], below each other: [experts * n, k].

    Attributes:
        of: one of each expert, or one of all.
        experts, n, k: sizes.
        first: of the n rows among the m of each expert.
        scale: what they are multiplied by.
    """

    of: tuple[Own, ...]
    experts: int
    n: int
    k: int
    first: int = 0
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts * n, k]."""
        return self.experts * self.n, self.k

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        start, stop, _ = rows.indices(self.experts * self.n)
        first, last = start // self.n, -(-stop // self.n)
        if len(self.of) == 1:
            whole = self.of[0].read(slice(first, last), None)[:, self.first : self.first + self.n]
        else:
            whole = np.stack([own.read(slice(None), None) for own in self.of[first:last]])
        found = whole.reshape(-1, self.k)[start - first * self.n : stop - first * self.n] * np.float32(self.scale)
        return found if columns is None else found[:, columns]


class MixtureOfExperts(Architecture):
    """A decoder some of whose MLPs are mixtures of experts.

    Attributes:
        routers: names of a router's matrix, below a layer, of which a checkpoint has one.
        fused: names of gate and up of all experts as one tensor, and of down.
        single: where each expert's own are, by its number and the part, if they are stored one by one; "" = never.
        parts: what gate, up and down are called there.
        expert_size: the key of an expert's width.
        expert_count: the key of how many there are.
        shared: an MLP that gets every row, and the key of its width; it counts as experts of the others' width.
        opening: the matrix [1, hidden] of its gate.
        sigmoid: probabilities are sigmoids.
    """

    routers: ClassVar[tuple[str, ...]] = ("mlp.gate.weight",)
    fused: ClassVar[tuple[tuple[str, str], ...]] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    single: ClassVar[str] = "mlp.experts.{}.{}.weight"
    parts: ClassVar[dict[str, str]] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    shared: ClassVar[tuple[str, str]] = ("", "")
    opening: ClassVar[str] = ""
    sigmoid: ClassVar[bool] = False
    expert_size: ClassVar[str] = "intermediate_size"
    expert_count: ClassVar[str] = "num_experts"

    def check(self) -> None:
        super().check()
        settings, layers = self.settings, [layer for layer in range(self.facts.layers) if self.is_mixed(layer)]
        if not layers:
            return
        count, inner = settings.integer(self.expert_count), settings.integer(self.expert_size)
        chosen = settings.integer("num_experts_per_tok")
        size = settings.integer(self.shared[1]) if self.shared[1] else 0
        always = size // inner
        if inner % 32 or self.facts.hidden % 32 or chosen > count or count + always > 1024 or size % inner:
            raise UnsupportedModel(
                f"{settings.file}: {chosen} of {count} experts of {inner} in {self.facts.hidden}, {size} shared: "
                "expected at most 1024, widths that are multiples of 32, and a shared one of whole experts"
            )
        sizes = {"count": count + always, "chosen": chosen + always, "inner": inner, "layers": layers, "always": always}
        facts = part_of(ExpertFacts, settings.file, sizes)
        self.facts = self.facts.model_copy(update={"experts": facts})

    def is_mixed(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return True

    @property
    def score_bias(self) -> str:
        """A vector that is added to probabilities when experts are chosen, below a layer; "" = none."""
        return ""

    @property
    def weights_normed(self) -> bool:
        """Whether the weights of a row's experts add up to one."""
        return self.settings.flag("norm_topk_prob")

    @property
    def expert_scale(self) -> float:
        """What a mixture's output is multiplied by."""
        return 1.0

    def transform(self, ops: Ops, h: Value, layer: int) -> Value:
        if self.facts.experts is None or layer not in self.facts.experts.layers:
            return super().transform(ops, h, layer)
        at = f"{LAYERS}.{layer}.mlp"
        gate, up, down = (f"{at}.experts.{part}.weight" for part in ("gate", "up", "down"))
        bias = f"{LAYERS}.{layer}.{self.score_bias}" if self.score_bias else None
        rule = ExpertsRule(f"{at}.router.weight", gate, up, down, self.weights_normed, self.expert_scale,
                           self.facts.experts.always, self.sigmoid, bias)  # fmt: skip
        return ops.experts(h, rule, self.activation)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, facts = dict(super().derived(source)), self.facts.experts
        if facts is None:
            return found
        count, inner, hidden = facts.count - facts.always, facts.inner, self.facts.hidden
        sizes = {"gate": (inner, hidden, 0), "up": (inner, hidden, inner), "down": (hidden, inner, 0)}
        for layer in facts.layers:
            at = f"{LAYERS}.{layer}."
            opening = (Own(source, at + self.opening),) * facts.always
            found[f"{at}mlp.router.weight"] = _joined(Own(source, at + first_of(source, at, self.routers)), opening)
            both = next((pair for pair in self.fused if source.has(at + pair[0])), self.fused[0])
            for part, (n, k, first) in sizes.items():
                if self.single and source.has(at + self.single.format(0, self.parts[part])):
                    names = (self.single.format(number, self.parts[part]) for number in range(count))
                    experts = Stacked(tuple(Own(source, at + name) for name in names), count, n, k)
                else:
                    experts = Stacked((Own(source, at + both[part == "down"]),), count, n, k, first)
                shared: tuple[Extra, ...] = ()
                if facts.always:
                    whole = Own(source, f"{at}{self.shared[0]}.{part}_proj.weight")
                    slices = tuple(Columns(whole, inner * number, inner) for number in range(facts.always))
                    shared = slices if part == "down" else (whole,)
                found[f"{at}mlp.experts.{part}.weight"] = _joined(experts, shared)
        return found


def _joined(first: Extra, more: tuple[Extra, ...]) -> Extra:
    return Joined((first, *more)) if more else first


def first_of(source: Checkpoint, at: str, names: tuple[str, ...]) -> str:
    """The first of some names that a checkpoint has."""
    return next((name for name in names if source.has(at + name)), names[0])
