"""Shared parts of tests of drafters conditioned on hidden states: arithmetic in float64, recording, checking.

References keep nothing: in every round they compute all rows again, from the tokens and the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.stats import Stats
from edgespec.drafters.hidden_state import HiddenStateDrafter
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support.passes import run_layers

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Floats]:
    """Draw the tensors of a checkpoint: vectors near one, matrices that keep the size of what they multiply."""
    random = np.random.default_rng(seed)
    drawn = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        name: 1 + 0.3 * value if value.ndim == 1 else value * np.float32(1.5 * value.shape[1] ** -0.5)
        for name, value in drawn.items()
    }


def rms(x: Array, weight: Array, eps: float) -> Array:
    """Norm rows by their root mean square."""
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y * weight


def rotated(x: Array, angles: Array) -> Array:
    """Rotate the first channels of heads [n, heads, dim] by angles [n, pairs]; channel i and i + pairs are a pair."""
    size = 2 * angles.shape[1]
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    whole = x[..., :size]
    half = np.concatenate((-whole[..., size // 2 :], whole[..., : size // 2]), -1)
    return np.concatenate((whole * cos + half * sin, x[..., size:]), -1)


def attend(q: Array, k: Array, v: Array, unseen: NDArray[np.bool_], scale: float | None = None) -> Array:
    """Attend with queries [n, heads, dim] to keys and values [m, kv_heads, dim] but those ``unseen`` [n, m]."""
    out = np.zeros_like(q)
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        scores = np.where(unseen, -np.inf, q[:, head] @ k[:, kv].T * (q.shape[2] ** -0.5 if scale is None else scale))
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(len(q), -1)


def swiglu(x: Array, read: Callable[[str], Array]) -> Array:
    """Compute an MLP whose matrices ``read`` gives by ``gate``, ``up`` and ``down``."""
    gate = x @ read("gate").T
    y: Array = (gate / (1 + np.exp(-gate)) * (x @ read("up").T)) @ read("down").T
    return y


class Arithmetic(Protocol):
    """A drafter's arithmetic; ``ids``: what its LM head scores."""

    ids: NDArray[np.int64]

    def logits(self, embedded: Array, taps: Array, guesses: Array) -> Array:
        """See ``Reference``."""
        ...


class Recorder(HiddenStateDrafter):
    """Notes every proposal, and the tokens before it."""

    def __init__(self, target: Slot, slot: Slot, branch: tuple[int, ...] | None = None) -> None:
        super().__init__(target, slot, branch=branch)
        self.made: list[tuple[list[int], Proposal]] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        found = super().propose(tokens, budget)
        self.made.append((list(tokens), found))
        return found


class Pair:
    """A target and its drafter, written in float32 and opened; ``fresh`` is a slot of the target."""

    def __init__(self, folder: Path, arch: Architecture, drafter: Drafter, operators: Operators = "native") -> None:
        self.tapped, plan = drafter.tapped, HeadPlan(tapped=drafter.tapped)
        part = write_model(folder, arch, ModelSpec("fp32", gated=True, plan=plan, layout=operators)).part
        own = write_drafter(folder, drafter, WeightChoice.of("fp32", None, None), operators)
        main, plain = ("native", "native") if operators == "native" else ("gated", "plain")
        self.model, self.drafter = Model(folder, part, main, 1), Model(folder, own, plain, 1)
        self.fresh = open_slot(self.model)

    def write(self, made: Recorder, prompt: list[int], count: int, **more: Any) -> tuple[list[int], Stats]:
        """Prompt and text of a request."""
        return written(made, prompt, count, **more)

    def recorder(self, branch: tuple[int, ...] | None = None) -> Recorder:
        return Recorder(open_slot(self.model, reserve=1), open_slot(self.drafter, reserve=1), branch)


def written(
    made: Recorder, prompt: list[int], count: int, gamma: int = 4, around: Policy | None = None, **more: Any
) -> tuple[list[int], Stats]:
    """Prompt and text of a request by a recorder, or by what is ``around`` it; no drafter was dropped."""
    stats, text = Stats(), list(prompt)
    options = DecodeOptions(max_new_tokens=count, gamma=gamma, **more)
    for done in decode(made.target, around or made, prompt, options, stats):
        text += done.tokens
    assert stats.dropped_reason is None
    return text, stats


def same_entries(one: Slot, other: Slot, least: int = 20) -> None:
    """Check that caches hold the same for as many tokens as both have."""
    held, expected = one.snapshot(), other.snapshot()
    assert len(one.tokens) > least
    for name, values in held.items():
        count = min(values.shape[1], expected[name].shape[1])
        np.testing.assert_allclose(values[:, :count], expected[name][:, :count], rtol=0, atol=1e-4)


def check_guesses(made: Recorder, reference: Arithmetic, fresh: Slot, tapped: Sequence[int], least: int) -> None:
    """Check that greedy tokens have the largest logits of the reference, or logits equal within rounding.

    Args:
        made: what was proposed.
        reference: the arithmetic.
        fresh: a slot of the target; gives its residual stream.
        tapped: after how many layers.
        least: how many guesses there must be.
    """
    count, known = 0, [-1]
    taps = embedded = np.zeros((0, 0))
    columns = {int(token): at for at, token in enumerate(reference.ids)}
    for tokens, proposal in reversed(made.made):
        guesses = proposal.tokens.tolist()
        if not guesses:
            continue
        if known[: len(tokens)] != tokens:  # a request's rounds are beginnings of its last one
            ids, known = np.array(tokens, np.int64), tokens
            fresh.follow([])
            fresh.reserve(len(ids))
            taps = np.concatenate([run_layers(fresh, ids, 0, 0, at) for at in tapped], -1).astype(np.float64)
            embedded = fresh.embed(ids).astype(np.float64)
        n = len(tokens)
        parents = list(range(-1, len(guesses) - 1)) if proposal.parents is None else proposal.parents.tolist()
        for parent in sorted(set(parents)):
            path, above = list[int](), parent
            while above >= 0:
                path.insert(0, guesses[above])
                above = parents[above]
            own = fresh.embed(np.array(path, np.int64)).astype(np.float64) if path else np.zeros((0, embedded.shape[1]))
            row = reference.logits(embedded[:n], taps[: n - 1], own)[-1]
            children = [guess for guess, its in zip(guesses, parents, strict=True) if its == parent]
            assert len(set(children)) == len(children)
            for guess in children:
                assert guess in columns, f"token {guess} cannot be guessed"
                better = int((row > row[columns[guess]] + 1e-2 * row.std()).sum())
                assert better < len(children), f"after {len(tokens)} tokens: {guesses}"
                count += 1
    assert count >= least


def check_chains(
    made: Recorder, logits: Callable[[Slot, list[int], list[int]], Array], fresh: Slot, ids: Sequence[int], least: int
) -> None:
    """Check that greedy tokens have the largest logits of a reference, or logits equal within rounding.

    Args:
        made: what was proposed.
        logits: (slot, tokens, guesses) -> the reference's [guesses, size].
        fresh: a slot of the target; gives its hidden states.
        ids: [size], the tokens that can be guessed.
        least: how many guesses there must be.
    """
    count, columns = 0, {int(token): at for at, token in enumerate(ids)}
    for tokens, proposal in made.made:
        if guesses := proposal.tokens.tolist():
            fresh.follow([])
            for row, guess in zip(logits(fresh, tokens, guesses), guesses, strict=True):
                assert row[columns[guess]] > row.max() - 1e-2 * row.std(), f"after {len(tokens)} tokens: {guesses}"
                count += 1
    assert count >= least


class Checked(Protocol):
    """A target and a drafter, opened; see ``Pair``."""

    def recorder(self) -> Recorder:
        """Make a drafter that records its proposals, over new slots."""
        ...

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        """Compare what was proposed with the arithmetic."""
        ...


def prompt(count: int, seed: int = 0) -> list[int]:
    """Return random tokens of a small target's vocabulary."""
    found: list[int] = np.random.default_rng(seed).integers(3, 150, count).tolist()
    return found


class AnyDrafter:
    """A subclass gives the fixture ``made``.

    Attributes:
        mistakes: known mistakes of others, as arguments of ``Checked.check``; each must be detected.
    """

    prompt = staticmethod(prompt)
    mistakes: Sequence[Mapping[str, Any]] = ()

    @pytest.fixture
    def drawn(self, made: Checked) -> Checked:
        return made

    def test_what_others_got_wrong_would_be_seen(self, drawn: Checked) -> None:
        recorder = drawn.recorder()
        written(recorder, self.prompt(20), 14)
        for broken in self.mistakes:
            with pytest.raises(AssertionError):
                drawn.check(recorder, **broken)

    @pytest.mark.parametrize("count", [1, 2, 40])
    @pytest.mark.parametrize("chunk", [1, 7])
    def test_prompts_of_any_length_in_any_number_of_chunks(self, made: Checked, count: int, chunk: int) -> None:
        recorder = made.recorder()
        assert isinstance(recorder.target, Slot)
        recorder.target.chunk = chunk
        written(recorder, self.prompt(count), 8)
        made.check(recorder, 4)

    def test_a_slot_is_used_again(self, made: Checked) -> None:
        """Nothing, some, all of the last request's tokens, and one less; an end inside guesses; to the context's."""
        recorder, prompt = made.recorder(), self.prompt
        text, _ = written(recorder, prompt(20), 10)
        ends = frozenset(text[20:22])
        written(recorder, text[:15], 5, eos=ends)
        for again in (text, text[:-1], text[:15], [*text[:15], 5, 6], prompt(9, 1), [*text, 9, 8], prompt(1), text[:2]):
            found, stats = written(recorder, again, 5)
            assert len(found) == len(again) + 5
            assert stats.rounds
        assert len(written(recorder, prompt(84, 2), 64)[0]) == 96
        made.check(recorder, 40)
