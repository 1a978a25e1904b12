"""Stop strings: the same as looking for each, at a cost that does not grow with how many they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.runtimes.text.stops import StopStrings

TEXTS = st.text("ab.", max_size=12)


def longest_beginning(text: str, strings: list[str]) -> int:
    tails = (n for n in range(len(text), 0, -1) if any(s != text[-n:] and s.startswith(text[-n:]) for s in strings))
    return next(tails, 0)


@given(TEXTS, st.lists(TEXTS, max_size=6))
def test_as_if_each_were_looked_for(text: str, strings: list[str]) -> None:
    stops, real = StopStrings(strings), [string for string in strings if string]
    places = [(at, string) for string in real if (at := text.find(string)) >= 0]
    assert stops.find(text) == min(places, default=None)
    if not places:
        assert stops.beginning(text) == longest_beginning(text, real)


class Counted(set[str]):
    """Counts how often it is asked."""

    looks = 0

    def __contains__(self, item: object) -> bool:
        self.looks += 1
        return super().__contains__(item)

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("one string after the other")


def test_a_look_costs_the_same_however_many_there_are() -> None:
    stops = StopStrings([f"stop {number}" for number in range(10_000, 60_000)])
    stops._known = known = Counted(stops._known)
    text = "they go on and never end, stop 4" * 4
    assert stops.find(text) is None
    assert known.looks == len(text)
    assert stops.beginning(text) == len("stop 4")
    assert stops.find(text + "2000") == (len(text) - len("stop 4"), "stop 42000")
