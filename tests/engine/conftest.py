"""Fixtures of the engine's tests: both kinds of operators, and new engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine import prompt_cache
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, use_operators
from tests.support import hf

Get = Callable[..., Engine]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %} think {% endif %}{% endif %}"
)


def keep_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a new cache that keeps every prompt, even one that is read fast; return its folder."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("EDGESPEC_PROMPT_CACHE")
    monkeypatch.setattr(prompt_cache, "WORTH", 0.0)
    return tmp_path / "kept" / "prompts"


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Use each kind of operators in turn: the engine's tests hold for both."""
    return use_operators(request)


@pytest.fixture
def fresh(bundle: Callable[..., Path], operators: Operators) -> Callable[..., Engine]:
    """Return a function that loads a new engine over a bundle of format ``form``."""

    def get(form: str = "int4", **settings: Any) -> Engine:
        return load(bundle(form), threads=1, **{"operators": operators, **settings})

    return get


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Slot, list[int]]]:
    """Slot and tokens of every call that fills one with any."""
    seen: list[tuple[Slot, list[int]]] = []
    prefill = Slot.prefill

    def noted(self: Slot, tokens: Sequence[int]) -> None:
        if len(tokens):
            seen.append((self, [int(token) for token in tokens]))
        prefill(self, tokens)

    monkeypatch.setattr(Slot, "prefill", noted)
    return seen


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of ``hf.CONFIGS`` -> a bundle of it with a template of conversations, and a context of 2048."""
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            source, longer = hf.write_reference_checkpoint(folder / "model", name), {"max_position_embeddings": 2048}
            for file, more in (("config.json", longer), ("tokenizer_config.json", {"chat_template": TEMPLATE})):
                (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | more))
            export_model(
                ExportOptions(str(source), folder / "bundle", ["ngram"], "int4", context=2048, threads=1), golden=False
            )
            found[name] = folder / "bundle"
        return found[name]

    return get
