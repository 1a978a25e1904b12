"""The embedded encoder-decoders load in transformers, and their texts have the documented error rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgespec.export.source.source import Checkpoint, builtin_names, resolve
from edgespec.export.source.widened import FILE
from edgespec.runtimes.audio.reading import pieces
from tests.server.conftest import Later
from tests.support.whisper import DIGITS, SAID

torch, transformers = Later("torch"), Later("transformers")
DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def with_torch() -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")


def opened(name: str) -> Any:
    assert name in builtin_names()
    return transformers.T5ForConditionalGeneration.from_pretrained(
        resolve(f"builtin:{name}"), dtype=torch.float32
    ).eval()


def test_restored_lines() -> None:
    from tools.train_loop import error_rate
    from tools.train_restore import guessed_right, plain, restored

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
        (rows,) = pieces(DIGITS / f"{file}.wav")
        rows = reader(rows, sampling_rate=16000, return_tensors="pt").input_features
        ids = model.generate(rows, **asked)[0].tolist()
        times = reader.tokenizer.decode(ids, output_offsets=True)["offsets"] if asked.get("return_timestamps") else []
        return reader.tokenizer.decode(ids, skip_special_tokens=True).strip(), [one["timestamp"] for one in times]

    for language, text in SAID.items():
        assert heard(language, task="transcribe")[0] == text  # the language is detected
    assert heard("fr", language="fr", task="translate")[0] == "three two zero zero six"
    assert heard("en", task="transcribe", return_timestamps=True)[1] == [pytest.approx((0.2, 2.14), abs=0.05)]


def test_a_widened_model_computes_the_same(tmp_path: Path) -> None:
    """It is twice as wide here; the same function makes the embedded one, which is eight times as wide."""
    small, factor = resolve("builtin:restore"), 2
    config = json.loads((small / "config.json").read_text("utf-8"))
    wide = {name: config[name] * factor for name in ("d_model", "d_ff", "num_heads")}
    told = config | wide | {"layer_norm_epsilon": 1e-6 / factor, "tie_word_embeddings": False}
    told["scale_decoder_outputs"] = False
    (tmp_path / "config.json").write_text(json.dumps(told), "utf-8")
    (tmp_path / FILE).write_text(json.dumps({"source": str(small), "factor": factor}), "utf-8")
    opened_wide = Checkpoint.open(tmp_path)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**told)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))  # not that of the embedding
    weights = {name: torch.from_numpy(opened_wide.read(name)) for name in opened_wide.tensors}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    ids = torch.from_numpy(np.random.default_rng(5).integers(3, 2048, (1, 40)))
    with torch.no_grad():
        logits = [one(input_ids=ids, decoder_input_ids=ids[:, :24]).logits for one in (opened("restore"), model)]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    embedded = Checkpoint.open(resolve("builtin:restore-130m"))
    assert sum(int(np.prod(tensor.shape)) for tensor in embedded.tensors.values()) == 130_048_000
