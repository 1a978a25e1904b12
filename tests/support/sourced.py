"""Write encoder-decoder cases that the Kotlin runtime must match: texts, recordings, languages."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import load
from edgespec.decoding.beams import BeamOptions
from edgespec.decoding.settings import Settings
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.seq2seq_format import TextForm
from edgespec.runtimes.images.image import Image, proof_picture
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.sources import SourceTexts
from tests.support import hf, seq2seq, sight
from tests.support.agreement import SEEDED, UNCONTROLLED, serve
from tests.support.checkpoints import make_heads

DATA = Path(__file__).parents[1] / "data"
METHODS = ("ar", "ngram", "speculative", "self-spec", "swift", "auto")
KINDS: dict[str, Format] = {"marian": "int4", "bart_scaled_relu": "int8", "m2m_100": "fp32", "mt5_silu": "int4"}
HEADS = {"marian": "medusa", "bart_scaled_relu": "blockwise"}
LINES = ("art thou his father yet he would be king on't", "what say you my lord speak again")
ENDINGS = {
    "suppress_tokens": [5],
    "begin_suppress_tokens": [7, 9],
    "bad_words_ids": [[11], [4, 6]],
    "no_repeat_ngram_size": 2,
    "forced_eos_token_id": 2,
}
FORMS: tuple[dict[str, Any], ...] = (
    {
        "source": ["text", 1],
        "prefix_tokens": [0],
        "prefixes": {"translation_en_to_de": "to German: ", "summary": "sum: "},
    },
    {
        "source": ["from", "text", 1],
        "prefix_tokens": [1, "to"],
        "languages": {"eng_Latn": 5, "kor_Hang": 6, "zho_Hant": 7},
    },
    {"source": ["to", "text", 0], "prefix_tokens": [1], "languages": {"fra": 2, "deu": 3}, "default_from": "eng"},
    {"source": ["text", 0], "prefix_tokens": [1], "default_from": "eng", "default_to": "fra"},
    {"source": ["text"], "prefix_tokens": [1]},
)
PAIRS = ((None, None), ("en", "de"), ("ko", "English"), (None, "fr"), ("de", "ko"), ("en", "xx"))


def bundle(
    folder: Path, source: str, form: Format, methods: list[str], draft: str | None = None, heads: Sequence[Path] = ()
) -> Path:
    """Export a model, golden vectors included."""
    options = ExportOptions(source, folder, methods, form, draft=draft, heads=[str(one) for one in heads], threads=1,
                            trials=2, quick=True)  # fmt: skip
    export_model(options, lambda *_: None)
    return folder


def restored(folder: Path, length: int) -> list[dict[str, Any]]:
    """Serve the embedded model that restores texts, by every method, with its draft."""
    ways = [{"method": name, **how} for name in METHODS for how in ({}, SEEDED)]
    ways.remove({"method": "auto", **SEEDED})  # whose choice is control
    ways += [{"method": name, **UNCONTROLLED, **how} for name in METHODS[1:-1] for how in ({}, SEEDED)]
    ways += [{"method": "chain", "proposers": ["ngram", "speculative"]}]
    made = []
    formats: dict[Format, list[str]] = {"int8": ["self-spec", "swift"], "int4": []}
    for form, layers in formats.items():
        methods = ["speculative", *layers]
        path = bundle(folder / f"restore-{form}", "builtin:restore", form, methods, "builtin:restore-draft")
        asked = [way for way in ways if layers or way["method"] not in ("self-spec", "swift")]
        made.append(serve(path, "native", [(way, LINES[at % 2]) for at, way in enumerate(asked)], length))
    return made


def kinds(folder: Path, length: int) -> list[dict[str, Any]]:
    """Serve small random models of the other kinds, some of which have rules of writing and languages."""
    made = []
    for number, (name, form) in enumerate(KINDS.items()):
        source = seq2seq.write_case(folder / name, name)
        hf.make_tokenizer(seq2seq.saved(name)["config"]["vocab_size"], False).save(str(source / "tokenizer.json"))
        kind = HEADS.get(name)
        heads = [make_heads(folder / f"{name}-{kind}", kind, str(source))] if kind else []
        methods = [kind] if kind else []
        path = bundle(folder / f"{name}-bundle", str(source), form, methods, heads=heads)
        data = json.loads((path / "edgespec.json").read_text("utf-8"))
        text = {"source": ["from", "text", 2], "prefix_tokens": [2, "to"], "languages": {"en": 3, "ko": 4}}
        data["text"] = text | {"default_from": "ko", "default_to": "en", "rules": ENDINGS if number % 2 else {}}
        data["golden"] = [] if number % 2 else data["golden"]  # rules that it was written without
        (path / "edgespec.json").write_text(json.dumps(data), "utf-8")
        asked = [({"method": method, **how}, LINES[0]) for method in ("ar", "ngram") for how in ({}, SEEDED)]
        made.append(serve(path, "native", asked, length))
        for way in [{**control, **how} for control in ({}, UNCONTROLLED) for how in ({}, SEEDED) if kind]:
            made.append(serve(path, "native", [({"method": kind, **way}, LINES[0])], length))
    return made


def searched(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Search the likeliest texts of encoder-decoders, by their own rules and by others."""
    made = []
    options: list[dict[str, Any]] = [{"beams": 4}, {"beams": 3, "length_penalty": 0.5, "early_stopping": True},
                                     {"beams": 2, "length_penalty": 2.0, "early_stopping": "never"}]  # fmt: skip
    for folder in folders:
        with load(folder, threads=2, operators="native") as engine:
            for how in options:
                result = engine.generate(LINES[1], beams=BeamOptions(**how), max_new_tokens=24)
                made.append({"path": str(folder), "text": LINES[1], "how": how, "tokens": result.tokens})
    return made


def forms(folder: Path) -> dict[str, Any]:
    """Give sources in the languages of every form; null = it is refused."""
    hf.make_tokenizer(300, False).save(str(folder / "tokenizer.json"))
    hf.make_tokenizer(400, False).save(str(folder / "source_tokenizer.json"))
    codec, cases = TextCodec(folder), []
    for form in FORMS:
        texts = SourceTexts(folder, TextForm.model_validate(form), codec)
        for origin, target in PAIRS:
            try:
                ids, begin = texts.encode(LINES[1], origin, target), texts.begin(origin, target)
                found: dict[str, Any] | None = {"ids": ids, "begin": begin}
            except InvalidRequest:
                found = None
            cases.append({"form": form, "text": LINES[1], "from": origin, "to": target, "found": found})
    return {"folder": str(folder), "cases": cases}


def seen(folder: Path) -> list[dict[str, Any]]:
    """Ask about images by some methods, with a text-only draft and with one that has its own vision tower."""
    made = []
    random = str(sight.write_case(folder / "idefics3", "idefics3"))
    reader = ("builtin:reader", "builtin:reader-draft", ["speculative", "self-spec"])
    sources = (reader, (random, random, ["speculative"]))
    for number, (source, draft, methods) in enumerate(sources):
        # a tower's learnt places are resampled by sums of another order: int8 makes more of that than float32
        path = bundle(folder / f"seen{number}", source, "fp32", methods, draft)
        cases: list[dict[str, Any]] = []
        with load(path, threads=2, prompt_cache=False) as engine:
            for at, method in enumerate(("ar", "ngram", *methods, "auto")):
                size = ((16, 320), (31, 97), (40, 9))[at % 3]
                way: dict[str, Any] = {"method": method, **(SEEDED if at % 2 and method != "auto" else {})}
                shown: list[str | Image] = [proof_picture(size), "a of "]
                found = engine.generate(shown, max_new_tokens=24, ignore_eos=True, **way)
                assert found.stats.dropped_reason is None
                cases.append({"size": size, "settings": way, "max_new_tokens": 24, "tokens": found.tokens})
            turns: list[dict[str, Any]] = []
            messages: list[Message] = []
            for question in ("read", "more") if engine.codec.chat_template else ():
                parts = [{"type": "text", "text": question}]
                first = [] if turns else [{"type": "image", "image": proof_picture((16, 200))}]
                messages.append({"role": "user", "content": [*first, *parts]})
                answer = engine.chat(messages, method="ngram", max_new_tokens=16)
                messages.append({"role": "assistant", "content": answer.text})
                turns.append({"question": question, "tokens": answer.tokens})
            assert engine.bundle.manifest.target.image.proof  # type: ignore[union-attr]
        made.append({"path": str(path), "text": "a of ", "cases": cases, "turns": turns})
    return made


def heard(folder: Path) -> dict[str, Any]:
    """Transcribe recordings with the embedded model and its draft, which shares the encoder."""
    path = bundle(folder, "builtin:spoken-digits", "int8", ["speculative"], "builtin:spoken-digits-draft")
    cases: list[dict[str, Any]] = []
    with load(path, threads=1) as engine:
        for name, method, asked in (
            ("en", "ar", {}), ("de", "speculative", {}), ("es", "ngram", {"timestamps": False}),
            ("fr", "auto", {"timestamps": False, "language": "French", "task": "translate"}),
            ("long", "speculative", {"language": "en", "prompt": "one two"}), ("long", "ar", {"timestamps": False}),
        ):  # fmt: skip
            file = DATA / "digits" / f"{name}.wav" if name != "long" else _long(folder.parent / "long.wav")
            named: dict[str, Any] = {
                "initial_prompt" if name == "prompt" else name: value for name, value in asked.items()
            }
            how = TranscriptionSettings(**named)
            found = engine.transcribe(file, how, settings=Settings(method=method, adaptive=False, fallback=False))
            segments = [
                {name: getattr(one, name) for name in ("start", "end", "text", "tokens")} for one in found.segments
            ]
            cases.append({"file": str(file), "method": method, **asked, "spoken": found.language, "segments": segments})
    assert sum(len(case["segments"]) for case in cases) >= 9
    return {"path": str(path), "cases": cases}


def _long(file: Path) -> Path:
    """Write numbers one after the other, which fill several windows."""
    with wave.open(str(DATA / "digits" / "en.wav")) as one:
        samples = np.frombuffer(one.readframes(one.getnframes()), "<i2")
    with wave.open(str(file), "wb") as whole:
        whole.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        whole.writeframes(np.concatenate([np.pad(samples, (0, 6 * 16_000 - len(samples)))] * 2 + [samples]).tobytes())
    return file
