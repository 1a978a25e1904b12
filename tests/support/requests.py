"""Requests whose length does not depend on what the model was trained to end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from tests.conftest import PROMPTS

METHODS = ("ar", "ngram", "self-spec", "speculative")
PROMPT = PROMPTS[0]
NEW = 48
Get = Callable[..., Engine]


def ask(engine: Engine, prompt: Any = PROMPT, **settings: Any) -> Result:
    """A request whose length does not depend on what the model was trained to end with."""
    return engine.generate(prompt, **{"max_new_tokens": NEW, "ignore_eos": True, "method": "ar", **settings})
