"""Measure bundles of builtin:restore and builtin:spoken-digits, by format and method: errors and tokens per pass.

    edgespec export builtin:restore --method speculative --draft builtin:restore-draft --method medusa -o restore
    python -m benchmarks.restoring restore --text tinyshakespeare.txt --most 300
    python -m benchmarks.restoring digits --most 100

Passages are of the text's last tenth, and digits are spoken by espeak-ng's held-out voices: both are new to the models.
Errors are of characters (restored text) or of words (digits, whose language is detected).  Methods draft ``--gamma``
tokens, without control; medusa and blockwise trees are chains of their best tokens.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import load
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.transcription import TranscriptionSettings
from tools.spoken import spoken
from tools.train_loop import error_rate
from tools.train_restore import WORDS, Prose, passages, plain, speeches

HEAD = ("format", "method", "errors", "whole", "tokens a pass", "accepted", "same text")
Written = list[tuple[str, dict[str, Any]]]  # texts, and how they were decoded


def restored(engine: Engine, lines: list[str], how: Settings) -> Written:
    """Restore passages one by one, greedily."""
    found = [engine.generate(plain(line), how) for line in lines]
    return [(one.text.strip(), vars(one.stats)) for one in found]


def heard(engine: Engine, sounds: list[Any], how: Settings) -> Written:
    """Write down utterances one by one, as transcripts without times."""
    asked = TranscriptionSettings(timestamps=False, temperatures=(0.0,))
    found = [engine.transcribe(sound, asked, settings=how) for sound in sounds]
    return [(one.text, one.how) for one in found]


def table(engine: Engine, given: list[Any], expected: list[list[str]], gamma: int) -> None:
    """Print a line for each method of a bundle."""
    hears = engine.bundle.manifest.speech is not None
    first: list[str] = []
    for method in ("ar", *(name for name in engine.methods if name not in ("ar", "auto"))):
        how = Settings(method=method, adaptive=False, fallback=False, gamma=gamma)
        how = how.changed(nodes=gamma) if method in TREES else how
        found = heard(engine, given, how) if hears else restored(engine, given, how)
        texts = [text for text, _ in found]
        first = first or texts
        parts = [text.split() if hears else list(text) for text in texts]
        tokens, rounds, drafted, accepted = (
            sum(how[name] for _, how in found) for name in ("tokens", "rounds", "drafted", "accepted")
        )
        row = (
            engine.bundle.manifest.target.format,
            method,
            f"{100 * error_rate(parts, expected):.2f} %",
            f"{100 * np.mean([one == other for one, other in zip(parts, expected, strict=True)]):.1f} %",
            f"{tokens / rounds:.2f}",
            f"{accepted / drafted:.2f}" if drafted else "",
            f"{sum(map(str.__eq__, texts, first))}/{len(texts)}",
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


TREES = ("medusa", "blockwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, help="of restore: its last tenth is taken")
    parser.add_argument("--most", type=int, default=100, help="passages or utterances")
    parser.add_argument("--gamma", type=int, default=4, help="guesses a pass")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for bundle in args.bundles:
        with load(bundle, threads=args.threads) as engine:
            if engine.bundle.manifest.speech is not None:
                said = spoken(args.most, 2, held_out=True)
                table(engine, [one.sound for one in said], [one.text(one.language).split() for one in said], args.gamma)
                continue
            text = args.text.read_text("utf-8")
            cut = text.index("\n\n", int(len(text) * 0.9)) + 2
            prose = Prose(sorted(set(speeches(text[:cut]))))
            lines = [line for one in speeches(text[cut:]) for line in passages(prose.joined(one), WORDS)]
            lines = random.Random(3).sample(lines, min(len(lines), args.most))
            table(engine, lines, [list(line) for line in lines], args.gamma)


if __name__ == "__main__":
    main()
