"""A caller's own proposer: what it may return, and that nonsense costs it its place, never the text."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output
from edgespec.drafters.proposer import UserDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import OPERATORS, PROMPTS, TARGET, THREADS, use_operators
from tests.support.toy import hash_logits, hash_target, plain

VOCAB = 11
DOCS = Path(__file__).resolve().parents[2] / "docs" / "guides" / "choose.md"


class Fixed:
    """Returns the same every time."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def propose(self, tokens: list[int], budget: int) -> Any:
        return self.found


def run(proposer: Any, seed: int = 1, new: int = 40) -> Stats:
    stats = Stats()
    found = [t for r in decode(hash_target(seed), UserDrafter(proposer, VOCAB), [1], DecodeOptions(new, 4), stats)
             for t in r.tokens]  # fmt: skip
    assert found == plain(hash_logits(seed, VOCAB), VOCAB, [1], new)
    return stats


@pytest.mark.parametrize(
    "found",
    [
        [1, 2, 3],
        (4,),
        list(range(11)),
        np.array([3, 2], np.int32),
        [np.int64(3)],
        Proposal(np.array([1, 2])),
        Proposal(np.array([1, 2, 3]), np.array([-1, -1, 0])),
    ],
)
def test_what_it_may_return(found: Any) -> None:
    stats = run(Fixed(found))
    assert stats.dropped_reason is None
    assert stats.drafted > 0


@pytest.mark.parametrize("found", [[], (), None, EMPTY, np.array([], np.int64)])
def test_it_may_pass(found: Any) -> None:
    stats = run(Fixed(found))
    assert stats.dropped_reason is None
    assert stats.drafted == 0


@pytest.mark.parametrize(
    "found",
    [
        [VOCAB],
        [-1],
        ["a"],
        "12",
        b"12",
        [1.5],
        7,
        [[1]],
        object(),
        Proposal(np.array([1, 2]), np.array([0, 1])),
        Proposal(np.array([1, 2]), np.array([-1])),
        Proposal(np.array([1]), probs=np.zeros((1, VOCAB))),
        Proposal(np.array([1]), probs=np.full((1, VOCAB), np.nan)),
        Proposal(np.array([1]), probs=np.ones((1, 3)) / 3),
    ],
)
def test_nonsense_ends_it(found: Any) -> None:
    stats = run(Fixed(found))
    assert str(stats.dropped_reason).startswith("Fixed failed in propose: ")


class Ending:
    """Raises an exception that would end the process, at a chosen place."""

    def __init__(self, where: str, error: BaseException) -> None:
        self._where, self._error = where, error

    def _reach(self, where: str) -> None:
        if where == self._where:
            raise self._error

    @property
    def name(self) -> str:
        self._reach("name")
        return "ending"

    @property
    def wants_hidden(self) -> bool:
        self._reach("wants_hidden")
        return False

    def bind(self, params: Any, noise: Any) -> None:
        self._reach("bind")

    def begin(self, tokens: list[int]) -> None:
        self._reach("begin")

    def propose(self, tokens: list[int], budget: int) -> list[int]:
        self._reach("propose")
        return [1]

    def observe(self, proposal: Any, verdict: Any, output: Any) -> None:
        self._reach("observe")


class Panic(BaseException):
    """Panic of a native library."""


@pytest.mark.parametrize("where", ["bind", "begin", "propose", "observe"])
@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), Panic("at the disco")], ids=lambda e: type(e).__name__
)
def test_what_would_end_the_process_costs_its_guesses_alone(where: str, error: BaseException) -> None:
    reason = str(run(Ending(where, error)).dropped_reason)
    assert reason.startswith("ending failed in ")
    assert f"it raised {type(error).__name__}" in reason


def test_ctrl_c_and_handlers_of_signals_go_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Ending("propose", KeyboardInterrupt()))

    class Signalled:
        def propose(self, tokens: list[int], budget: int) -> list[int]:
            signal.raise_signal(signal.SIGTERM)
            return []

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit, match="143"):
            run(Signalled())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_cannot_touch_the_text() -> None:
    class Vandal:
        name = "vandal"

        def begin(self, tokens: list[int]) -> None:
            tokens.clear()

        def propose(self, tokens: list[int], budget: int) -> list[int]:
            tokens.clear()
            return [1]

    assert run(Vandal()).dropped_reason is None
    assert UserDrafter(Vandal(), VOCAB).name == "vandal"


def test_it_is_told_what_any_drafter_is_told() -> None:
    calls: list[str] = []

    class Told(Fixed):
        def bind(self, params: Any, noise: Any) -> None:
            calls.append("bind")

        def begin(self, tokens: list[int]) -> None:
            calls.append(f"begin {tokens}")

        def observe(self, proposal: Any, verdict: Any, output: Any) -> None:
            calls.append("observe")

    stats = run(Told([1]), new=5)
    assert calls[:2] == ["bind", "begin [1]"]
    assert calls[2:] == ["observe"] * stats.rounds


def test_many_random_proposers() -> None:
    for seed in range(60):
        draw = np.random.default_rng(seed)
        truth = hash_logits(seed, VOCAB)

        class Sometimes:
            def propose(self, tokens: list[int], budget: int) -> list[int]:
                found = plain(truth, VOCAB, tokens, budget)  # noqa: B023
                return [t if draw.random() < 0.8 else int(draw.integers(VOCAB)) for t in found]  # noqa: B023

        stats = run(Sometimes(), seed)
        assert stats.dropped_reason is None
        assert stats.accepted > 0


@pytest.mark.parametrize("more", [{}, {"cheap": False, "wants_hidden": True}, {"cheap": 1, "wants_hidden": 0}])
def test_what_it_says_of_itself(more: dict[str, Any]) -> None:
    """By default its draft tokens cost nothing and it wants no hidden states."""
    proposer = UserDrafter(type("Says", (Fixed,), more)([1]), VOCAB)
    proposer.begin(DraftRequest([1]))
    assert (proposer.cheap, bool(proposer.wants)) == (bool(more.get("cheap", 1)), bool(more.get("wants_hidden", 0)))


# -- through the front door --------------------------------------------------------------------------------------------


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


@pytest.fixture
def example() -> Any:
    """Run the page's example; return the class that it defines."""
    text = DOCS.read_text("utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def propose" in block]
    names: dict[str, Any] = {}
    exec(code.split("engine =")[0], names)  # the code after it loads a bundle
    (made,) = [value for value in names.values() if isinstance(value, type)]
    return made


def test_the_example_of_the_documentation(engine: Callable[..., Engine], example: Any) -> None:
    made = engine()
    settings: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    drafted = 0
    for prompt in PROMPTS[:6]:
        wanted = made.generate(prompt, method="ar", **settings).tokens
        result = made.generate(prompt, proposer=example(), fallback=False, **settings)
        assert result.tokens == wanted
        assert result.method_used == example.__name__
        assert result.lossless
        assert result.exact
        assert result.stats.dropped_reason is None
        assert "own proposer" in result.reason
        drafted += result.stats.drafted
    assert drafted > 0
    batch = made.generate_batch(list(PROMPTS[:3]), proposer=example(), **settings)
    assert [r.tokens for r in batch] == [made.generate(p, method="ar", **settings).tokens for p in PROMPTS[:3]]
    with made.stream(PROMPTS[0], Settings(proposer=example(), max_new_tokens=4)) as stream:
        assert list(stream)


class Curious(Fixed):
    """Wants hidden states, and keeps their shapes."""

    wants_hidden = True

    def __init__(self) -> None:
        super().__init__([1, 2])
        self.shapes: list[tuple[int, ...] | None] = []

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        self.shapes.append(None if output.hidden is None else output.hidden.shape)


@pytest.mark.parametrize("adaptive", [False, True])
def test_it_may_ask_for_hidden_states(engine: Callable[..., Engine], adaptive: bool) -> None:
    made, proposer = engine(), Curious()
    width = made.bundle.manifest.target.facts.hidden
    result = made.generate(PROMPTS[0], proposer=proposer, max_new_tokens=9, ignore_eos=True, adaptive=adaptive)
    assert result.stats.dropped_reason is None
    assert len(proposer.shapes) == result.stats.rounds
    assert all(shape is not None and shape[1] == width for shape in proposer.shapes)
    plain = made.generate(PROMPTS[0], method="ar", max_new_tokens=9, ignore_eos=True)
    assert result.tokens == plain.tokens


def test_a_graph_that_cannot_say_hidden_states_says_none(tmp_path: Path) -> None:
    made = load(export_to(tmp_path), operators="stock")
    proposer = Curious()
    result = made.generate(PROMPTS[0], proposer=proposer, max_new_tokens=5, ignore_eos=True)
    assert result.stats.dropped_reason is None
    assert set(proposer.shapes) == {None}


def export_to(folder: Path) -> Path:
    """Export the embedded model without heads into ``folder``; return the bundle."""
    export_model(ExportOptions(TARGET, folder / "bundle", (), "int4", threads=THREADS, operators="stock"), golden=False)
    return folder / "bundle"


def test_an_engine_outlives_a_proposer_that_ends_the_process(engine: Callable[..., Engine]) -> None:
    made = engine()
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    wanted = made.generate(PROMPTS[0], method="ar", **settings).tokens
    result = made.generate(PROMPTS[0], proposer=Ending("propose", SystemExit(3)), **settings)
    assert result.tokens == wanted
    assert "it raised SystemExit: 3" in result.reason
    assert made.generate(PROMPTS[0], proposer=Ending("wants_hidden", SystemExit(3)), **settings).tokens == wanted
    with pytest.raises(InvalidRequest, match="name cannot be read: it raised SystemExit"):
        made.generate(PROMPTS[0], proposer=Ending("name", SystemExit(3)), **settings)
    assert made.generate(PROMPTS[0], method="ar", **settings).tokens == wanted


def test_drawn_guesses_are_not_exact(engine: Callable[..., Engine]) -> None:
    made = engine()
    vocab = made.bundle.manifest.target.facts.vocab
    flat = Proposal(np.array([3]), probs=np.full((1, vocab), 1 / vocab))
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_new_tokens": 8, "adaptive": False}
    assert not made.generate(PROMPTS[0], proposer=Fixed(flat), **sampled).exact
    assert made.generate(PROMPTS[0], proposer=Fixed([3]), **sampled).exact


def test_what_is_no_proposer(engine: Callable[..., Engine]) -> None:
    made = engine()
    with pytest.raises(InvalidRequest, match="propose"):
        made.generate(PROMPTS[0], proposer=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="one of them"):
        made.generate(PROMPTS[0], proposer=Fixed([1]), method="ngram")
