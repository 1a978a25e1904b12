"""Drafters as their authors' code writes them leave the text as it is, however badly they guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from tests.support.published import Published, write_target

METHODS = {
    "dspark_speculators_no_anchor": "dspark",
    "eagle1": "eagle1",
    "eagle31_speculators": "eagle",
    "mtp_speculators": "mtp",
    "peagle_speculators": "peagle",
}
PROMPT = "The harbour lights came on"


@pytest.mark.parametrize("name", METHODS)
def test_texts_are_plain_decodings(native: None, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, coupled and by rejection, where the seed gives the same text again."""
    monkeypatch.setattr("edgespec.export.measuring.drafters.LEAST", 0.0)  # their weights are random
    target, method = write_target(tmp_path / "model"), METHODS[name]
    drafter = Published.read(name).write(tmp_path / "drafter", target)
    made = ExportOptions(str(target), tmp_path / "bundle", [method], "int8", threads=1, drafter=str(drafter))
    Exporter(made).run()
    greedy = Settings(max_new_tokens=24, ignore_eos=True, fallback=False, adaptive=False, gamma=4)
    drawn = greedy.changed(temperature=0.7, seed=3, acceptance="coupled")
    rejected = greedy.changed(temperature=1.0, seed=3)
    with load(made.output, threads=1) as engine:
        for settings in (greedy, drawn):
            found = engine.generate(PROMPT, settings, method=method)
            assert found.tokens == engine.generate(PROMPT, settings, method="ar").tokens
            assert found.stats.drafted > 8
            assert found.stats.dropped_reason is None
            assert found.lossless
        first, again = (engine.generate(PROMPT, rejected, method=method) for _ in range(2))
        assert first.tokens == again.tokens
        assert first.stats.drafted > 8
        assert first.lossless
