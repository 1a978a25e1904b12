"""What is mutated: sound bundles and sources, small and made anew, and which mutator each of their files gets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.operators import WantedOperators
from tests.fuzz import mutate_binary as binary
from tests.fuzz.mutate_json import mutated_json
from tests.support import hf
from tests.support.adapters import write_adapter
from tests.support.foreign import write_export
from tests.support.gguf_files import write_gguf
from tests.support.heads import make_heads

TARGET = "builtin:shakespeare"
SMALL = "llama_tied_gqa"
Mutator = Callable[[bytes, Random], tuple[bytes, str]]
MUTATORS: tuple[tuple[str, int, Mutator], ...] = (  # which files, how often, by what
    ("edgespec.json", 10, mutated_json),
    ("*model.weights.json", 5, mutated_json),
    ("*.onnx", 4, binary.mutated_graph),
    ("*tokenizer.json", 2, mutated_json),
    ("*tokenizer.json", 2, binary.tokenizer_bomb),
    ("*.json", 3, mutated_json),
    ("*.jinja", 3, binary.mutated_template),
    ("*.safetensors", 6, binary.mutated_safetensors),
    ("*.gguf", 6, binary.mutated_gguf),
    ("*head_vocab.bin", 2, binary.mutated_lines),
    ("*.data", 1, binary.mutated_bytes),
)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"


def make_seeds(folder: Path) -> dict[str, list[Path]]:
    """Bundles and sources, each in a folder of its own."""
    made: dict[str, list[Path]] = {"bundle": [], "source": []}
    kinds = ("medusa", "blockwise", "paradecode")
    heads = tuple(str(make_heads(folder / kind, kind, TARGET, count=2)) for kind in kinds)
    skip = folder / "skip.json"
    skip.write_text(json.dumps({"attention": [1, 2], "mlp": [3]}), "utf-8")
    operators: dict[str, WantedOperators] = {"native": "native", "stock": "stock"}
    most = ("ngram", "speculative", "self-spec", "swift", *kinds)
    for name, methods, attention in (("native", most, ("nomad",)), ("stock", ("ngram", "self-spec", "swift"), ())):
        whole = name == "native"
        options = ExportOptions(
            model=TARGET, output=folder / "bundles" / name, methods=methods, attention=attention,
            operators=operators[name],
            draft="builtin:shakespeare-draft" if whole else None, heads=heads if whole else (), skip_set=skip,
            threads=1, head_vocab=600 if whole else None, draft_vocab=600 if whole else None,
        )  # fmt: skip
        Exporter(options).run()
        (options.output / "chat_template.jinja").write_text(CHAT, "utf-8")
        made["bundle"].append(options.output)
    checkpoint = hf.write_checkpoint(folder / "sources" / "folder", hf.CONFIGS[SMALL], 0, chat_template=CHAT)
    adapted = folder / "sources" / "adapter"
    shutil.copytree(checkpoint, adapted)
    write_adapter(adapted, hf.CONFIGS[SMALL])
    gguf = folder / "sources" / "gguf"
    gguf.mkdir()
    write_gguf(gguf / "model.gguf", SMALL)
    headed = folder / "sources" / "heads"
    shutil.copytree(checkpoint, headed)
    shutil.copytree(make_heads(folder / "small-heads", "medusa", str(checkpoint), count=2), headed / "heads")
    shards = hf.write_checkpoint(folder / "sources" / "shards", hf.CONFIGS[SMALL], 0, shards=2)
    foreign = write_export(folder / "sources" / "foreign", hf.CONFIGS[SMALL], 0)
    Exporter(ExportOptions(model=str(foreign), output=folder / "bundles" / "optimum", threads=1)).run()
    made["bundle"].append(folder / "bundles" / "optimum")
    made["source"] += [checkpoint, adapted, gguf, headed, shards, foreign]
    return made


def mutant(seed: Path, folder: Path, rng: Random) -> str:
    """A copy of a seed with one to three changes, whose manifest has the files' new hashes; returns what was done."""
    shutil.copytree(seed, folder)
    said = [_change(folder, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    _follow_hashes(folder)
    return "; ".join(said)


def _change(folder: Path, rng: Random) -> str:
    if rng.random() < 0.04:
        return _files(folder, rng)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    able = [(name, weight, how) for pattern, weight, how in MUTATORS for name in names if fnmatch(name, pattern)]
    if not able:
        return "nothing is left"
    name, _, how = rng.choices(able, [weight for _, weight, _ in able])[0]
    file = folder / name
    try:
        data, said = how(file.read_bytes(), rng)
    except (
        ValueError,
        LookupError,
        TypeError,
        OSError,
        RecursionError,
    ):  # mutated before
        data, said = binary.mutated_bytes(file.read_bytes(), rng)
    file.write_bytes(data)
    return f"{name}: {said}"


def _files(folder: Path, rng: Random) -> str:
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    how = rng.choice(("gone", "folder", "outside", "loop", "private", "pipe"))
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "outside":
        file.symlink_to("/etc/hostname")
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "private":
        file.write_bytes(b"x")
        file.chmod(0)
    elif how == "pipe":
        os.mkfifo(file)
    return f"{file.name}: {how}"


def _follow_hashes(folder: Path) -> None:
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in data["files"].items():
            if (folder / name).is_file():
                entry |= {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        text = json.dumps(data)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    (folder / MANIFEST).write_text(text, "utf-8")
