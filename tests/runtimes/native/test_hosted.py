"""Sessions whose passes the caller runs write the texts of those that run them in C."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.ort.native_library import native_library
from tests.support.c_interface import Native
from tests.support.c_sessions import (
    BROKEN,
    CANCELLED,
    HOST_FAILED,
    REFUSED,
    RUN,
    WHY,
    Bundle,
    HostOfC,
    HostPass,
    Refused,
    RoundFound,
    Session,
    settings_of,
)
from tests.support.required import need
from tests.support.selftest import NATIVE

pytestmark = pytest.mark.usefixtures("native")
GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.9, seed=5, acceptance="coupled")
REJECTED = replace(SAMPLED, acceptance="rejection")
METHODS = "plain", "ngram", "speculative", "ngram,speculative"


class Host:
    """Run passes of a native model in functions of the caller, which keeps the places of its cache."""

    def __init__(self, model: Native, trees: bool = True) -> None:
        self.model, self.base, self.count = model, 0, 0
        self.passes = self.moved = 0
        self.failing: Callable[[int], int] = lambda number: 0  # of a pass: whether it fails
        self.before: Callable[[], None] = lambda: None
        self.damage = False
        self.said = ctypes.create_string_buffer(b"the lights went out")
        self.of_c = HostOfC(ctypes.sizeof(HostOfC), int(trees), None, RUN(self._run),
                            WHY(lambda user: ctypes.addressof(self.said)))  # fmt: skip

    def _run(self, user: Any, given: Any) -> int:
        self.passes += 1
        self.before()
        if failed := self.failing(self.passes):
            return failed
        one: HostPass = given.contents
        self._follow(one)
        tokens = one.tokens[: one.rows]
        parents = one.parents[: one.rows] if one.parents else None
        assert one.positions[: one.rows] == positions_of(parents or range(-1, one.rows - 1), one.kept)
        found = self.model.forward(tokens, parents)
        self.base, self.count = one.kept, one.rows
        if one.scored:
            assert found.logits is not None
            assert found.logits.shape[1] == one.columns
            rows = np.ctypeslib.as_array(one.logits, (one.scored, one.columns))
            rows[:] = np.nan if self.damage else found.logits[-one.scored :]
        return 0

    def _follow(self, one: HostPass) -> None:
        """Keep what stays of the last pass, of which a path may have been moved together."""
        moves = {one.moves[2 * i + 1]: one.moves[2 * i] for i in range(one.move_count)}
        self.moved += len(moves)
        assert list(moves) == sorted(moves)
        assert all(to < place for to, place in moves.items())
        if one.kept > self.base:
            rows = [moves.get(place, place) - self.base for place in range(self.base, one.kept)]
            assert max(rows) < self.count
            self.model.keep(rows)
        else:
            assert not moves
            self.model.crop(one.kept)


def positions_of(parents: Sequence[int], kept: int) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(kept if parent < 0 else found[parent] + 1)
    return found


@dataclass
class Pair:
    """A session that runs its passes, and one over a folder with nothing but the manifest, whose passes are given."""

    folder: Path
    native: Session
    session: Session
    target: Host
    draft: Host
    vocab: int

    def compare(self, prompt: Sequence[int], *case: Any, **more: Any) -> int:
        """Compare the rounds of a text -> how many guesses were accepted."""
        wanted = settings_of(*case, **more)
        ours, theirs = self.session.rounds(prompt, wanted), self.native.rounds(prompt, wanted)
        assert ours == theirs
        assert self.session.counts().dropped == b""
        return sum(one.accepted for one in ours)


@pytest.fixture
def pair(bundles: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def opened(trees: bool = True, context: int = 0) -> Pair:
            folder = bundles("native", "int4")
            data = json.loads((folder / MANIFEST).read_text("utf-8"))
            (bare := tmp_path / "bare").mkdir()
            shutil.copy(folder / MANIFEST, bare)
            target, draft = (
                Host(stack.enter_context(Native(folder / data[part]["graphs"]["native"]["file"])), trees)
                for part in ("target", "draft")
            )
            native, hosted = (stack.enter_context(one) for one in (Bundle(folder), Bundle(bare, hosted=True)))
            assert (hosted.facts.vocab, hosted.facts.has_draft) == (native.facts.vocab, 1)
            session = stack.enter_context(hosted.session(context=context, target=target.of_c, draft=draft.of_c))
            own = stack.enter_context(native.session(context=context))
            return Pair(folder, own, session, target, draft, int(hosted.facts.vocab))

        yield opened


def prompts(count: int, seed: int, vocab: int) -> Iterator[list[int]]:
    """Make prompts of any length, some of which begin as the one before, or repeat themselves."""
    rng, last = np.random.default_rng(seed), list[int]()
    for _ in range(count):
        fresh = rng.integers(vocab, size=int(rng.integers(1, 30))).tolist() * int(rng.integers(1, 7))
        last = last[: int(rng.integers(len(last) + 1))] + fresh if rng.integers(2) else fresh
        yield last


def test_rounds_are_those_of_its_own_passes(pair: Callable[..., Pair]) -> None:
    found = pair()
    for at, prompt in enumerate(prompts(12, 3, found.vocab)):
        accepted = [found.compare(prompt, (GREEDY, SAMPLED, REJECTED)[at % 3], method, 20, 1 + at % 7)
                    for method in METHODS]  # fmt: skip
        assert accepted[0] == 0
        assert found.session.bytes() == 0


@pytest.mark.parametrize("branch", [(2,), (3, 2), (2, 2, 1)])
def test_trees_are_moved_together(pair: Callable[..., Pair], branch: tuple[int, ...]) -> None:
    found = pair()
    accepted = sum(found.compare(prompt, params, "speculative", 24, 4, branch=branch)
                   for prompt in prompts(3, 5, found.vocab) for params in (GREEDY, SAMPLED, REJECTED))  # fmt: skip
    assert accepted
    assert found.target.moved


def test_a_host_of_chains_gets_no_trees(pair: Callable[..., Pair]) -> None:
    found = pair(trees=False)
    with pytest.raises(Refused, match="no trees"):
        found.session.begin([1], settings_of(method="speculative", branch=(2,)))
    found.compare([1, 2, 3], GREEDY, "speculative", 20, 4)
    assert not found.target.moved


def test_control_changes_no_text(pair: Callable[..., Pair]) -> None:
    found = pair()
    for prompt in prompts(3, 7, found.vocab):
        for method in (*METHODS, None):
            for params in (GREEDY, SAMPLED):
                wanted = settings_of(params, method, 40, fixed=0)
                text = found.session.generate(prompt, wanted)
                assert text == found.native.generate(prompt, settings_of(params, "plain", 40))


def test_a_full_context_ends_a_text(pair: Callable[..., Pair]) -> None:
    found = pair(context=40)
    for method in METHODS:
        found.compare([*range(1, 30)], GREEDY, method, 1000, 8)


def test_a_pass_that_fails_can_be_run_again(pair: Callable[..., Pair]) -> None:
    """Whichever pass fails, the call fails with the message of the host, and the text continues unchanged."""
    found, rng, errors = pair(), np.random.default_rng(1), list[Refused]()
    found.target.failing = lambda number: int(rng.integers(4) == 0) * 9
    for prompt in prompts(6, 11, found.vocab):
        for wanted in (settings_of(GREEDY, "ngram", 24, 4), settings_of(SAMPLED, "speculative", 24, branch=(2, 2))):
            for _ in range(100):
                try:
                    found.session.begin(prompt, wanted)
                    break
                except Refused as error:
                    errors.append(error)
            rounds = list[RoundFound]()
            while not rounds or rounds[-1].finish is None:
                try:
                    rounds.append(found.session.next())
                except Refused as error:
                    errors.append(error)
            text = [token for one in rounds for token in one.tokens]
            assert text == [token for one in found.native.rounds(prompt, wanted) for token in one.tokens]
    assert len(errors) > 30
    assert {error.status for error in errors} == {HOST_FAILED}
    assert all("the lights went out" in str(error) for error in errors)


def test_a_draft_that_fails_is_dropped(pair: Callable[..., Pair]) -> None:
    found = pair()
    found.draft.failing = lambda number: int(number > 5)
    text = found.session.generate([1, 2, 3], settings_of(GREEDY, "speculative", 24, 4))
    assert text == found.native.generate([1, 2, 3], settings_of(GREEDY, "plain", 24))
    assert b"speculative: edgespec: the caller's pass: the lights went out" in found.session.counts().dropped


def test_cancellation_in_any_pass(pair: Callable[..., Pair]) -> None:
    found, rng, errors = pair(), np.random.default_rng(2), list[Refused]()

    def before() -> None:
        if rng.integers(3) == 0:
            found.session.cancel()

    found.target.before = before
    for prompt in prompts(3, 13, found.vocab):
        wanted = settings_of(GREEDY, "ngram", 24, 4)
        expected, text, begun, ended = found.native.generate(prompt, wanted), list[int](), False, False
        while not ended:
            try:
                if not begun:
                    found.session.begin(prompt, wanted)
                begun = True
                one = found.session.next()
                text += one.tokens
                ended = one.finish is not None
            except Refused as error:
                errors.append(error)
        assert text == expected
    assert len(errors) > 10
    assert {error.status for error in errors} == {CANCELLED}


def test_damaged_logits(pair: Callable[..., Pair]) -> None:
    found = pair()
    found.target.damage = True
    for params in (GREEDY, SAMPLED, replace(GREEDY, repetition_penalty=1.2)):
        with pytest.raises(Refused, match="NaN") as refused:
            found.session.generate([1, 2, 3], settings_of(params, "plain", 4))
        assert refused.value.status == BROKEN


def test_what_does_not_belong_together_is_refused(pair: Callable[..., Pair], tmp_path: Path) -> None:
    found = pair()
    with Bundle(found.folder) as native, Bundle(tmp_path / "bare", hosted=True) as hosted:
        bad: tuple[tuple[Bundle, dict[str, Any], str], ...] = (
            (native, {"target": found.target.of_c}, "a bundle that has its own"),
            (native, {"draft": found.draft.of_c}, "a bundle that has its own"),
            (hosted, {}, "target: expected passes of the caller"),
            (hosted, {"draft": found.draft.of_c}, "target: expected passes of the caller"),
            (hosted, {"target": HostOfC(ctypes.sizeof(HostOfC))}, "a function that runs passes"),
            (hosted, {"target": HostOfC()}, "its size"),
            (hosted, {"target": found.target.of_c, "max_bytes": 1 << 30}, "the caller has the caches"),
            (hosted, {"target": found.target.of_c, "attention": 1}, "the caller has the caches"),
        )
        for bundle, options, words in bad:
            with pytest.raises(Refused, match=words) as refused:
                bundle.session(**options)
            assert refused.value.status == REFUSED
        with hosted.session(target=found.target.of_c) as session:
            for method, words in (("speculative", "passes of a draft"), ("self-spec", "plain, ngram")):
                with pytest.raises(Refused, match=words):
                    session.begin([1], settings_of(method=method))
            for call in (session.save, session.restore):
                with pytest.raises(Refused, match="the caller has the keys"):
                    call(tmp_path / "saved")
            assert session.generate([1, 2], settings_of(GREEDY, None, 8, fixed=0)) == found.native.generate(
                [1, 2], settings_of(GREEDY, "plain", 8)
            )


def test_the_example_decodes_with_passes_of_its_own(tmp_path: Path) -> None:
    need("cc", "to build the example")
    library, program = native_library().path, tmp_path / "hosted"
    assert library is not None
    source = NATIVE.parents[1] / "examples" / "c" / "hosted.c"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{NATIVE}"]
    linking = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(["cc", *flags, str(source), *linking], check=True, timeout=300)
    facts = {"schema_version": 6, "target": {"facts": {"context": 64, "vocab": 16}}, "tokenizer": {"eos": []}}
    (tmp_path / MANIFEST).write_text(json.dumps(facts), "utf-8")
    for prompt in ([3], [1, 2, 3, 1, 2], [15, 0, 15]):
        done = subprocess.run([str(program), str(tmp_path), "12", *map(str, prompt)], capture_output=True, text=True,
                              timeout=60)  # fmt: skip
        assert done.returncode == 0, done.stderr
        text = list(prompt)
        for _ in range(12):
            text.append((3 * text[-1] + len(text) - 1) % 16)
        assert [*map(int, done.stdout.split())] == text[len(prompt) :]
    done = subprocess.run([str(program), str(tmp_path), "60", "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "48 places" in done.stderr) == (HOST_FAILED, True)
    assert 30 < len(done.stdout.split()) <= 48
