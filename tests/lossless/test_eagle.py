"""The embedded EAGLE-3 drafter reproduces plain decoding's text, in every format, on both operators, in every use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.settings import Settings
from edgespec.drafters import hidden_state
from edgespec.drafters.draft_cache import DraftCache
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.methods import check_device, choose_method
from edgespec.engine.sharing import PrefillBudget
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.formulas.statistics import chi_square
from edgespec.reports.proof import prove
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from tests.conftest import THREADS
from tests.support.requests import assert_plain_text

PROMPTS = ("ROMEO:", "KING RICHARD III:\nWhat", "First Citizen:\nWe are")
GREEDY = Settings(max_new_tokens=32, ignore_eos=True, fallback=False, adaptive=False, gamma=4)
DRAWN = GREEDY.changed(temperature=0.8, seed=3, acceptance="coupled")
GUIDED = GREEDY.changed(guidance_scale=2.0, negative_prompt="JULIET:\n")
DRAWS = 600

Open = Callable[[Format, Operators], Engine]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], Path]:
    @cache
    def get(form: Format) -> Path:
        options = ExportOptions("builtin:shakespeare", tmp_path_factory.mktemp("eagle") / form, ["eagle"], form)
        export_model(options, golden=False)
        return options.output

    return get


@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_texts_are_plain_decodings(bundle: Callable[[Format], Path], operators: Operators, form: Format) -> None:
    with load(bundle(form), threads=THREADS, operators=operators) as engine:
        assert_plain_text(engine, "eagle", PROMPTS, GREEDY.changed(adaptive=form == "int8"))
        assert_plain_text(engine, "eagle", PROMPTS, DRAWN)
        assert_plain_text(engine, "eagle", PROMPTS[1:], GUIDED)
        assert_plain_text(engine, "chain", PROMPTS, DRAWN.changed(proposers=("ngram", "eagle")))
        together = engine.generate_batch(PROMPTS, DRAWN, method="eagle")
        assert [one.tokens for one in together] == [engine.generate(each, DRAWN).tokens for each in PROMPTS]
        assert all(one.stats.accepted for one in together)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_trees(bundle: Callable[[Format], Path], operators: Operators, form: Format) -> None:
    """Plain decoding's texts on native operators; on stock ones attention adds up rows of trees in another order."""
    with load(bundle(form), threads=THREADS, operators=operators) as engine:
        for settings in (GREEDY, DRAWN, GUIDED):
            for branch in ((2,), (3, 2, 1)):
                wanted = settings.changed(branch=branch, gamma=9 if len(branch) > 1 else 4)
                if operators == "native":
                    assert_plain_text(engine, "eagle", PROMPTS, wanted)
                    continue
                (found,) = prove(engine, PROMPTS, wanted, ["eagle"])
                assert found.lossless, found.differences
                result = engine.generate(PROMPTS[0], wanted, method="eagle")
                assert result.stats.dropped_reason is None
                assert 0 < result.stats.accepted < result.stats.drafted
                assert not result.exact


def test_rows_are_of_the_text_whoever_guessed_it(
    bundle: Callable[[Format], Path], operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While n-grams guess right, the drafter reads what they wrote, with the states of the same tokens."""
    monkeypatch.setattr(hidden_state, "MOST_OWED", 8)
    appended, append = list[tuple[int, list[int]]](), DraftCache.append

    def record(self: DraftCache, tokens: Sequence[int], states: NDArray[np.float32]) -> None:
        appended.append((len(self), list(tokens)))
        append(self, tokens, states)

    monkeypatch.setattr(DraftCache, "append", record)
    with load(bundle("int8"), threads=THREADS, operators=operators) as engine:
        prompt = engine.codec.encode("the the the the the the the the the the the the")
        settings = GREEDY.changed(max_new_tokens=80, proposers=("ngram", "eagle"))
        result = engine.generate(prompt, settings, method="chain")
        assert sum(one.accepted for one in result.stats.recent if one.method == "ngram") > 8
        text = [*prompt, *result.tokens]
    assert any(at >= len(prompt) for at, _ in appended)
    for at, tokens in appended:
        assert tokens == text[at + 1 : at + 1 + len(tokens)]


def test_turns_and_a_saved_session(bundle: Callable[[Format], Path], operators: Operators, tmp_path: Path) -> None:
    """A turn continues where the last one ended; a session is saved without the drafter's cache, which is rebuilt."""
    with load(bundle("int8"), threads=THREADS, operators=operators) as engine:
        text = engine.codec.encode(PROMPTS[0])
        for more in ("\n\nJULIET:\n", "\n\nROMEO:\nI", ""):
            first = engine.generate(text, GREEDY, method="eagle")
            # a turn of the other request on the same slot
            other = engine.generate(text, GREEDY, method="ngram" if more else "ar")
            assert first.tokens == other.tokens
            assert first.stats.accepted
            text = [*text, *first.tokens, *engine.codec.encode(more)]
        engine.save_session(tmp_path / "a.session", text)
        expected = engine.generate(text, GREEDY, method="ar").tokens
    with load(bundle("int8"), threads=THREADS, operators=operators) as engine:
        engine.restore_session(tmp_path / "a.session")
        found = engine.generate(text, GREEDY, method="eagle")
        assert found.tokens == expected
        assert found.stats.accepted


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_long_prompt_is_read_by_pieces(
    bundle: Callable[[Format], Path], operators: Operators, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """So does the drafter, what it is shown of each; in between other requests run, and a cancel is seen."""
    pieces, texts, reading, cancel = list[int](), list[list[int]](), threading.get_ident(), threading.Event()
    absorb, prompt = DraftCache.append, [5 + at % 900 for at in range(100)]

    def absorbed(self: DraftCache, tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        if threading.get_ident() == reading:
            pieces.append(len(taps))
        absorb(self, tokens, taps)

    def other(_: float) -> None:
        if threading.get_ident() == reading and len(pieces) == 3:
            running = threading.Thread(target=lambda: texts.append(engine.generate(PROMPTS[0], GREEDY).tokens))
            running.start()
            running.join()
            if cancelled:
                cancel.set()

    monkeypatch.setattr(DraftCache, "append", absorbed)
    monkeypatch.setattr(PrefillBudget, "rows", lambda self, most, alone: 16)
    with load(bundle("int8"), threads=THREADS, operators=operators) as engine:
        expected = engine.generate(prompt, GREEDY, method="ar").tokens
        alone = engine.generate(PROMPTS[0], GREEDY).tokens
        engine.sessions.clear()
        pieces.clear()
        monkeypatch.setattr("edgespec.engine.stream.time.sleep", other)
        found = engine.generate(prompt, GREEDY, method="eagle", cancel=cancel)
    assert texts == [alone]
    if cancelled:
        assert (found.finish, found.tokens, len(pieces)) == ("cancelled", [], 3)
        return
    assert found.tokens == expected
    assert max(pieces[:5]) <= 17  # with what one piece had left
    assert sum(pieces) >= len(prompt) - 2


@pytest.mark.parametrize("branch", [None, (2,), (2, 2)])
def test_drawing_keeps_the_distribution(bundle: Callable[[Format], Path], branch: tuple[int, ...] | None) -> None:
    """Draft tokens are sampled, then accepted or rejected: pairs of tokens have the model's frequencies."""
    sampling = SamplingParams(temperature=1.6, top_k=3)
    settings = GREEDY.changed(max_new_tokens=3, gamma=2, temperature=1.6, top_k=3, branch=branch)
    with load(bundle("int4"), threads=THREADS) as engine:
        prompt, slot = engine.codec.encode(PROMPTS[0]), open_slot(engine.model)

        def outcomes(prefix: list[int]) -> list[tuple[int, float]]:
            slot.follow([])
            slot.prefill(prefix[:-1])
            probs = distribution(slot.forward(np.array(prefix[-1:], np.int64)).logits[0], sampling, prefix)
            return [(int(token), float(probs[token])) for token in np.flatnonzero(probs)]

        expected = {(a, b): p * q for a, p in outcomes(prompt) for b, q in outcomes([*prompt, a])}
        seen: Counter[tuple[int, ...]] = Counter()
        accepted = 0
        for seed in range(DRAWS):
            result = engine.generate(prompt, settings.changed(seed=seed), method="eagle")
            seen[result.tokens[0], result.tokens[1]] += 1
            accepted += result.stats.accepted
    assert 0 < accepted < 2 * DRAWS
    assert chi_square(seen, expected) > 1e-3


def test_a_device_is_refused(bundle: Callable[[Format], Path]) -> None:
    with load(bundle("int4"), threads=THREADS) as engine:
        choice = choose_method(engine.bundle.manifest, "eagle")
        with pytest.raises(InvalidRequest, match="hidden states"):
            check_device("webgpu", choice)


def test_conversations_keep_their_entries(bundle: Callable[[Format], Path], operators: Operators) -> None:
    """A drafter lives on its session: neither it nor the target reads the text of the other conversation again."""
    prompts = [[5 + (at * step) % 200 for at in range(150)] for step in (3, 7)]
    written: list[tuple[list[int], list[int]]] = []
    with load(bundle("int8"), threads=THREADS, operators=operators) as engine:
        for turn in range(3):
            for at, prompt in enumerate(prompts):
                found = engine.generate(prompt, GREEDY, method="eagle")
                assert found.stats.dropped_reason is None
                assert found.stats.drafted > 0
                assert found.stats.reused_tokens >= (len(prompt) - 20 if turn else 0)  # of 232 and more
                written.append((prompt, found.tokens))
                prompts[at] = [*prompt, *found.tokens, *prompt[:9]]
        for prompt, tokens in written:
            engine.sessions.clear()
            assert engine.generate(prompt, GREEDY, method="ar").tokens == tokens
