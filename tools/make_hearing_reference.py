"""Compute the logits of audio models in transformers, for the tests of the export (tests/support/hearing.py).

Needs torch and transformers: python tools/make_hearing_reference.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    Gemma4ForConditionalGeneration,
    Qwen3ASRForConditionalGeneration,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.hearing import (
    AFTER,
    ARCHIVE,
    AROUND,
    BEFORE,
    CASES,
    EVERY,
    PROCESSORS,
    SOUND,
    config_of,
    recordings,
    write_checkpoint,
)
from tests.support.saved import shapes_of, text_array, write_archive

NEW, KEPT, RATE = 12, 6, 16_000
KINDS = {
    "gemma4": Gemma4ForConditionalGeneration,
    "qwen3_asr": Qwen3ASRForConditionalGeneration,
    "voxtral": VoxtralForConditionalGeneration,
}


def prepared(name: str, config: Any, samples: Any) -> tuple[dict[str, Any], int]:
    """Compute a recording's features, and how many of its frames are heard."""
    if config["model_type"] == "gemma4":
        how = PROCESSORS[name]["feature_extractor"]
        found = Gemma4AudioFeatureExtractor(**how)([samples], return_tensors="pt")
        return dict(found), int(found["input_features_mask"].sum())
    bands = config["audio_config"]["num_mel_bins"]
    if config["model_type"] == "qwen3_asr":
        made = Qwen3ASRFeatureExtractor(feature_size=bands)(samples, sampling_rate=RATE, padding=True,
                                                                    return_attention_mask=True)  # fmt: skip
        given = {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}
        return given, int(made["attention_mask"].sum())
    frames = 2 * config["audio_config"]["max_source_positions"]
    extractor = WhisperFeatureExtractor(feature_size=bands)
    made = extractor(samples, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=frames * 160,
                     return_tensors="pt")["input_features"]  # fmt: skip
    return {"input_features": made.reshape(bands, -1, frames).transpose(0, 1)}, made.shape[-1]


def reference(name: str) -> dict[str, Any]:
    """Make the arrays of one case."""
    config = config_of(name)
    kind = KINDS[config["model_type"]]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        kind(AutoConfig.for_model(**config)).float().save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = shapes_of(folder)
        write_checkpoint(folder, name, written, shapes)
        model = kind.from_pretrained(folder, attn_implementation="eager").float().eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: dict[str, Any] = {"saved": text_array({"config": written, "tensors": shapes})}
    rows, first = [], None
    with torch.no_grad():
        for at, samples in enumerate(recordings()):
            given, frames = prepared(name, config, samples)
            made = model.model.get_audio_features(**given)
            mels = given["input_features"]
            if config["model_type"] == "gemma4":
                rows.append(made.pooler_output[made.attention_mask])
                mels, first = mels[0], first or given
            else:
                rows.append(made.pooler_output)
                mels = mels.transpose(1, 2).reshape(-1, config["audio_config"]["num_mel_bins"])
            found |= {f"features.{at}": mels[:frames:EVERY].numpy(), f"sound.{at}": rows[-1][::EVERY].numpy(),
                      f"count.{at}": np.asarray(len(rows[-1]))}  # fmt: skip
        token = next(word for word, number in tokenizer.get_vocab().items() if number == SOUND)
        start, end = AROUND[config["model_type"]]
        ids = tokenizer.encode(BEFORE + start + token * len(rows[0]) + end + AFTER).ids
        logits, greedy = run(model, ids, rows[0], first)
    kept = np.linspace(0, len(ids) - 1, KEPT).astype(np.int64)
    return found | {"ids": np.asarray(ids), "rows": kept, "logits": logits[kept], "greedy": np.asarray(greedy)}


def run(model: Any, ids: list[int], rows: Any, given: Any) -> tuple[Any, list[int]]:
    """Compute logits [T, vocab] of a prompt with a recording, and continue it greedily.

    ``given``: its features, for a model whose layers look tokens up.
    """
    tokens, logits = list(ids), None
    for _ in range(NEW + 1):
        row = torch.tensor([tokens])
        embeds = model.model.get_input_embeddings()(row)
        embeds[0, torch.tensor(ids).eq(SOUND).nonzero()[:, 0]] = rows
        more = {"inputs_embeds": embeds} if given is None else {"input_ids": row, **given}
        out = model(use_cache=False, **more).logits[0]
        logits = out if logits is None else logits
        tokens.append(int(out[-1].argmax()))
    assert logits is not None
    return logits.numpy(), tokens[len(ids) : -1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_archive(ARCHIVE, sys.argv[1:] or CASES, reference)
