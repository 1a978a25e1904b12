"""The embedded encoder-decoders load in transformers, and their texts have the error rates that are said of them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgespec.export.source.source import builtin_names, resolve

torch = pytest.importorskip("torch", reason="needs edgespec[train]")
transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
from tools.train_loop import error_rate  # noqa: E402
from tools.train_restore import guessed_right, plain, restored  # noqa: E402

DATA = Path(__file__).parents[2] / "data"
SAID = {"en": "nine five three one two one", "de": "eins sechs fünf neun", "es": "cinco cuatro siete tres cinco",
        "fr": "trois deux zéro zéro six"}  # fmt: skip


def opened(name: str) -> Any:
    assert name in builtin_names()
    return transformers.T5ForConditionalGeneration.from_pretrained(
        resolve(f"builtin:{name}"), dtype=torch.float32
    ).eval()


def test_restored_lines() -> None:
    target, draft = opened("restore"), opened("restore-draft")
    tokenizer = Tokenizer.from_file(str(resolve("builtin:restore") / "tokenizer.json"))
    lines = (DATA / "restore.txt").read_text("utf-8").splitlines()
    sources = [plain(line) for line in lines]
    ids = restored(target, tokenizer, sources)
    found = [list(tokenizer.decode(row)) for row in ids]
    given, rest = (error_rate(texts, list(map(list, lines))) for texts in (list(map(list, sources)), found))
    assert rest < 0.05 < 0.07 < given
    right = guessed_right(draft, [tokenizer.encode(source).ids for source in sources], ids)
    assert sum(map(sum, right)) > 0.8 * sum(map(len, right))


@pytest.mark.parametrize("name", ["spoken-digits", "spoken-digits-draft"])
def test_spoken_digits(name: str) -> None:
    folder = resolve(f"builtin:{name}")
    reader = transformers.WhisperProcessor.from_pretrained(folder)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def heard(file: str, **asked: Any) -> tuple[str, list[tuple[float, float]]]:
        with wave.open(str(DATA / "digits" / f"{file}.wav")) as opened:
            sound = np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / 32768
        rows = reader(sound, sampling_rate=16000, return_tensors="pt").input_features
        ids = model.generate(rows, **asked)[0].tolist()
        times = reader.tokenizer.decode(ids, output_offsets=True)["offsets"] if asked.get("return_timestamps") else []
        return reader.tokenizer.decode(ids, skip_special_tokens=True).strip(), [one["timestamp"] for one in times]

    for language, text in SAID.items():
        assert heard(language, task="transcribe")[0] == text  # the language is detected
    assert heard("fr", language="fr", task="translate")[0] == "three two zero zero six"
    assert heard("en", task="transcribe", return_timestamps=True)[1] == [pytest.approx((0.2, 2.14), abs=0.05)]
