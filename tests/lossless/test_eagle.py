"""The embedded EAGLE-3 drafter writes plain decoding's text, greedy and drawn, quantized, on both operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.files.manifest import Format, Operators
from tests.conftest import use_operators

PROMPTS = ("ROMEO:", "KING RICHARD III:\nWhat", "First Citizen:\nWe are")
TOKENS = 64


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.mark.parametrize(
    "operators, form", [("native", "int4"), ("native", "fp32"), ("stock", "int8")], indirect=["operators"]
)
def test_the_embedded_drafter_is_lossless(tmp_path: Path, operators: Operators, form: Format) -> None:
    options = ExportOptions("builtin:shakespeare", tmp_path / "bundle", ["eagle"], form, operators=operators, threads=1)
    Exporter(options).run()
    greedy = Settings(max_new_tokens=TOKENS, ignore_eos=True, fallback=False, adaptive=False, gamma=4)
    drawn = greedy.changed(temperature=0.8, seed=3, acceptance="coupled")
    with load(options.output, threads=1, operators=operators) as engine:
        for settings in (greedy, drawn):
            for prompt in PROMPTS:
                plain = engine.generate(prompt, settings, method="ar")
                result = engine.generate(prompt, settings, method="eagle")
                assert result.tokens == plain.tokens
                assert result.method_used == "eagle"
                assert result.lossless
                assert result.exact
                assert 0 < result.stats.accepted < result.stats.drafted
        whole = [*engine.codec.encode(PROMPTS[-1]), *result.tokens]
        engine.save_session(tmp_path / "a.session", whole)  # without the drafter's cache: it reads the text again
        expected = engine.generate(whole, greedy, method="ar").tokens
    with load(options.output, threads=1, operators=operators) as engine:
        engine.restore_session(tmp_path / "a.session")
        assert engine.generate(whole, greedy, method="eagle").tokens == expected
