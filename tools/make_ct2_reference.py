"""Convert small encoder-decoders by CTranslate2's own converters, for the tests of folders that it wrote.

Needs torch, transformers and ctranslate2:  python tools/make_ct2_reference.py
tests/support/ct2.py says what the archive holds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ctranslate2.converters import transformers as converters
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.ct2 import ARCHIVE, CASES, ORIGIN, Case, vocabulary
from tests.support.saved import shapes_of
from tests.support.seq2seq import write_checkpoint
from tools.make_seq2seq_reference import computed


def convert(folder: Path, case: Case) -> dict[str, Any]:
    """Write a case as CTranslate2 does -> config.json and shapes of the source model."""
    kind = AutoModelForSpeechSeq2Seq if case.config["model_type"] == "whisper" else AutoModelForSeq2SeqLM
    with tempfile.TemporaryDirectory() as temporary:
        origin = Path(temporary)
        kind.from_config(AutoConfig.for_model(**case.config)).float().save_pretrained(origin)
        written = json.loads((origin / "config.json").read_text("utf-8"))
        shapes = {name: shape for name, shape in shapes_of(origin).items() if not computed(name, case.config)}
        write_checkpoint(origin, written, shapes)
        model = kind.from_pretrained(origin).float().eval()
    if (kind_of := case.config["model_type"]) in ("bart", "mbart", "pegasus"):  # as published configurations say
        model.config.normalize_before, model.config.normalize_embedding = kind_of != "bart", kind_of != "pegasus"
    model.config.tie_word_embeddings = case.config.get("tie_word_embeddings", True)  # which new versions change
    model.config.tokenizer_class = "MBart50Tokenizer" if kind_of == "mbart" else None
    tokens = vocabulary(case)
    tokenizer = SimpleNamespace(
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", unk_token_id=tokens.index("<unk>"),
        get_vocab=lambda: {token: number for number, token in enumerate(tokens)}, special_tokens_map={},
        convert_ids_to_tokens=lambda number: tokens[number], additional_special_tokens=[],
    )  # fmt: skip
    if case.config["model_type"] == "whisper":
        model.generation_config.suppress_tokens, model.generation_config.begin_suppress_tokens = [3, 4], [5]
    spec = converters._MODEL_LOADERS[type(model.config).__name__](model, tokenizer)
    spec.validate()
    spec.optimize(quantization=case.quantization)
    folder.mkdir()
    spec.save(str(folder))
    return {"config": written, "tensors": shapes}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, case in CASES.items():
            folder = Path(temporary) / name
            origin = convert(folder, case)
            (folder / ORIGIN).write_text(json.dumps(origin), "utf-8")
            for file in sorted(folder.iterdir()):
                fixed = zipfile.ZipInfo(
                    f"{name}/{file.name}"
                )  # without the time, so that the archive is the same again
                fixed.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(fixed, file.read_bytes())
            print(name, sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    main()
