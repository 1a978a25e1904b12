"""Every pass over a trace raises at what it does not handle: an operation, a field of one, a field of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Block, Operation, Ops, Value
from edgespec.export.architectures.rules import AttentionRule, MemoryRule, Norm, RelativeRule
from edgespec.export.architectures.shapes import Shapes
from edgespec.export.architectures.trace import Pass, last_uses, walk
from edgespec.export.bundle.model_part import open_model
from edgespec.export.emit.device import DeviceHeads, DeviceOps
from edgespec.export.emit.native import NativeOps
from edgespec.export.emit.plan import StockPlan
from edgespec.export.emit.standard import StandardOps
from edgespec.export.emit.stock import GraphOps, native_only
from edgespec.export.measuring.mixer import _Parts
from edgespec.export.measuring.variants import VariantOps
from edgespec.export.quantization.calibrate import CalibrationOps, HeadInputs
from edgespec.export.quantization.reference import NumpyOps, SequenceOps, reference_logits
from edgespec.export.source.source import resolve
from tests.conftest import TARGET
from tests.support import hf

PASSES: list[type[Pass[Any]]] = [Shapes, StockPlan, NativeOps, GraphOps, StandardOps, DeviceOps, DeviceHeads,
                                 NumpyOps, SequenceOps, HeadInputs, CalibrationOps, VariantOps,
                                 _Parts]  # fmt: skip


@dataclass(frozen=True)
class OtherRule(AttentionRule):
    anchors: int = 0


@dataclass(frozen=True)
class OtherNorm(Norm):
    power: float = 2.0


def all_passes(kind: type[Any] = Pass) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_passes(each)


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return open_model(resolve(TARGET), None)


def changed(block: Block, method: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Block:
    """Add what ``change`` makes of the fields of every operation of a method, in ``block`` and in its sub-layers."""
    steps = []
    for operation, made in block.steps:
        fields = dict(operation.fields)
        if operation.method == "sublayer":
            fields["body"] = changed(fields["body"], method, change)
        if operation.method == method:
            fields |= change(fields)
        steps.append((replace(operation, fields=fields), made))
    return Block(tuple(steps), block.result)


def with_rule(attend: dict[str, Any], anchors: int) -> dict[str, Any]:
    rule = {each.name: getattr(attend["rule"], each.name) for each in fields(attend["rule"])}
    return {"rule": OtherRule(**rule, anchors=anchors)}


def test_every_pass_is_here() -> None:
    assert {kind for kind in all_passes() if kind.__module__.startswith("edgespec.")} == set(PASSES)


@pytest.mark.parametrize("kind", PASSES)
def test_what_a_pass_does_not_know_raises_before_it_begins(arch: Architecture, kind: type[Pass[Any]]) -> None:
    trace = arch.trace()
    assert not kind.lacks(trace)
    unheard_of = Operation("unheard_of", "", {}), ()
    unknown: dict[str, Block] = {
        "unheard_of": Block((*trace.steps, unheard_of), trace.result),
        "attention with anchors": changed(trace, "attention", lambda attend: {"anchors": 4}),
        "attention with anchors ": changed(trace, "attention", lambda attend: with_rule(attend, 4)),
        "with power": changed(trace, "norm", lambda norm: {"norm": OtherNorm(norm["norm"].weight, power=3)}),
        "with q_norm.power": changed(trace, "attention", lambda attend: {
            "rule": replace(attend["rule"], q_norm=OtherNorm("any", power=3))}),
    }  # fmt: skip
    for what, other in unknown.items():
        assert what.strip() in kind.lacks(other), what
        with pytest.raises(UnsupportedModel, match=what.strip()):
            kind.run(kind.__new__(kind), other)
    # an unset or default field changes nothing
    for same in (changed(trace, "attention", lambda attend: {"anchors": None}),
                 changed(trace, "attention", lambda attend: with_rule(attend, 0))):  # fmt: skip
        assert not kind.lacks(same)


@pytest.mark.parametrize("name", sorted(hf.CONFIGS))
def test_what_stock_operators_lack_is_computed(checkpoint: Callable[[str], Any], name: str) -> None:
    assert bool(native_only(open_model(checkpoint(name), hf.CONTEXTS.get(name)))) == (name in hf.NATIVE_ONLY)


def test_head_norms_of_native_operators_have_no_bias(arch: Architecture) -> None:
    def biased(attend: dict[str, Any]) -> dict[str, Any]:
        return {"rule": replace(attend["rule"], k_norm=Norm("weight", "bias"))}

    assert NativeOps.lacks(changed(arch.trace(), "attention", biased)) == "attention with k_norm.bias"


def test_activations_are_forgotten_after_their_last_use(arch: Architecture) -> None:
    trace, held = arch.trace(), []

    class Watched(NumpyOps):
        def linear(self, x: Any, parts: Any, joined: bool) -> Any:
            held.append(len(self._known))
            return super().linear(x, parts, joined)

    tokens = [3, 4, 5]
    found = Watched(arch, tokens).run(trace)[0]
    np.testing.assert_array_equal(found, reference_logits(arch, tokens))
    assert max(held) <= 4
    values = {value for operation in walk(trace) for value in operation.inputs}
    assert values <= {value for dead in last_uses(trace).values() for value in dead} | {trace.result}
    assert sum(operation.method == "linear" for operation in walk(trace)) == len(held)


def test_what_only_encoder_decoders_have_is_refused_by_stock_operators(arch: Architecture) -> None:
    q, memory, relative = Value(0), MemoryRule(0, 0.5), RelativeRule("table", 4, False)
    rule = AttentionRule(0, 0.5, relative=relative)
    refused: list[tuple[Callable[[Ops], Value | None], str]] = [
        (lambda ops: ops.attend_memory(q, memory), "attention over an encoder's rows"),
        (lambda ops: ops.fill_memory(lambda: None), "attention over an encoder's rows"),
        (lambda ops: ops.append_memory(q, q, memory), "attention over an encoder's rows"),
        (lambda ops: ops.encoded(q, Norm("norm")), "an encoder"),
        (lambda ops: ops.place(q, "positions"), "positions that are added to rows of numbers"),
        (lambda ops: ops.attention(q, q, q, rule), "attention with relative"),
        (lambda ops: ops.sublayer("mlp", 0, q, lambda x: x, norm=Norm("norm")), "sub-layers with norm"),
    ]
    for said, what in refused:
        ops = Ops()
        trace = ops.block(partial(said, ops))
        assert GraphOps.lacks(trace) == what
        assert not NumpyOps.lacks(trace)
