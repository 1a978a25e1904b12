"""Drafters over hidden states in C's sessions: rounds as Python's, over texts that follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.hidden_state import HiddenStateDrafter
from edgespec.drafters.ngram import NGram
from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.bundle import Bundle as BundleFolder
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.conftest import TARGET
from tests.support.c_sessions import Bundle, Refused, RoundFound, Session, settings_of
from tests.support.dflash import write_dflash
from tests.support.mtp import write_mtp

pytestmark = pytest.mark.usefixtures("native")
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.9, seed=5, acceptance="coupled")
SETTINGS = (GREEDY, SAMPLED, replace(SAMPLED, acceptance="rejection", seed=-3),
            SamplingParams(0.7, top_k=20, repetition_penalty=1.2, seed=8, verification="block"))  # fmt: skip
MODELS = {"eagle": "eagle", "qwen3_tied": "mtp", "qwen3_5_delta": "mtp", "dflash": "dflash"}  # source: kind


class Both:
    """A bundle with a drafter, opened by Python and by C."""

    def __init__(self, folder: Path, kind: str) -> None:
        opened, self.kind = BundleFolder.open(folder), kind
        parts = opened.manifest.target, opened.part("drafter")
        self.target, self.slot = (open_slot(Model(folder, part, "native", 1)) for part in parts)
        self.drafter = HiddenStateDrafter(self.target, self.slot, kind)
        self.bundle = Bundle(folder)
        self.session: Session = self.bundle.session()

    def close(self) -> None:
        self.session.close()
        self.bundle.close()

    def python(self, prompt: Sequence[int], params: SamplingParams, guesses: int, method: str) -> list[RoundFound]:
        known: dict[str, Drafter] = {self.kind: self.drafter, "ngram": NGram()}
        options = DecodeOptions(24, guesses, sampling=replace(params, prompt=len(prompt)))
        rounds = decode(self.target, Policy([known[name] for name in method.split(",")]), prompt, options)
        return [RoundFound(one.tokens, one.drafted, one.rejected, one.accepted, one.finish) for one in rounds]

    def compare(self, prompt: Sequence[int], params: SamplingParams, guesses: int, method: str) -> list[RoundFound]:
        ours = self.session.rounds(prompt, settings_of(params, method, 24, guesses))
        assert self.session.counts().dropped == b""
        assert ours == self.python(prompt, params, guesses, method), (prompt, params, guesses, method)
        return ours


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder, kind = tmp_path_factory.mktemp("drafter"), MODELS[request.param]
    source, drafter = TARGET, None
    if kind != "eagle":
        model = write_mtp(folder / "model", "qwen3_tied" if kind == "dflash" else request.param, agrees=True)
        source = str(model)
        if kind == "dflash":
            drafter = str(write_dflash(folder / "drafter", open_model(model, None), agrees=True))
    options = ExportOptions(source, folder / "bundle", [kind], "int4", threads=1, operators="native", drafter=drafter)
    export_model(options, golden=False)
    made = Both(options.output, kind)
    yield made
    made.close()


def test_rounds_are_those_of_python(both: Both) -> None:
    """Prompts are new, continue the text before, or begin as it does."""
    rng, rounds, text = np.random.default_rng(3), list[RoundFound](), list[int]()
    for at in range(14):
        new = rng.integers(both.target.vocab_size, size=int(rng.integers(1, 30))).tolist()
        prompt = (new, [*text, *new], [*text[: len(text) // 2], *new])[at % 3]
        found = both.compare(prompt, SETTINGS[at % len(SETTINGS)], int(rng.integers(1, 7)), both.kind)
        text = [*prompt, *(token for one in found for token in one.tokens)][:200]
        rounds += found
    assert any(one.accepted for one in rounds)
    assert any(one.rejected for one in rounds)


def test_other_drafters_guess_too(both: Both) -> None:
    prompt = [5, 6, 7] * 5
    plain = both.session.generate(prompt, settings_of(GREEDY, "plain", 60))
    assert both.session.generate(prompt, settings_of(GREEDY, f"ngram,{both.kind}", 60, 4)) == plain
    assert both.session.counts().dropped == b""
    for fixed in (0, 1):
        text = both.session.generate([1, 2, 3], settings_of(GREEDY, both.kind, 60, fixed=fixed))
        assert text == both.session.generate([1, 2, 3], settings_of(GREEDY, "plain", 60))


def test_trees_are_refused(both: Both) -> None:
    with pytest.raises(Refused, match="draws chains here"):
        both.session.begin([1], settings_of(method=both.kind, branch=(2,)))
