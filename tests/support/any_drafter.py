"""Tests that drafters conditioned on hidden states have in common: however a prompt is read, whatever was before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from edgespec.runtimes.slots.slot import Slot
from tests.support.eagle import Recorder, written


class Checked(Protocol):
    """A target and a drafter, opened; see ``eagle.Pair``."""

    def recorder(self) -> Recorder:
        """A drafter that notes its proposals, over slots of its own."""
        ...

    def check(self, made: Recorder, least: int = 1, **broken: Any) -> None:
        """Compare what was proposed with the arithmetic."""
        ...


class AnyDrafter:
    """A subclass gives the fixture ``made``, and ``prompt``: random tokens of the target, of a number and a seed."""

    prompt: Callable[..., list[int]]

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
