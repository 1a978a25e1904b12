"""Small folders of CTranslate2, converted by its own converters: tests/data/reference/ct2.zip.

tools/make_ct2_reference.py makes it.  A folder has CTranslate2's files and ``origin.json``: config.json and shapes of
the source model, whose weights ``tests.support.seq2seq.weights`` recreates.

ct2_models.zip has two trained ones as published, with the files of their tokenizers (``whole``).
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.library import EMBEDDED
from tests.support.seq2seq import BART, T5, WHISPER, write_checkpoint

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "ct2.zip"
ORIGIN = "origin.json"
MODELS = ARCHIVE.with_name("ct2_models.zip")
HEARD = "written.json"  # in them
TRANSLATED = {
    "The train to the coast leaves in the morning.": "Der Zug zur Küste fährt am Morgen ab.",
    "My sister has painted her kitchen yellow.": "Meine Schwester hat ihre Küche gelb gestrichen.",
    "Please bring three bottles of water.": "Bitte bring drei Flaschen Wasser mit.",
    "The old bridge was closed last winter.": "Die alte Brücke war im letzten Winter gesperrt.",
    "He reads the newspaper every day.": "Er liest jeden Tag die Zeitung.",
    "The children played behind the school.": "Die Kinder spielten hinter der Schule.",
}
SMALL: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
                         "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 60,
                         "max_position_embeddings": 40}  # fmt: skip
SMALL_T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2,
                            "d_ff": 24, "vocab_size": 60}  # fmt: skip
SPECIAL = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "nospeech", "notimestamps")


class Case(NamedTuple):
    """A model, and how its weights were written."""

    config: dict[str, Any]
    quantization: str | None


_MARIAN = {"model_type": "marian", **BART, **SMALL, "scale_embedding": True, "activation_function": "swish",
           "pad_token_id": 59, "decoder_start_token_id": 59}  # fmt: skip
_WHISPER = {"model_type": "whisper", **WHISPER, **SMALL, "max_source_positions": 20, "max_target_positions": 30,
            "suppress_tokens": None, "begin_suppress_tokens": None, "decoder_start_token_id": 41}  # fmt: skip
CASES: dict[str, Case] = {
    "whisper": Case(_WHISPER, None),
    "whisper_int8_float16": Case(_WHISPER, "int8_float16"),
    "whisper_128": Case({**_WHISPER, "num_mel_bins": 128, "max_source_positions": 8}, "float16"),
    "marian": Case(_MARIAN, "float32"),
    "marian_int8": Case(_MARIAN, "int8"),
    "m2m_100": Case({"model_type": "m2m_100", **BART, **SMALL, "scale_embedding": True}, "int16"),
    "m2m_100_bfloat16": Case({"model_type": "m2m_100", **BART, **SMALL}, "bfloat16"),
    "mbart": Case({"model_type": "mbart", **BART, **SMALL, "scale_embedding": True}, "float16"),
    "bart": Case({"model_type": "bart", **BART, **SMALL}, "int8_bfloat16"),
    "pegasus": Case({"model_type": "pegasus", **BART, **SMALL, "decoder_start_token_id": 1}, "int8_float32"),
    "t5": Case({"model_type": "t5", **T5, **SMALL_T5}, "int8"),
    "t5_gated": Case({"model_type": "t5", **T5, **SMALL_T5, "feed_forward_proj": "gated-gelu",
                      "tie_word_embeddings": False}, "float32"),
}  # fmt: skip


def vocabulary(case: Case) -> list[str]:
    """Name the tokens of a case."""
    size = case.config["vocab_size"]
    named = [f"w{number}" for number in range(size)]
    if case.config["model_type"] == "whisper":
        named[1] = "<unk>"
        named[40 : 40 + len(SPECIAL)] = [f"<|{name}|>" for name in SPECIAL]
        return named
    config = case.config
    named[3] = "<unk>"
    for token, key in (("<s>", "bos_token_id"), ("</s>", "eos_token_id"), ("<pad>", "pad_token_id")):
        if (number := config.get(key)) is not None:
            named[number] = token
    return named


def unpacked(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the folder of a case, and the checkpoint of its source model -> both."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder, [one for one in archive.namelist() if one.startswith(f"{name}/")])
    (folder / name / "tokenizer.json").write_text("{}", "utf-8")  # which tests of weights do not read
    made = json.loads((folder / name / ORIGIN).read_text("utf-8"))
    return folder / name, write_checkpoint(folder / f"{name}.origin", made["config"], made["tensors"])


def whole(folder: Path, name: str) -> tuple[Path, dict[str, str]]:
    """Write a whole folder, by its name in the archive -> it, and its model's outputs for texts or recordings.

    tools/make_ct2_models.py makes both: the translations are transformers', greedy, of the model in float32.
    """
    with zipfile.ZipFile(MODELS) as archive:
        archive.extractall(folder, [one for one in archive.namelist() if one.startswith(f"{name}/")])
    if name == "hears":
        shutil.copyfile(EMBEDDED / "spoken-digits" / "tokenizer.json", folder / name / "tokenizer.json")
    file = folder / name / HEARD
    found: dict[str, str] = json.loads(file.read_text("utf-8"))
    file.unlink()
    return folder / name, found
