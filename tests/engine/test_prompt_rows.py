"""Every method continues from a prompt on the disk: it generates the same text in the same rounds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.drafters.registry import CHAIN, METHODS
from edgespec.engine import sessions
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.export.bundle.model_part import open_model
from edgespec.export.measuring import drafters
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.conftest import TARGET
from tests.engine.conftest import keep_prompts
from tests.support.assistant import write_assistant, write_target
from tests.support.dflash import write_dflash
from tests.support.mtp import write_mtp

LENGTH = 700  # tokens of the prompt: two whole blocks, and some
KINDS = {
    "eagle": "f16",
    "eagle, coded": "int4",
    "mtp": "int8",
    "mtp, hybrid": "int8",
    "dflash": "f16",
    "dflash, hybrid": "f16",
    "assistant": "f16",
}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "adaptive": False, "fallback": False, "gamma": 3}
DRAWN = GREEDY | {"temperature": 0.7, "seed": 4}  # by rejection: the text of a seed depends on what is guessed
Open = Callable[..., Engine]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return keep_prompts(tmp_path, monkeypatch)


def longer(folder: Path) -> Path:
    """Let a checkpoint have a context of 2048."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="module")
def drafted(native: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a bundle of a kind, with a drafter that is conditioned on the target."""

    @cache
    def get(kind: str) -> Path:
        folder, (method, _, hybrid) = tmp_path_factory.mktemp("rows"), kind.partition(", ")
        if method == "eagle":
            coded = ["int4"] if kind == "eagle, coded" else []
            options = ExportOptions(TARGET, folder / "bundle", ["eagle"], "int4", attention=coded, threads=1)
            export_model(options, golden=False)
            return folder / "bundle"
        if method == "assistant":
            model = longer(write_target(folder / "model"))
        else:
            model = longer(write_mtp(folder / "model", "qwen3_5_delta" if hybrid else "qwen3_tied", agrees=True))
        more: dict[str, Any] = {}
        if method in ("dflash", "assistant"):
            write = write_dflash if method == "dflash" else write_assistant
            more["drafter"] = str(longer(write(folder / "drafter", open_model(model, None), agrees=True)))
        options = ExportOptions(str(model), folder / "bundle", [method], "int8", context=2048, threads=1, **more)
        with pytest.MonkeyPatch.context() as patch:  # random hybrids accept .19 to .33, by their levels
            patch.setattr(drafters, "LEAST", 0.0)
            export_model(options, golden=False)
        return options.output

    return get


def prompt_of(engine: Engine, seed: int = 1, length: int = LENGTH) -> list[int]:
    """Draw a prompt."""
    vocab = engine.model.facts.vocab
    return [int(token) for token in np.random.default_rng(seed).integers(5, vocab - 20, length)]


def told(engine: Engine, prompt: list[int], **how: Any) -> Result:
    """Complete a prompt with a new engine, and close it."""
    with engine:
        return engine.generate(prompt, **how)


def counted(result: Result) -> tuple[list[int], int, int, int]:
    """Return the text, and what it took."""
    assert result.stats.dropped_reason is None
    return result.tokens, result.stats.rounds, result.stats.drafted, result.stats.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_goes_on(drafted: Callable[[str], Path], folder: Path, kind: str) -> None:
    """After a restart, and after another text's answer, it drafts as if it had read everything; also when sampling."""
    method = kind.partition(",")[0]

    def fresh(**more: Any) -> Engine:
        return load(drafted(kind), threads=1, attention=KINDS[kind], **more)

    with fresh(prompt_cache=False) as engine:
        prompt, more = prompt_of(engine), prompt_of(engine, 2, 20)
        expected = engine.generate(prompt, method=method, **GREEDY)
        whole = [*prompt, *expected.tokens, *more]
        later = engine.generate(whole, method=method, **GREEDY)
        drawn = engine.generate(whole, method=method, **DRAWN)
    first = told(fresh(), prompt, method=method, **GREEDY)
    assert first.stats.reused_tokens == 0
    assert counted(first) == counted(expected)
    assert first.stats.accepted
    once_more = told(fresh(), prompt, method=method, **GREEDY)
    assert counted(once_more) == counted(expected)
    assert once_more.stats.reused_tokens >= LENGTH - 2
    on = told(fresh(), whole, method=method, **GREEDY)
    assert counted(on) == counted(later)
    assert on.stats.reused_tokens >= LENGTH + 16
    assert counted(told(fresh(), whole, method=method, **DRAWN)) == counted(drawn)


@pytest.mark.parametrize("kind", ["eagle", "mtp, hybrid"])
def test_a_text_that_was_read_without_the_drafter(drafted: Callable[[str], Path], kind: str) -> None:
    """It is read again with the drafter, and only once; the longer text of another method does not prevent this."""
    method = kind.partition(",")[0]

    def fresh(**more: Any) -> Engine:
        return load(drafted(kind), threads=1, **more)

    with fresh(prompt_cache=False) as engine:
        prompt, more = prompt_of(engine), prompt_of(engine, 2, 200)
        expected, plain = (
            engine.generate(prompt, method=method, **GREEDY),
            engine.generate(prompt, method="ar", **GREEDY),
        )
    assert told(fresh(), [*prompt, *more], method="ar", **GREEDY).stats.reused_tokens == 0
    for reused in (0, LENGTH - 2):
        found = told(fresh(), prompt, method=method, **GREEDY)
        assert counted(found) == counted(expected)
        assert found.stats.reused_tokens >= reused
    assert found.tokens == told(fresh(), prompt, method="ar", **GREEDY).tokens == plain.tokens
    with fresh(prompt_cache=False) as engine:
        later = engine.generate([*prompt, *more, 7], method=method, **GREEDY)
    found = told(fresh(), [*prompt, *more, 7], method=method, **GREEDY)
    assert counted(found) == counted(later)
    assert found.stats.reused_tokens >= LENGTH - 2


@pytest.mark.parametrize("kind", ["eagle", "mtp, hybrid"])
def test_changed_rows_are_found(drafted: Callable[[str], Path], folder: Path, kind: str) -> None:
    method = kind.partition(",")[0]

    def fresh() -> Engine:
        return load(drafted(kind), threads=1)

    with fresh() as engine:
        prompt = prompt_of(engine)
        expected = engine.generate(prompt, method=method, **GREEDY)
    assert len(list(folder.iterdir())) == 2
    found = 0
    for path in sorted(folder.glob("*/*")):
        if path.suffix not in (".keys", ".end"):
            continue
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert counted(told(fresh(), prompt, method=method, **GREEDY)) == counted(expected)
        found += bool(caught)
        path.write_bytes(content)
    assert found >= 6  # two blocks and an end of the target and of the drafter


def test_other_methods_go_on(native: None, bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # the shapes of trees follow what passes cost: the same in every engine
    monkeypatch.setattr(sessions, "medians", lambda turns: {rows: 1 + 0.1 * rows for rows in turns})

    def fresh(**more: Any) -> Engine:
        return load(bundles("native"), threads=1, **more)

    with fresh(prompt_cache=False) as plain:
        names = [name for name, method in METHODS.items() if name in plain.methods and method.needs != "drafter"]
        assert len(names) > 6
        for seed, method in enumerate((*names, CHAIN)):
            prompt = prompt_of(plain, seed)
            # swift chooses its sets by the clock, but where a seed decides the text
            how = (DRAWN if method == "swift" else GREEDY) | {"method": method}
            expected, first = plain.generate(prompt, **how), told(fresh(), prompt, **how)
            again = told(fresh(), prompt, **how)
            assert counted(first) == counted(expected)
            assert (first.stats.reused_tokens, again.stats.reused_tokens) == (0, LENGTH - 1)
            assert again.tokens == expected.tokens
            assert again.stats.dropped_reason is None
            assert again.stats.rounds <= expected.stats.rounds
            if method == "swift":
                greedy = GREEDY | {"method": method}
                assert told(fresh(), prompt, **greedy).tokens == plain.generate(prompt, **greedy).tokens
