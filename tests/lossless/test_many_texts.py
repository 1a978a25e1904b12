"""Thousands of texts with adapters of requests in mixed batches: plain decoding's tokens, or its distribution.

``EDGESPEC_TEXTS`` sets how many texts, ``EDGESPEC_BUNDLE`` another bundle than a small model with random weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.formulas.statistics import chi_square
from edgespec.runtimes.files.draft_adapter import DESCRIPTION, DraftAdapter
from edgespec.runtimes.files.json_file import read_object
from tests.support import hf
from tests.support.checkpoints import write_adapter

TEXTS = int(os.environ.get("EDGESPEC_TEXTS", 0))  # 0: as many as each test says
NAMES = (None, "a", "b")  # adapters of requests
TOKENS, MOST_PROMPT, TOGETHER = 24, 40, 16
FEW = 150  # texts of the test that runs every time
SAMPLING: dict[str, Any] = {"temperature": 1.6, "top_k": 3}
PAIRS = 9  # texts of two tokens, of 3 each
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """Form -> an engine with two adapters for requests, and one that drafts."""
    folder, made = tmp_path_factory.mktemp("many"), dict[str, Engine]()

    def get(form: str) -> Engine:
        if form in made:
            return made[form]
        given, config = os.environ.get("EDGESPEC_BUNDLE"), hf.CONFIGS["llama_tied_gqa"]
        bundle = Path(given) if given else folder / form
        if given:
            config = read_object(bundle / "config.json")
        else:
            base = hf.write_checkpoint(folder / f"{form}-base", config, 3)
            options = ExportOptions(str(base), bundle, [], form, threads=1, operators="native")  # type: ignore[arg-type]
            export_model(options, golden=False)
        for name, rank in (("a", 3), ("b", 8), ("draft", 4)):
            write_adapter(folder / name, config, EVERY, rank=rank, lora_alpha={"a": 2, "b": 8, "draft": 1}[name])
        described = DraftAdapter(block=4, mask=2, rank=4, acceptance=[0.6, 0.4, 0.3])
        (folder / "draft" / DESCRIPTION).write_text(described.model_dump_json(), "utf-8")
        made[form] = load(bundle, threads=1, adapters={"a": folder / "a", "b": folder / "b"},
                          draft_adapter=folder / "draft")  # fmt: skip
        return made[form]

    return get


@dataclass
class Sums:
    """Count texts and guesses."""

    texts: int = 0
    different: int = 0
    drafted: int = 0
    accepted: int = 0


def compared(engine: Engine, texts: int, seed: int) -> Sums:
    """Write texts in batches of random sizes, adapters, methods and settings, and each of them alone and plainly."""
    random, sums, vocab = np.random.default_rng(seed), Sums(), engine.bundle.manifest.target.facts.vocab
    while sums.texts < texts:
        count = min(TOGETHER, texts - sums.texts)
        prompts = [random.integers(3, vocab, random.integers(2, MOST_PROMPT)).tolist() for _ in range(count)]
        names = [NAMES[at] for at in random.integers(len(NAMES), size=count)]
        seeds = random.integers(1 << 30, size=count).tolist()
        how: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
        if random.random() < 0.5:
            how |= {"temperature": float(random.uniform(0.3, 1.5)), "acceptance": "coupled"}
            how |= {"top_k": int(random.choice([0, 20])), "repetition_penalty": float(random.choice([1.0, 1.1]))}
        given: list[dict[str, Any]] = [{}, {"adaptive": False, "gamma": int(random.integers(1, 7))}]
        how_much = given[int(random.integers(2))]
        method, together = random.choice(["uno", "uno", "self-spec", "ngram"]), int(random.choice([1, 3, TOGETHER]))
        found = engine.generate_batch(
            prompts, seeds=seeds, adapters=names, method=method, batch=together, fallback=False, **how, **how_much
        )
        for prompt, name, own, result in zip(prompts, names, seeds, found, strict=True):
            plain = engine.generate(prompt, method="ar", adapter=name, seed=own, **how)
            assert result.stats.dropped_reason is None
            sums.texts += 1
            sums.different += result.tokens != plain.tokens
            sums.drafted += result.stats.drafted
            sums.accepted += result.stats.accepted
    return sums


@pytest.mark.parametrize("form", ["int8", "int4", "fp32"])
def test_texts_of_mixed_batches_are_plain_decodings(engines: Callable[[str], Engine], form: str) -> None:
    _check(compared(engines(form), FEW // 3, 1), FEW // 3)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_ten_thousand_texts_of_mixed_batches_are_plain_decodings(engines: Callable[[str], Engine]) -> None:
    texts = TEXTS or 10_000
    _check(compared(engines("int8"), texts, 2), texts)


def _check(sums: Sums, texts: int) -> None:
    assert (sums.texts, sums.different) == (texts, 0), sums
    assert 0 < sums.accepted < sums.drafted, sums


@pytest.mark.parametrize(
    "method, draws",
    [("uno", 600), pytest.param("uno", 12_000, marks=pytest.mark.nightly),
     pytest.param("self-spec", 12_000, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_rejection_keeps_the_distribution_of_each_adapter(
    engines: Callable[[str], Engine], method: str, draws: int
) -> None:
    """First two tokens of many texts, of all adapters in one batch, against what the adapted model says."""
    engine, prompt = engines("int8"), [5, 9, 17, 3, 40]
    names = [NAMES[at % len(NAMES)] for at in range(TOGETHER - 1)]
    seen: dict[str | None, Counter[tuple[int, ...]]] = {name: Counter() for name in NAMES}
    accepted, draws = 0, TEXTS or draws
    for first in range(0, draws, len(names)):
        # three tokens asked for, two looked at: a round may then guess both of these two
        found = engine.generate_batch(
            [prompt] * len(names), seeds=range(first, first + len(names)), adapters=names, method=method,
            batch=len(names), fallback=False, adaptive=False, gamma=3, max_new_tokens=3, ignore_eos=True,
            acceptance="rejection", **SAMPLING,
        )  # fmt: skip
        for name, result in zip(names, found, strict=True):
            seen[name][tuple(result.tokens[:2])] += 1
            accepted += result.stats.accepted
    assert accepted > 0
    for number, name in enumerate(NAMES):
        expected = pairs(engine, prompt, number)
        assert len(expected) == PAIRS
        assert chi_square(seen[name], expected) > 1e-4, name
    wrong = pairs(engine, prompt, 0)
    assert chi_square(seen["a"], wrong) < 1e-4, "the test would not see a wrong adapter"


def pairs(engine: Engine, prompt: list[int], adapter: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each text of two tokens, by the logits of plain decoding."""
    slot, params = engine.new_session().target, SamplingParams(**SAMPLING)
    slot.use_adapter(adapter)

    def outcomes(prefix: list[int]) -> dict[int, float]:
        slot.follow([])
        slot.prefill(prefix[:-1])
        logits = slot.forward(np.array(prefix[-1:], np.int64)).logits[0]
        found = distribution(logits, params, prefix)
        return {int(token): float(found[token]) for token in np.flatnonzero(found)}

    return {
        (first, second): p * q
        for first, p in outcomes(prompt).items()
        for second, q in outcomes([*prompt, first]).items()
    }
