"""The end of a native program: hidden states, the LM head, and groups of heads."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.drafters.heads import cut_head, group_matrices
from edgespec.export.emit.program import Floats, Program
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.slots.native_runner import Gates


def emit_heads(
    program: Program, x: Floats, norm: Norm | None, head: Linear, gates: Gates, read: Callable[[], Floats]
) -> None:
    """Write the end of a decoder: hidden states, the model's LM head, and groups of heads, each with a gate.

    A group begins with the final norm of the rows that reach an LM head; ``runtimes.manifest.HeadGroup`` defines the
    rest.  Rows for LM heads are ordered by head: those of head j are j * R to (j + 1) * R.  ``read`` emits the input of
    the model's own LM head after the norm.  Without a norm no groups are written.
    """
    plan = program.plan.heads
    own = cut_head(head) if plan.only else head
    shared = cut_head(head) if plan.cut else head
    program.gated(gates.hidden, lambda: program.step("store", x=x.id, k=x.width))
    program.gated(
        gates.lm, lambda: program.logits(program.quantize(read(), "head", own.weight, norm=norm, rows=1), own)
    )
    for number, group in enumerate(plan.groups):
        if norm is None or group.kind in ("markov", "embedding"):  # which read tokens, not rows
            continue
        program.gated(gates.heads[number], lambda group=group: _group(program, x, norm, shared, group))  # type: ignore[misc]


def _group(program: Program, x: Floats, norm: Norm, shared: Linear, group: HeadGroup) -> None:
    matrices = group_matrices(group)
    first, second = matrices.first, matrices.second
    width = program.plan.width(*first)
    if group.kind == "exit":
        y = program.floats("heads", width)
        program.linear(program.quantize(x, "head", first[0].weight, norm=norm, rows=1), first, y, rows=1)
    else:
        h = program.floats("normed", x.width)
        program.step("norm", x=x.id, **program.norm(norm), k=x.width, out=h.id, rows=1)
        inner = program.floats("heads", width)
        program.linear(program.quantize(h, "head", first[0].weight, rows=2), first, inner, rows=1)
        program.step("silu", x=inner.id, k=width)
        if second is not None:
            outer = program.floats("heads", program.plan.width(second))
            program.linear(program.quantize(inner, "inner", second.weight, rows=2), (second,), outer, rows=1)
            inner = outer
        y = program.floats("split", x.width)
        program.step("split", x=inner.id, base=h.id, n=x.width, times=group.count, out=y.id)
    if matrices.heads:  # each head reads its own rows
        for at, own in enumerate(matrices.heads):
            program.logits(program.quantize(y, "head", own.weight, rows=2, first=at), own, first=at, raw=True)
    else:
        act = program.quantize(y, "head", shared.weight, rows=2, times=group.count)
        program.logits(act, shared, times=group.count)
