"""Fusions rewrite traces: the result of each match, and traces that stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.architectures.ops import Block, Operation, Ops, Value
from edgespec.export.architectures.rules import AttentionRule, ExpertsRule, Linear, MemoryRule, Norm
from edgespec.export.architectures.trace import walk
from edgespec.export.bundle.model_part import open_model
from edgespec.export.emit.fusions import (
    fuse,
    fuse_glu,
    fuse_memory,
    fuse_qkv,
    fuse_residual,
    products_of,
    without_unread_products,
)
from edgespec.export.emit.native import NativeOps
from tests.support import hf

Q, K, V, O, UP, GATE = (Linear(name) for name in ("q", "k", "v", "o", "up", "gate"))  # noqa: E741
RULE, MEMORY, NORM = AttentionRule(0, 0.5), MemoryRule(0, 0.5), Norm("norm")
EXPERTS = ExpertsRule("router", "gate", "up", "down", True, 1.0)


def traced(say: Callable[[Ops, Value], Value | None]) -> Block:
    """Record the operations of ``say`` on an embedding."""
    ops = Ops()
    return ops.block(lambda: say(ops, ops.embed("embedding")))


def methods(trace: Block) -> list[str]:
    return [operation.method for operation in walk(trace)]


def one(trace: Block, method: str) -> Operation:
    (found,) = (operation for operation in walk(trace) if operation.method == method)
    return found


def attend(ops: Ops, x: Value) -> Value:
    q, k, v = ops.linear(x, Q, K, V, joined=True)
    return ops.attention(q, k, v, RULE)


def test_queries_keys_and_values_of_one_input_are_made_where_they_are_stored() -> None:
    trace = traced(attend)
    fused = one(fuse_qkv(trace), "project_and_attend")
    (x,) = trace.steps[0][1]
    assert fused.fields == {"x": x, "parts": (Q, K, V), "rule": RULE}
    assert fuse_qkv(trace).result == trace.result


def test_queries_alone_read_the_keys_of_another_layer() -> None:
    trace = traced(lambda ops, x: ops.attention(ops.linear(x, Q)[0], None, None, RULE))
    assert one(fuse_qkv(trace), "project_and_attend").fields["parts"] == (Q,)


def test_keys_of_a_context_are_stored_without_attending() -> None:
    def say(ops: Ops, x: Value) -> None:
        q, k, v = ops.linear(x, Q, K, V, joined=True)
        ops.append(q, k, v, RULE)

    assert one(fuse_qkv(traced(say)), "project_and_append").fields["parts"] == (Q, K, V)


@pytest.mark.parametrize("how", ["normed rows", "two inputs", "two formats"])
def test_what_one_kernel_cannot_project_stays(how: str) -> None:
    def say(ops: Ops, x: Value) -> Value:
        q, k, v = ops.linear(x, Q, K, V)
        if how == "normed rows":
            q = ops.norm(q, NORM)
        if how == "two inputs":
            (v,) = ops.linear(ops.norm(x, NORM), V)
        return ops.attention(q, k, v, RULE)

    trace = traced(say)
    alike = (lambda parts: False) if how == "two formats" else (lambda parts: True)
    assert fuse_qkv(trace, alike) == trace


def test_a_memory_is_made_of_products() -> None:
    def say(ops: Ops, x: Value) -> Value:
        def fill() -> None:
            k, v = ops.linear(x, K, V)
            ops.append_memory(k, v, MEMORY)

        ops.fill_memory(fill)
        return ops.attend_memory(ops.linear(x, Q)[0], MEMORY)

    trace = fuse_memory(traced(say))
    assert one(trace, "project_memory").fields["parts"] == (K, V)
    assert one(trace, "project_and_look_up").fields["parts"] == (Q,)


def test_gate_and_up_are_one_step() -> None:
    def say(ops: Ops, x: Value) -> Value:
        gate, up = ops.linear(x, GATE, UP)
        return ops.gated(gate, up, "silu")

    trace = fuse_glu(traced(say))
    (x,) = trace.steps[0][1]
    assert one(trace, "glu").fields == {"x": x, "parts": (GATE, UP), "activation": "silu"}
    alone = fuse_glu(traced(lambda ops, x: ops.activate(ops.linear(x, UP)[0], "relu")))
    assert one(alone, "glu").fields["parts"] == (UP,)


def test_an_activation_with_numbers_of_its_own_stays() -> None:
    trace = traced(lambda ops, x: ops.activate(ops.linear(x, UP)[0], "xielu", "numbers"))
    assert fuse_glu(trace) == trace
    normed = traced(lambda ops, x: ops.activate(ops.norm(x, NORM), "silu"))
    assert fuse_glu(normed) == normed


@pytest.mark.parametrize("end, added", [
    (lambda ops, x: ops.linear(x, O)[0], "add_product"),
    (lambda ops, x: ops.norm(ops.linear(x, O)[0], NORM), "add_norm"),
    (lambda ops, x: ops.experts(x, EXPERTS, "silu"), "add_experts"),
])  # fmt: skip
def test_a_sub_layer_ends_in_adding_to_the_stream(end: Callable[[Ops, Value], Value], added: str) -> None:
    trace = fuse_residual(traced(lambda ops, x: ops.sublayer("mlp", 3, x, lambda x: end(ops, x))))
    (x,) = trace.steps[0][1]
    residual = one(trace, "residual")
    assert (residual.fields["kind"], residual.fields["layer"], residual.fields["x"]) == ("mlp", 3, x)
    assert residual.fields["body"].steps[-1][0].method == added
    assert one(trace, added).fields["to"] == x


def test_a_scale_is_part_of_the_norm_at_the_end() -> None:
    def say(scale: str, norm: bool) -> Block:
        def body(ops: Ops, x: Value) -> Value:
            (y,) = ops.linear(x, O)
            return ops.norm(y, NORM) if norm else y

        return traced(lambda ops, x: ops.sublayer("mlp", 0, x, lambda x: body(ops, x), scale))

    assert one(fuse_residual(say("scale", norm=True)), "add_norm").fields["scale"] == "scale"
    trace = say("scale", norm=False)
    assert fuse_residual(trace) == trace
    assert NativeOps.lacks(trace) == "sub-layers"


def test_rows_of_numbers_are_added_to_a_product() -> None:
    trace = fuse_residual(traced(lambda ops, x: ops.plus(x, ops.linear(x, O)[0])))
    assert one(trace, "add_product").fields["part"] == O


def test_products_that_nobody_reads_are_left_out() -> None:
    def say(ops: Ops, x: Value) -> Value:
        ops.linear(x, K, V)
        return ops.linear(x, Q, O)[1]

    trace = without_unread_products(traced(say))
    assert [operation.fields["parts"] for operation in walk(trace) if operation.method == "linear"] == [(Q, O)]
    assert [part for _, part in products_of(trace).values()] == [Q, O]


@pytest.mark.parametrize("name", ["llama_tied_gqa", "olmo2_mha", "phi_half"])
def test_a_decoder_is_fused_whole(checkpoint: Callable[[str], Path], name: str) -> None:
    trace = open_model(checkpoint(name), hf.CONTEXTS.get(name)).trace()
    fused = fuse(trace)
    left: set[Any] = {"sublayer", "gated", "activate"} & {*methods(fused)}
    assert not left
    assert ("attention" in methods(fused)) == (name == "olmo2_mha")  # whose rows of q and k are normed
    assert not NativeOps.lacks(trace)
    assert fuse(fused) == fused
