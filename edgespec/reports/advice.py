"""Advise on formats and methods for four situations, only from the rows that ``bench`` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from edgespec.drafters.registry import AR

Row = Mapping[str, Any]  # ``MethodFigures.as_dict``
BASELINE = "plain"


@dataclass(frozen=True)
class Advice:
    """Advice for one situation; the JSON has these keys."""

    situation: str  # chat, batch, memory or quality
    bundle: str  # the bundle to take
    format: str  # of its weights
    method: str  # the method; ``ar`` = plain decoding
    why: str  # the reason, with the figures it rests on
    # the rows compared, as ``format method``; with several bundles of a format their folders instead
    evidence: list[str]
    measured: bool  # whether the situation itself was measured; False = derived by a rule, which ``why`` names
    faster_than_plain: bool  # whether it is faster than plain decoding of the same bundle


def advise(rows: Sequence[Row], parity: Mapping[str, Mapping[str, Any]]) -> list[Advice]:
    """Advice for chat, batches, scarce memory and the highest quality.

    The rows have one of plain decoding for each bundle; ``parity``: by bundle, what its manifest says of its distance
    from the source model.  A method counts as faster only where its whole 95 % interval is above plain decoding of the
    same bundle.
    """
    best = _fastest(rows)
    chat = _made("chat", best, f"most tokens/s for one sequence: {_speed(best)}{_nothing(best)}", rows)
    least = min(row["weight_bytes"] + row["extra_bytes"] for row in rows)
    small = [row for row in rows if row["weight_bytes"] + row["extra_bytes"] == least]
    best = _fastest(small)
    why = f"fastest of what needs least memory, {least} bytes of weights and extras: {_speed(best)}{_nothing(best)}"
    return [chat, _batch(rows), _made("memory", best, why, small), _quality(rows, parity)]


def _faster(row: Row) -> bool:
    return bool(row["method"] not in (BASELINE, AR) and row["speedup_low"] > 1)


def _made(situation: str, row: Row, why: str, rows: Sequence[Row], measured: bool = True) -> Advice:
    method = AR if row["method"] == BASELINE else row["method"]
    if row["lossless"] is False and method != AR:
        why += "; its text is not plain decoding's (lossy)"
    compared = [label(at, rows) for at in rows]
    return Advice(situation, row["bundle"], row["format"], method, why, compared, measured, method != AR)


def label(row: Row, rows: Sequence[Row]) -> str:
    """Name a row by format and method, or by the folder's name where two bundles have one format."""
    shared = len({at["bundle"] for at in rows if at["format"] == row["format"]}) > 1
    return f"{PurePath(row['bundle']).name if shared else row['format']} {row['method']}"


def row_names(rows: Sequence[Row]) -> list[str]:
    """Name all rows: by their methods if they are of one bundle."""
    several = len({row["bundle"] for row in rows}) > 1
    return [label(row, rows) if several else row["method"] for row in rows]


def _speed(row: Row) -> str:
    speed = f"{row['tokens_per_second']:.1f} tokens/s"
    if row["method"] == BASELINE:
        return f"{speed}, plain decoding"
    return f"{speed}, {row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f}) plain decoding"


def _fastest(rows: Sequence[Row]) -> Row:
    """Find the fastest row that is allowed: plain decoding, or a faster method."""
    fit = [row for row in rows if row["method"] == BASELINE or _faster(row)]
    return max(fit, key=lambda row: row["tokens_per_second"])


def _nothing(row: Row) -> str:
    return "" if _faster(row) else "; no method is surely faster than plain decoding of that bundle"


def _batch(rows: Sequence[Row]) -> Advice:
    timed = [row for row in rows if row["batch_tokens_per_second"]]
    if timed:
        best = max(timed, key=lambda row: row["batch_tokens_per_second"])
        plain = next(row for row in rows if row["bundle"] == best["bundle"] and row["method"] == BASELINE)
        why = f"most tokens/s for several sequences: {best['batch_tokens_per_second']:.1f}"
        if best is plain or best["method"] == AR:
            return _made("batch", plain, f"{why}; no method is faster than plain decoding in a batch", timed)
        return _made("batch", best, f"{why}, plain decoding {plain['batch_tokens_per_second']:.1f}", timed)
    plains = [row for row in rows if row["method"] == BASELINE]
    best = max(plains, key=lambda row: row["tokens_per_second"])
    why = (
        "derived, not measured (--batch N measures it): a pass over several sequences has as many rows already, so "
        f"guesses cost more there; the fastest plain decoding: {_speed(best)}"
    )
    return _made("batch", best, why, plains, measured=False)


def quality_words(parity: Mapping[str, Any]) -> str:
    """Describe quantization loss on held-out texts, compared with llama.cpp's rounding of the same weights."""
    said = []
    for name, text in {"own": "what the model writes", "text": "another text"}.items():
        figures = parity.get("held_out", {}).get(name, {})
        if model := figures.get("model"):
            words = f"KL {model['kl']:.2g} nats, top-1 agreement {model['top1_agreement']:.1%} on {text}"
            q4_0 = figures.get("q4_0")
            said.append(words + (f" (Q4_0: {q4_0['kl']:.2g}, {q4_0['top1_agreement']:.1%})" if q4_0 else ""))
    return "; ".join(said)


def _quality(rows: Sequence[Row], parity: Mapping[str, Mapping[str, Any]]) -> Advice:
    lossless = [row for row in rows if row["lossless"] is not False or row["method"] == BASELINE]

    def distance(bundle: str) -> tuple[float, float]:
        known = parity.get(bundle, {})
        return -float(known.get("top1_agreement", 0)), float(known.get("logit_rms_error", "inf"))

    closest = min(dict.fromkeys(row["bundle"] for row in lossless), key=distance)
    known = parity.get(closest, {})
    found = [row for row in lossless if row["bundle"] == closest]
    best = _fastest(found)
    if "top1_agreement" in known:
        why = (
            f"closest to the source model: top-1 agreement {known['top1_agreement']:.1%}, "
            f"logit error {known.get('logit_rms_error', 0):.3g}; "
            + (f"{words}; " if (words := quality_words(known)) else "")
            + _speed(best)
        )
    else:
        why = f"no bundle has parity figures; {_speed(best)}"
    return _made("quality", best, f"{why}{_nothing(best)}", found, measured="top1_agreement" in known)
