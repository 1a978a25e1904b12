"""Write cases that the Kotlin runtime must match: conversations, tokenizers and streams of text."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from edgespec.engine.loading import load
from edgespec.export.bundle.writer import write_manifest
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.chat_data import CHAT_FILE, chat_data
from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.files.manifest import GoldenVector, read_manifest
from edgespec.runtimes.text.chat import TEMPLATE_FILE, Message
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder
from tests.conftest import TARGET
from tests.support import hf, spm
from tests.support.checkpoints import write_adapter

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"
PLAY = "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}ANSWER:\n{% endif %}"  # noqa: E501
TEXTS = 200  # of each tokenizer
PROVED = ("My lord,", "JULIET:\n")


def chats() -> list[dict[str, Any]]:
    """Every template of the tests as data, and conversations written by the template itself; or that it is refused."""
    found = []
    codec = TextCodec(TEMPLATES)
    codec.special = {"bos_token": "<s>", "eos_token": "</s>"}.get  # type: ignore[method-assign, assignment]
    for file in sorted(TEMPLATES.glob("*.jinja")):
        codec.templates = {"default": file.read_text("utf-8")}
        data, cases = chat_data(codec), list[dict[str, Any]]()
        for turns in (1, 3, 5):
            messages: list[Message] = [
                {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(spm.NASTY[:turns])
            ]
            if "gaps" in data:
                cases.append({"messages": messages, "text": codec.write_chat(messages)})
            answer: Message = {"role": "assistant", "content": spm.NASTY[turns]}
            if "user>continued" in data.get("gaps", {}):
                text = codec.write_chat([*messages, answer], continue_final=True)
                cases.append({"messages": [*messages, answer], "text": text, "continued": True})
        found.append({"name": file.stem, "data": data, "cases": cases})
    return found


def tokenizers(folder: Path) -> list[dict[str, Any]]:
    """Folders with tokenizers of every kind, and what Python makes of nasty texts and of tokens at random."""
    codecs = {"byte_level": TextCodec(folder, hf.make_tokenizer(400, True))}
    for kind in spm.KINDS:
        source = folder / f"{kind}-source"
        source.mkdir()
        (source / "tokenizer.model").write_bytes(spm.train(kind))
        codecs[kind] = open_codec(source)
    found = []
    for number, (kind, codec) in enumerate(codecs.items()):
        (folder / kind).mkdir()
        codec.tokenizer.save(str(folder / kind / "tokenizer.json"))
        rng, cases = random.Random(number), []
        for text in spm.texts(TEXTS, number):
            cases.append({"text": text, "ids": codec.encode(text), "bare": codec.encode(text, special=False)})
        drawn = [[rng.randrange(codec.vocab_size) for _ in range(rng.randint(1, 24))] for _ in range(16)]
        lists = [*drawn, *(codec.encode(text, special=False) for text in spm.NASTY)]
        decoded = [{"ids": ids, "text": codec.decode(ids), "pieces": _pieces(codec, ids)} for ids in lists]
        hashed = codec.vocabulary_sha256()
        found.append({"folder": str(folder / kind), "sha256": hashed, "cases": cases, "decoded": decoded})
    return found


def _pieces(codec: TextCodec, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(codec, ids[:2], ["\n\n"])
    return [*(decoder.push([token]) for token in ids[2:]), decoder.finish()]


def talking(bundle: Path, copy: Path) -> Path:
    """Make a copy of a bundle with a chat template."""
    shutil.copytree(bundle, copy)
    (copy / TEMPLATE_FILE).write_text(PLAY, "utf-8")
    data = chat_data(TextCodec(copy))
    assert "gaps" in data, data
    (copy / CHAT_FILE).write_text(json.dumps(data), "utf-8")
    write_manifest(copy, read_manifest(copy))
    return copy


def conversation(bundle: Path, folder: Path) -> dict[str, Any]:
    """Make a copy of a bundle with a chat template and golden vectors, and three turns with it."""
    copy = talking(bundle, folder / "talking")
    engine = load(copy, threads=2)
    vectors = []
    for text in PROVED:
        prompt = engine.codec.encode(text)
        tokens = engine.generate(prompt, method="ar", max_new_tokens=8).tokens
        vectors.append(GoldenVector(prompt=prompt, method="ar", tokens=tokens))
    write_manifest(copy, read_manifest(copy).model_copy(update={"golden": vectors}))
    talk, turns = engine.conversation(), []
    for question in ("What say you, my lord?", "And then?", "Speak again."):
        result = talk.ask(question, max_new_tokens=24, ignore_eos=True, method="ngram")
        turns.append({"question": question, "tokens": result.tokens, "reused": result.stats.reused_tokens})
    started: list[Message] = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Thou art "}]
    prompt = engine.chat_prompt(started, continue_final=True)
    result = engine.generate(prompt, max_new_tokens=24, ignore_eos=True, method="ngram")
    continued = {"messages": started, "prompt": prompt, "tokens": result.tokens}
    engine.close()
    engine = load(copy, threads=2, context=96)
    full, short = [], engine.conversation([{"role": "system", "content": "A play."}])
    for question in ("What say you, my lord?", "And then?", "Speak again.", "What more?", "Away!"):
        result = short.ask(question, max_new_tokens=24, ignore_eos=True, method="ngram")
        full.append({"question": question, "tokens": result.tokens, "left_out": short.left_out})
    engine.close()
    assert full[-1]["left_out"]
    return {"path": str(copy), "turns": turns, "messages": talk.messages, "full": full, "continued": continued}


def adapters(bundle: Path, folder: Path) -> dict[str, Any]:
    """Write two adapters of the embedded model, and what texts of both and of none say, one after the other."""
    config, folders = json.loads((resolve(TARGET) / "config.json").read_text("utf-8")), dict[str, Path]()
    for rank, name in ((3, "sad"), (5, "gay")):
        folders[name] = folder / f"adapter-{name}"
        write_adapter(folders[name], config, rank=rank)
    cases = list[dict[str, Any]]()
    with load(bundle, threads=2, adapters=folders) as engine:
        for method in ("ar", "self-spec", "speculative"):
            for adapter in (None, *folders, None, "sad"):
                prompt = engine.codec.encode(PROVED[0])
                result = engine.generate(prompt, method=method, max_new_tokens=24, ignore_eos=True, adapter=adapter)
                cases.append({"method": method, "adapter": adapter, "prompt": prompt, "tokens": result.tokens})
    assert len({tuple(case["tokens"]) for case in cases}) == 1 + len(folders)
    return {"path": str(bundle), "folders": {name: str(path) for name, path in folders.items()}, "cases": cases}
