"""What a text must be: which tokens may follow, as a function of the tokens before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What a text must be.

    Attributes:
        kind: ``json_schema``; ``regex``, which the whole text must match; or ``lark``, a grammar in Lark's notation as
            llguidance reads it.
        text: the schema as JSON, the expression, or the grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """A JSON schema, parsed or as text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """A regular expression that the whole text must match."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A grammar in Lark's notation."""
        return cls("lark", grammar)


class Constraint(Protocol):
    """A grammar that a request's text must follow.

    It is asked for any prefix, committed or guessed, in any order, and its answer depends on the prefix alone: so a row
    has the same distribution in every pass, and every method that is lossless without a constraint is so with it.
    """

    def allowed(self, prefix: Sequence[int]) -> NDArray[np.bool_] | None:
        """bool [vocab]: the tokens that may follow ``prefix``, prompt included; None = any."""
        ...

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """Tokens, at most so many, that the grammar alone says come next."""
        ...
