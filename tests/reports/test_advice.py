"""What the measured rows lead to."""

from __future__ import annotations

from typing import Any

from edgespec.reports.advice import advise, label


def row(bundle: str, method: str, speed: float, **changes: Any) -> dict[str, Any]:
    made = {
        "bundle": bundle,
        "format": bundle,
        "method": method,
        "tokens_per_second": speed,
        "speedup": 1.0,
        "speedup_low": 1.0,
        "speedup_high": 1.0,
        "lossless": True,
        "extra_bytes": 0,
        "weight_bytes": {"int4": 50, "int8": 100}.get(bundle, 70),
        "batch_tokens_per_second": None,
    }
    return made | changes


PARITY = {"int4": {"top1_agreement": 0.9, "logit_rms_error": 0.3}, "int8": {"top1_agreement": 0.99}}
PLAIN4, PLAIN8 = row("int4", "plain", 100), row("int8", "plain", 60)
FAST4 = row("int4", "speculative", 150, speedup=1.5, speedup_low=1.3, extra_bytes=20)
FAST8 = row("int8", "speculative", 120, speedup=2.0, speedup_low=1.8, extra_bytes=20)
DOUBTFUL = row("int4", "ngram", 170, speedup=1.2, speedup_low=0.9)
FREE = row("int4", "self-spec", 110, speedup=1.1, speedup_low=1.05)
ROWS = [PLAIN4, FAST4, DOUBTFUL, FREE, PLAIN8, FAST8]


def test_four_situations() -> None:
    chat, batch, memory, quality = advise(ROWS, PARITY)
    assert (chat.format, chat.method, chat.pays, len(chat.rests_on)) == ("int4", "speculative", True, 6)
    assert (batch.format, batch.method, batch.measured) == ("int4", "ar", False)
    assert "derived, not measured" in batch.why
    assert batch.rests_on == ["int4 plain", "int8 plain"]
    assert (memory.format, memory.method) == ("int4", "self-spec")
    assert memory.rests_on == ["int4 plain", "int4 ngram", "int4 self-spec"]
    assert (quality.format, quality.method) == ("int8", "speculative")
    assert "top-1 agreement 99.0%" in quality.why


def test_it_says_when_nothing_pays() -> None:
    for item in advise([PLAIN4, DOUBTFUL], {}):
        assert (item.method, item.pays) == ("ar", False)
    chat, _, memory, quality = advise([PLAIN4, DOUBTFUL], {})
    assert all("no method is surely faster" in item.why for item in (chat, memory, quality))
    assert "no bundle has parity figures" in quality.why
    assert not quality.measured


def test_batches_are_judged_by_their_own_figures() -> None:
    rows = [PLAIN4 | {"batch_tokens_per_second": 300.0}, FAST4 | {"batch_tokens_per_second": 250.0}]
    batch = advise(rows, {})[1]
    assert (batch.method, batch.measured) == ("ar", True)
    assert "no method is faster than plain decoding in a batch" in batch.why
    rows[1]["batch_tokens_per_second"] = 350.0
    batch = advise(rows, {})[1]
    assert (batch.method, batch.pays) == ("speculative", True)
    assert "350.0, plain decoding 300.0" in batch.why


def test_lossy_rows_are_named_so_and_are_no_quality() -> None:
    lossy = FAST4 | {"lossless": False}
    chat, *_, quality = advise([PLAIN4, lossy, FREE], PARITY)
    assert "(lossy)" in chat.why
    assert quality.method == "self-spec"
    # a run under a lossy rule calls all its rows lossy, but plain decoding gives nothing away
    *_, quality = advise([PLAIN4 | {"lossless": False}, lossy], PARITY)
    assert (quality.method, "(lossy)" in quality.why) == ("ar", False)


def test_bundles_of_one_format_are_told_apart_by_folder() -> None:
    rows = [row("a/x", "plain", 1, format="int4"), row("b/y", "plain", 1, format="int4"), PLAIN8]
    assert [label(at, rows) for at in rows] == ["x plain", "y plain", "int8 plain"]
