"""How far an export is, as a log has it."""

from __future__ import annotations

import io
import sys

import pytest

from edgespec.export.bundle.progress import EACH, Lines, shown


def test_a_log_has_a_line_at_once_and_one_every_few_seconds() -> None:
    now, written = [0.0], list[str]()
    told = Lines(written.append, lambda: now[0])
    told("weights", 0, 100, "target, MiB")
    for done in range(1, 101):
        now[0] += EACH / 10
        told("weights", done, 100, "target, MiB")
    assert written[0] == "weights: target, MiB\n"
    assert len(written) == 11
    assert written[1] == "weights: 10 of 100, target, MiB\n"
    told("parity", 0, 12, "source in fp32")  # the next stage does not wait
    assert written[-1] == "parity: source in fp32\n"
    now[0] += 2 * EACH
    told("parity", 0, 12, "source in fp32")  # nothing was done
    assert len(written) == 12


def test_what_was_chosen_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with shown(lines=True) as report:
        report("weights", 0, 1, "target")
        report("choice", 1, 1, "int8, 0.2 % quality loss")
        report("warning", 1, 1, "mind this")
        report("warning", 1, 1, "and that")
    assert log.getvalue() == "weights: target\nint8, 0.2 % quality loss\nwarning: mind this\nwarning: and that\n"
    with shown() as quiet:
        quiet("weights", 0, 1, "target")
    assert log.getvalue().count("weights") == 1
