"""Single rows as pairs, as on x86 processors without AVX-512: all methods keep plain decoding's text.

``EDGESPEC_STOCK_PAIRS`` turns them on here, on any processor.  No pass may have a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.reports.proof import prove
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots import shared
from edgespec.runtimes.slots.pairs import VARIABLE
from edgespec.runtimes.slots.shared import Model
from tests.conftest import PROMPTS, THREADS
from tests.lossless.test_matrix import CHAINS, METHODS, plain_greedy
from tests.support.watched import Watched, watch

TEXTS = (PROMPTS[5], PROMPTS[9])  # of one token, and of a line
PLAIN = Settings(max_new_tokens=48, ignore_eos=True, fallback=False)
DRAWN = PLAIN.changed(temperature=0.8, seed=3, acceptance="coupled")


@pytest.fixture
def operators() -> str:
    return "stock"


@dataclass
class Paired:
    """An engine whose lone rows go as pairs, and the passes that it made."""

    engine: Engine
    watched: Watched

    def check(self) -> None:
        """Require strict passes, none of them with a lone row."""
        assert self.watched.strict()
        assert self.watched.alone() == []


@pytest.fixture(scope="module")
def opened(bundles: Callable[..., Path]) -> Iterator[Callable[[Format], Paired]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        made: dict[Format, Paired] = {}

        def get(form: Format) -> Paired:
            if form not in made:
                watched = watch(patch)
                made[form] = Paired(load(bundles("stock", form), threads=THREADS, operators="stock"), watched)
            return made[form]

        yield get


@pytest.mark.parametrize("form", ["int4", "w8a8", "fp32"])
def test_every_method_writes_plain_decodings_text(opened: Callable[..., Paired], form: Format) -> None:
    made = opened(form)
    engine = made.engine
    slot = open_slot(Model(engine.bundle.path, engine.bundle.manifest.target, "gated", 2))
    expected = [plain_greedy(slot, engine.codec.encode(text), 48) for text in TEXTS]
    drawn = [engine.generate(text, DRAWN, method="ar").tokens for text in TEXTS]
    for method in METHODS:
        more: dict[str, Any] = CHAINS.get(method, {})
        for settings, texts in ((PLAIN, expected), (DRAWN, drawn)):
            for text, tokens in zip(TEXTS, texts, strict=True):
                result = engine.generate(text, settings.changed(**more), method=method)
                assert result.tokens == tokens, f"{method} differs from plain decoding after {text!r}"
                assert result.exact
    made.check()


def test_pairs_write_what_this_processor_writes(opened: Callable[..., Paired], bundles: Callable[..., Path]) -> None:
    made = opened("int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE)
        patch.setattr(shared, "make_session", make_session)  # its passes are its own: a probe has lone rows
        with load(bundles("stock", "int4"), threads=THREADS, operators="stock") as engine:
            assert engine.exact_rows
            for text in TEXTS:
                expected = engine.generate(text, PLAIN, method="ar").tokens
                assert made.engine.generate(text, PLAIN, method="ar").tokens == expected


def test_trees_batches_and_guidance_have_no_lone_row(opened: Callable[..., Paired]) -> None:
    made = opened("int4")
    engine = made.engine
    for method, more in (("speculative", {"branch": (2,), "gamma": 3}), ("medusa", {"nodes": 8}), ("swift", {})):
        (proof,) = prove(engine, TEXTS, PLAIN.changed(**more), [method])
        assert proof.lossless, (method, proof.differences)
    alone = [engine.generate(text, PLAIN, method="ar").tokens for text in TEXTS]
    assert [one.tokens for one in engine.generate_batch(TEXTS, PLAIN, method="speculative")] == alone
    engine.generate(TEXTS[0], PLAIN.changed(max_new_tokens=8, guidance_scale=1.5))
    made.check()


def test_without_strict_mode_nothing_is_doubled(bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    watched = watch(monkeypatch)
    with load(bundles("stock", "int4"), threads=THREADS, operators="stock", strict=False) as engine:
        engine.generate(TEXTS[1], PLAIN, method="ar")
    assert {shapes["rows"][0] for _, shapes in watched.passes} <= {0, 1}
    assert any(shapes["input_ids"][1] == 1 for _, shapes in watched.passes)
