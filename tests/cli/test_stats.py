"""What a run says of itself does not contradict itself."""

from __future__ import annotations

from dataclasses import replace

from edgespec.cli.answer import summary
from tests.support.requests import Get, ask


def test_nothing_guessed_is_said_so(engine: Get) -> None:
    """Method auto that found nothing to guess is not called plain decoding by another method."""
    drafted = ask(engine(), method="ngram", max_new_tokens=24)
    nothing = replace(drafted, stats=replace(drafted.stats, drafted=0), method_requested=None)
    assert summary(nothing).startswith("nothing was guessed, ")
    assert summary(nothing).endswith("auto: ngram")
    assert summary(ask(engine(), method="ar", max_new_tokens=4)).startswith("plain decoding, ")


def test_the_reason_says_what_was_measured(engine: Get) -> None:
    """Beside what was predicted, and the same figure as in the summary's first word."""
    made = ask(engine(), method="self-spec", max_new_tokens=48)
    speed = made.stats.request_speedup
    assert made.stats.drafted
    assert speed is not None
    assert f"measured {speed:.2f}x in this request" in made.reason
    assert summary(made).startswith(f"{speed:.1f}x plain decoding")
