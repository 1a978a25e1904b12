"""Golden vectors, and proofs that methods reproduce plain decoding's text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.reports import proof
from edgespec.reports.proof import Difference, MethodProof, check_golden, prove
from edgespec.runtimes.files.manifest import GoldenVector
from edgespec.runtimes.opening import open_slot
from tests.conftest import PROMPTS, THREADS

Get = Callable[..., Engine]


TEXT = "First line of the text here\n\nok\n" + "".join(f"This is line number {n} of a long text.\n" for n in range(40))


def test_golden_vectors_are_what_plain_decoding_writes(bundle: Callable[..., Path], engine: Get) -> None:
    vectors, _, made_by = proof.make_golden(bundle("int4"), TEXT, THREADS)
    assert made_by == proof.made_by(load(bundle("int4"), threads=THREADS))
    assert len(vectors) == proof.PROMPTS
    lines = [engine().codec.encode(line) for line in TEXT.splitlines()]
    for vector in vectors:
        assert vector.method == "ar"
        assert 4 <= len(vector.prompt) <= proof.PROMPT_TOKENS
        assert any(line[: proof.PROMPT_TOKENS] == vector.prompt for line in lines)
        for method in ("ar", "ngram", "self-spec", "speculative"):
            made = engine().generate(vector.prompt, method=method, max_new_tokens=proof.NEW_TOKENS)
            assert made.tokens == vector.tokens
    assert proof.make_golden(bundle("int4"), TEXT, THREADS)[0] == vectors


@pytest.mark.parametrize("text, count", [("a\nb\n" * 40, 8), ("word " * 400, 1), ("x", 1)])
def test_any_text_gives_golden_prompts(engine: Get, text: str, count: int) -> None:
    prompts = proof.golden_prompts(engine(), text)
    assert len(prompts) == count
    assert all(isinstance(prompt, list) and 0 < len(prompt) <= proof.PROMPT_TOKENS for prompt in prompts)


def test_golden_vectors_that_fit_are_checked(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    prompt = made.codec.encode("ROMEO:")
    tokens = made.generate(prompt, method="ar", max_new_tokens=8).tokens
    wrong = [*tokens[:-1], (tokens[-1] + 1) % made.model.facts.vocab]
    vectors = [GoldenVector(prompt=prompt, method="ar", tokens=item) for item in (tokens, wrong, tokens * 500)]
    manifest = made.bundle.manifest.model_copy(update={"golden": vectors})
    monkeypatch.setattr(made, "bundle", type(made.bundle)(made.bundle.path, manifest))
    assert check_golden(made) == (1, 2)


def rows_after(engine: Engine, tokens: list[int]) -> np.ndarray:
    """float32 [vocab]: the logits that follow ``tokens``."""
    slot = open_slot(engine.model, context=engine.context)
    slot.prefill(tokens[:-1])
    return np.array(slot.forward(np.array(tokens[-1:], np.int64)).logits[0])


@pytest.fixture
def plain(engine: Get) -> tuple[Engine, list[int], list[int]]:
    """Make an engine, a prompt and what plain decoding writes after it."""
    made = engine()
    prompt = made.codec.encode(PROMPTS[0])
    return made, prompt, made.generate(prompt, method="ar", max_new_tokens=12, ignore_eos=True).tokens


def continued(engine: Engine, prompt: list[int], head: list[int], count: int) -> list[int]:
    """``head`` and what plain decoding writes after it, ``count`` tokens in all."""
    rest = engine.generate(prompt + head, method="ar", max_new_tokens=count - len(head), ignore_eos=True).tokens
    return head + rest


def test_a_difference_is_measured_where_it_begins(
    plain: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prompt, expected = plain
    row = rows_after(made, prompt + expected[:5])
    second = int(np.argsort(row)[-2])
    got = continued(made, prompt, [*expected[:5], second], len(expected))
    gap = float((row[expected[5]] - row[second]) / row.std())
    for limit, near in ((gap * 1.01, True), (gap * 0.99, False)):
        monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=limit: most)
        found = proof._difference(made, Settings(), 3, prompt, expected, got)
        assert (found.prompt, found.position, found.expected, found.got) == (3, 5, expected[5], second)
        assert found.gap == pytest.approx(gap, rel=1e-4)
        assert found.near_tie is near


def test_a_later_token_that_plain_decoding_would_not_write_is_no_near_tie(
    plain: tuple[Engine, list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prompt, expected = plain
    row = rows_after(made, prompt + expected[:5])
    gap = float(np.diff(np.sort(row)[-2:])[0] / row.std())
    got = continued(made, prompt, [*expected[:5], int(np.argsort(row)[-2])], len(expected))
    got[-1] = int(rows_after(made, prompt + got[:-1]).argmin())
    monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=gap + 0.01: most)
    assert not proof._difference(made, Settings(), 0, prompt, expected, got).near_tie


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=5, acceptance="coupled"),
        SamplingParams(temperature=1.2, seed=6, top_k=40, repetition_penalty=1.2, acceptance="coupled"),
        SamplingParams(repetition_penalty=1.5),
    ],
)
def test_sampled_text_is_compared_with_its_noise(
    engine: Get, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding's sample after a changed token has the best score there."""
    made = engine()
    prompt = made.codec.encode(PROMPTS[0])
    wanted = Settings(method="ar", max_new_tokens=12, ignore_eos=True, sampling=params)
    expected = made.generate(prompt, wanted).tokens
    head = expected[:4]
    second = wanted.changed(logit_bias={expected[4]: -math.inf}, max_new_tokens=1)  # the best but one, noise and all
    head.append(made.generate(prompt + head, second).tokens[0])
    got = head + made.generate(prompt + head, wanted, max_new_tokens=7).tokens
    found = proof._difference(made, wanted, 0, prompt, expected, got)
    assert (found.position, found.got) == (4, head[4])
    assert found.gap > 0
    for limit, near in ((found.gap + 1e-6, True), (found.gap - 1e-6, False)):
        monkeypatch.setattr(proof, "near_tie_limit", lambda *_, most=limit: most)
        assert proof._difference(made, wanted, 0, prompt, expected, got).near_tie is near


def test_a_text_that_ends_early_differs(plain: tuple[Engine, list[int], list[int]]) -> None:
    made, prompt, expected = plain
    for pair in ((expected, expected[:4]), (expected[:4], expected)):
        found = proof._difference(made, Settings(), 0, prompt, *pair)
        assert (found.position, found.gap, found.near_tie) == (4, math.inf, False)
        assert found.as_dict()["gap"] is None
        json.dumps(found.as_dict(), allow_nan=False)


def test_what_a_proof_says() -> None:
    near, far = Difference(0, 1, 2, 3, 0.1, True), Difference(1, 1, 2, 3, 0.9, False)
    for differences, exact, lossless in (([], True, True), ([near], False, True), ([near, far], False, False)):
        found = MethodProof("ngram", 2, 20, 2 - len(differences), differences)
        assert (found.exact, found.lossless) == (exact, lossless)
        assert found.as_dict() == {
            "method": "ngram",
            "prompts": 2,
            "tokens": 20,
            "equal": 2 - len(differences),
            "exact": exact,
            "lossless": lossless,
            "differences": [vars(item) for item in differences],
        }


def test_every_method_is_proven_on_every_prompt(engine: Get) -> None:
    seen: list[tuple[int, int, str]] = []
    wanted = Settings(max_new_tokens=16, ignore_eos=True)
    found = prove(engine(), PROMPTS[:4], wanted, ["ngram", "self-spec"], lambda *at: seen.append(at))
    assert [(item.method, item.prompts, item.equal, item.tokens) for item in found] == [
        ("ngram", 4, 4, 64),
        ("self-spec", 4, 4, 64),
    ]
    assert seen == [(at + 1, 8, "ngram" if at < 4 else "self-spec") for at in range(8)]
