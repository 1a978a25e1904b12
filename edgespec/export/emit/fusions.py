"""Fusions: passes that rewrite a trace, so that one step of native operators computes what were several operations.

Each takes a trace and returns one that computes the same.  What does not match stays as it is.

::

    linear q k v, attention       ->  project_and_attend        linear gate up, gated  ->  glu
    linear q k v, append          ->  project_and_append        linear up, activate    ->  glu
    linear k v, append_memory     ->  project_memory            sublayer, which ends in a matrix, a norm
    linear q, attend_memory       ->  project_and_look_up         or experts           ->  residual with add_...
    linear, plus                  ->  add_product
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from edgespec.export.architectures.ops import Block, Operation, Value
from edgespec.export.architectures.rules import Linear
from edgespec.export.architectures.trace import walk

Step = tuple[Operation, tuple[Value, ...]]
Products = dict[Value, tuple[Value, Linear]]
Alike = Callable[[tuple[Linear, ...]], bool]  # whether matrices are stored in one form, so that one kernel reads them


def always(parts: tuple[Linear, ...]) -> bool:
    """Take all matrices to be stored in one form."""
    return True


def fuse(trace: Block, alike: Alike = always) -> Block:
    """Apply all fusions of this module."""
    trace = fuse_residual(fuse_memory(fuse_glu(fuse_qkv(trace, alike))))
    return without_unread_products(trace)


def fuse_qkv(trace: Block, alike: Alike = always) -> Block:
    """Make queries, keys and values, products of one input, where they are rotated and stored."""
    products = products_of(trace)
    fused = {"attention": "project_and_attend", "attention_over": "project_and_attend", "append": "project_and_append"}

    def change(operation: Operation) -> Operation:
        if operation.method not in fused or (found := _of_one_input(operation, products, "q", "k", "v")) is None:
            return operation
        x, parts = found
        if not alike(parts):
            return operation
        return _replaced(operation, fused[operation.method], ("q", "k", "v"), x=x, parts=parts)

    return rewritten(trace, change)


def fuse_memory(trace: Block) -> Block:
    """Make what a memory keeps, and the queries that look it up, where they are used."""
    products, names = products_of(trace), ("q", "k", "v")
    fused = {"append_memory": "project_memory", "attend_memory": "project_and_look_up"}

    def change(operation: Operation) -> Operation:
        if operation.method not in fused or (found := _of_one_input(operation, products, *names)) is None:
            return operation
        return _replaced(operation, fused[operation.method], names, x=found[0], parts=found[1])

    return rewritten(trace, change)


def fuse_glu(trace: Block) -> Block:
    """Fuse the products with gate and up, the activation and their product into one step; also a single activation."""
    products = products_of(trace)

    def change(operation: Operation) -> Operation:
        names = {"gated": ("gate", "up"), "activate": ("x",)}.get(operation.method, ())
        if not names or operation.fields.get("numbers") is not None:
            return operation
        if (found := _of_one_input(operation, products, *names)) is None:
            return operation
        return _replaced(operation, "glu", (*names, "numbers"), x=found[0], parts=found[1])

    return rewritten(trace, change)


def fuse_residual(trace: Block) -> Block:
    """Add to the stream what a sub-layer ends in, and a product to rows of numbers, in the step that computes it."""
    products = products_of(trace)

    def change(operation: Operation) -> Operation:
        if operation.method == "plus" and (found := products.get(operation.fields["product"])) is not None:
            return _replaced(operation, "add_product", ("x", "product"), to=operation.fields["x"], x=found[0],
                             part=found[1])  # fmt: skip
        if operation.method != "sublayer":
            return operation
        stream, scale, body = (operation.fields[name] for name in ("x", "scale", "body"))
        if (ended := _ending_in_add(body, stream, scale, products)) is None:
            return operation
        return _replaced(operation, "residual", ("scale", "body"), body=ended)

    return rewritten(trace, change)


def without_unread_products(trace: Block) -> Block:
    """Leave out the matrices none of whose products is read."""
    read = {value for operation in walk(trace) for value in operation.inputs} | {trace.result}

    def kept(block: Block) -> Block:
        steps = [step for step in block.steps if step[0].method != "linear" or read & {*step[1]}]
        return Block(tuple((_with_blocks(operation, kept), made) for operation, made in steps), block.result)

    return kept(trace)


# -- parts -------------------------------------------------------------------------------------------------------------


def rewritten(block: Block, change: Callable[[Operation], Operation]) -> Block:
    """Change the operations of a trace, those inside an operation first; each makes the same values."""
    steps = [(change(_with_blocks(operation, lambda inner: rewritten(inner, change))), made)
             for operation, made in block.steps]  # fmt: skip
    return Block(tuple(steps), block.result)


def products_of(trace: Block) -> Products:
    """Find the input and the matrix of each value that is a product."""
    found: Products = {}
    for operation, made in _steps(trace):
        if operation.method == "linear":
            found |= {value: (operation.fields["x"], part)
                      for value, part in zip(made, operation.fields["parts"], strict=True)}  # fmt: skip
    return found


def _steps(block: Block) -> Iterator[Step]:
    for operation, made in block.steps:
        yield operation, made
        for inner in operation.blocks:
            yield from _steps(inner)


def _with_blocks(operation: Operation, change: Callable[[Block], Block]) -> Operation:
    inner = {name: change(value) for name, value in operation.fields.items() if isinstance(value, Block)}
    return replace(operation, fields=operation.fields | inner) if inner else operation


def _replaced(operation: Operation, method: str, dropped: tuple[str, ...], **fields: Any) -> Operation:
    """Make an operation another one: without the fields ``dropped``, and with new ones."""
    kept = {name: value for name, value in operation.fields.items() if name not in dropped}
    return replace(operation, method=method, fields=kept | fields)


def _of_one_input(operation: Operation, products: Products, *names: str) -> tuple[Value, tuple[Linear, ...]] | None:
    """Return the input and the matrices of the fields ``names`` that there are; None = not all are its products."""
    given = [products.get(operation.fields[name]) for name in names if name in operation.fields]
    found = [one for one in given if one is not None]
    if not found or len(found) < len(given) or len({x for x, _ in found}) > 1:
        return None
    return found[0][0], tuple(part for _, part in found)


def _ending_in_add(body: Block, stream: Value, scale: str | None, products: Products) -> Block | None:
    """Let the body of a sub-layer end in adding to the stream; None = it ends in nothing that can."""
    last = next((operation for operation, made in body.steps if body.result in made), None)
    if last is None or body.result is None or (scale is not None and last.method != "norm"):
        return None
    if last.method == "linear":
        x, part = products[body.result]
        added = replace(last, method="add_product", fields={"to": stream, "x": x, "part": part})
    elif last.method in ("norm", "experts"):
        more = {"to": stream} | ({"scale": scale} if last.method == "norm" else {})
        added = replace(last, method=f"add_{last.method}", fields=last.fields | more)
    elif last.method in ("activate", "depthwise"):  # a clamp, or a convolution, of which nothing else is added
        added = replace(last, method="add_rows", fields={"to": stream, "x": body.result})
        return Block((*body.steps, (added, (body.result,))), body.result)
    else:
        return None
    steps = [step for step in body.steps if step[0] is not last or len(step[1]) > 1]
    return Block((*steps, (added, (body.result,))), body.result)
