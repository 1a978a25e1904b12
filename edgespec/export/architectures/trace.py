"""Passes over a trace: each says what it handles, and anything else raises before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import signature
from typing import Any, ClassVar, Generic, TypeVar

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.ops import Block, Operation, Value

X = TypeVar("X")


class Pass(Generic[X]):
    """Interprets a trace.  ``X`` is the type of an activation: a value name in a graph, an array in numpy.

    A subclass handles an operation in a method of its name (``Operation.method``), whose parameters are the operation's
    fields.  A block arrives as a function that runs it; a ``body`` takes the residual stream.  Nothing is dropped
    silently: an operation without a method raises.  So does a field without a parameter, unless it is None or False,
    and a field of a rule that is not in ``handled_fields``, unless it has its default value.
    """

    # of each rule: fields that the pass computes by, or may ignore for a reason
    handled_fields: ClassVar[dict[type, str]] = {}

    @classmethod
    def lacks(cls, trace: Block) -> str:
        """Name the operations of a model that this pass does not handle; "" = none."""
        for operation in walk(trace):
            what = operation.what or f"operations of the kind {operation.method}"
            if (handled := _parameters(cls, operation.method)) is None:
                return what
            for name, value in operation.fields.items():
                if name not in handled and value is not None and value is not False:
                    return f"{what} with {name}"
                for rule in value if isinstance(value, tuple) else (value,):
                    if is_dataclass(rule) and (field := _unhandled(cls, rule)):
                        return f"{what} with {field}"
        return ""

    def run(self, trace: Block) -> X:
        """Interpret a trace; returns what its last value is.

        Raises:
            UnsupportedModel: an operation, or a field of a rule, that the pass does not handle.
        """
        if what := self.lacks(trace):
            raise UnsupportedModel(f"this model has {what}, which {type(self).__name__} does not handle")
        return self.interpret(trace)

    def interpret(self, trace: Block) -> X:
        """Interpret a trace that the pass handles."""
        self._known: dict[Value, X] = {}
        self._last = last_uses(trace)
        return self._block(trace)

    def _block(self, block: Block) -> X:
        for operation, made in block.steps:
            self._step(operation, made)
        found: Any = None if block.result is None else self._known[block.result]
        return found

    def _step(self, operation: Operation, made: tuple[Value, ...]) -> None:
        handled = _parameters(type(self), operation.method) or ()
        given = {name: self._field(operation, name) for name in operation.fields if name in handled}
        found: Any = getattr(self, operation.method)(**given)
        if operation.method == "linear":
            self._known.update(zip(made, found, strict=True))
        else:
            self._known[made[0]] = found
        for value in self._last.get(id(operation), ()):  # an activation can be large
            self._known.pop(value, None)

    def _field(self, operation: Operation, name: str) -> Any:
        value = operation.fields[name]
        if isinstance(value, Value):
            return self._known[value]
        if isinstance(value, Block):
            if name != "body":
                return lambda: self._block(value)

            def body(x: X) -> X:
                self._known[operation.fields["x"]] = x
                return self._block(value)

            return body
        if type(value) is tuple and value and isinstance(value[0], Value):
            return tuple(self._known[one] for one in value)
        return value


def walk(block: Block) -> Iterator[Operation]:
    """Go through the operations of a trace in order, an operation before those of its blocks."""
    for operation, _ in block.steps:
        yield operation
        for inner in operation.blocks:
            yield from walk(inner)


def last_uses(trace: Block) -> dict[int, tuple[Value, ...]]:
    """Find the values that nothing reads after an operation, by the operation's ``id``."""
    last: dict[Value, int] = {}

    def read(block: Block) -> None:
        for operation, made in block.steps:
            for inner in operation.blocks:
                read(inner)
            last.update(dict.fromkeys((*made, *operation.inputs), id(operation)))

    read(trace)
    if trace.result is not None:
        del last[trace.result]
    found: dict[int, tuple[Value, ...]] = {}
    for value, operation in last.items():
        found[operation] = (*found.get(operation, ()), value)
    return found


def _parameters(kind: type, method: str) -> tuple[str, ...] | None:
    found = getattr(kind, method, None)
    return None if found is None else _names(found)


@cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)[1:]


def _unhandled(kind: type[Pass[Any]], rule: Any, known: Sequence[str] = ()) -> str:
    """Find the first field of a rule, not at its default, that a pass does not handle.

    Args:
        known: fields that it handles here, if the outer rule lists them (``q_norm.weight``); else ``handled_fields``.
    """
    handled = kind.handled_fields
    known = known or next((handled[each] for each in type(rule).__mro__ if each in handled), "").split()
    for field in fields(rule):
        value, inside = getattr(rule, field.name), [name.partition(".")[2] for name in known
                                                     if name.startswith(f"{field.name}.")]  # fmt: skip
        if field.name not in known and not inside and (field.default is MISSING or value != field.default):
            return field.name
        if is_dataclass(value) and (inner := _unhandled(kind, value, inside)):
            return f"{field.name}.{inner}"
    return ""
