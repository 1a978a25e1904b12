"""Vectors of encoder-decoders: rules of what they write, their languages, and features of sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from edgespec.decoding.speech_rules import SpeechRules
from edgespec.engine.sentences import pieces
from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import encoder_rows, log_mel
from edgespec.runtimes.files.manifest import FeaturePart
from edgespec.runtimes.files.seq2seq_format import WritingRules
from edgespec.runtimes.text.languages import choose_language
from edgespec.runtimes.text.rules import RuledText
from tools.vector_rows import row

VOCAB, EOS, NO_TIMES = 24, 9, 13  # of which 14 and on are times
SPEECH: dict[str, Any] = {"start": 10, "languages": {"en": 11}, "tasks": {"translate": 12}, "no_timestamps": NO_TIMES,
                          "suppress_tokens": [2], "begin_suppress_tokens": [3, EOS],
                          "max_initial_timestamp_index": 4}  # fmt: skip
WRITING: list[dict[str, Any]] = [
    {"suppress_tokens": [4], "begin_suppress_tokens": [1, 2]},
    {"bad_words_ids": [[5], [9], [1, 2], [1, 2, 3]], "min_length": 6},
    {"no_repeat_ngram_size": 2, "forced_eos_token_id": 9},
    {"no_repeat_ngram_size": 3, "suppress_tokens": [0]},
]
CODES = [["eng_Latn", "kor_Hang", "nob_Latn", "zho_Hans", "zho_Hant"], ["en", "ko", "no", "zh"], ["fra", "kor"]]
LONG = (
    'One. Two!  Three? "Four." (Five.) six\nseven\n\neight',
    "\u4e00\u3002\u4e8c\uff01\u300c\u4e09\uff1f\u300d\u56db",
    "no end of a sentence in so many words as these are and more",
    "unbroken" * 9,
    "Dr. No... said 3.14 \u2026 yes.\u201d So",
    "",
)
WANTED = ["ko", "Korean", "kor_Hang", "KOR_hang", "no", "zh", "xx", "French"]


def rules() -> Iterator[dict[str, Any]]:
    """Tokens that may follow a text, by the rules of generation_config.json and by Whisper's."""
    rng = np.random.default_rng(17)
    for number in range(40):
        prefix = [1, 2, *rng.integers(0, 6, number % 9).tolist()]
        given = WRITING[number % len(WRITING)]
        bound = RuledText(WritingRules(**given), VOCAB, [9], 2, 9)
        yield {"writing": given, "prefix": prefix, "row": number, "allowed": _allowed(bound, prefix, number)}
    for number in range(48):
        text = [int(rng.integers(14, VOCAB) if rng.random() < 0.6 else rng.integers(0, 9)) for _ in range(number % 7)]
        times, prefix = number % 4 > 0, [10, 11, *text]
        names = ("suppress_tokens", "begin_suppress_tokens")
        how = {name: tuple(SPEECH[name]) for name in names} | {
            "max_initial_timestamp_index": SPEECH["max_initial_timestamp_index"]
        }
        bound_by = SpeechRules(VOCAB, 2, EOS, NO_TIMES + 1, times, NO_TIMES, **how)
        allowed = _allowed(bound_by, prefix, number)
        yield {"speech": SPEECH, "timestamps": times, "prefix": prefix, "row": number, "allowed": allowed}


def _allowed(rules: RuledText | SpeechRules, prefix: list[int], seed: int) -> list[int]:
    mask = rules.allowed(prefix, row(seed, VOCAB))
    assert mask is not None
    return [int(token) for token in np.flatnonzero(mask)]


def sentences() -> Iterator[dict[str, Any]]:
    """Cut long texts into pieces of limited length, without spaces around them."""
    for text in LONG:
        for most in (1, 7, 20, 60, 1000):
            cut = pieces(text, lambda part, most=most: len(part) <= most)  # type: ignore[misc]
            yield {"text": text, "most": most, "pieces": cut}


def languages() -> Iterator[dict[str, Any]]:
    """Codes that models have for languages by the names that people give; null = it is refused."""
    for known in CODES:
        found: dict[str, str | None] = {}
        for wanted in WANTED:
            try:
                found[wanted] = choose_language(wanted, known)
            except InvalidRequest:
                found[wanted] = None
        yield {"known": known, "found": found}


def features() -> Iterator[dict[str, Any]]:
    """Give some log-mel features of noise, and some numbers of the rows that an encoder reads."""
    for bins, samples, least in ((80, 3000, 0), (80, 500, 4800), (128, 4177, 0)):
        mels = log_mel([row(bins, samples, 0.5)], bins, least)
        part = FeaturePart(bands=bins, frames=len(mels), columns=3 * bins + 16)
        rows = encoder_rows(mels, part)
        yield {"bins": bins, "samples": samples, "least": least, "frames": len(mels), "columns": part.columns,
               "mels": mels.ravel()[::7].tolist(), "rows": rows.ravel()[::101].tolist()}  # fmt: skip
