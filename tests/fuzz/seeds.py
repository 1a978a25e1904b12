"""Make the inputs of mutation: small valid bundles and sources, always new, and the mutator of each of their files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from gguf import GGMLQuantizationType

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.operators import WantedOperators
from tests.fuzz import mutate_binary as binary
from tests.fuzz.cases import follow_hashes, put
from tests.fuzz.mutate_json import mutated_json
from tests.support import hf, packed, spm
from tests.support.checkpoints import make_heads, write_adapter
from tests.support.foreign import write_export
from tests.support.gguf_files import write_gguf

TARGET = "builtin:shakespeare"
SMALL = "llama_tied_gqa"
Mutator = Callable[[bytes, Random], tuple[bytes, str]]
MUTATORS: tuple[tuple[str, str, int, Mutator], ...] = (  # which files, what they are, how often, by what
    ("edgespec.json", "manifest", 10, mutated_json),
    ("*model.weights.json", "index of weights", 5, mutated_json),
    ("*.native.onnx", "native program", 3, binary.mutated_graph),
    ("*.onnx", "graph", 3, binary.mutated_graph),
    ("*tokenizer.json", "tokenizer", 3, mutated_json),
    ("*tokenizer.json", "tokenizer", 1, binary.tokenizer_bomb),
    ("*tokenizer.model", "tokenizer", 6, binary.mutated_bytes),
    ("*.safetensors.index.json", "index of shards", 4, mutated_json),
    ("*adapter_config.json", "adapter", 4, mutated_json),
    ("*adapter_model.safetensors", "adapter", 6, binary.mutated_safetensors),
    ("*edgespec_heads.json", "heads", 4, mutated_json),
    ("*heads.safetensors", "heads", 6, binary.mutated_safetensors),
    ("draft/*.safetensors", "draft", 6, binary.mutated_safetensors),
    ("draft/*.json", "draft", 3, mutated_json),
    ("kv/*.safetensors", "tables of keys", 6, binary.mutated_safetensors),
    ("*config.json", "configuration", 4, mutated_json),
    ("*.jinja", "template", 3, binary.mutated_template),
    ("*.safetensors", "weights (safetensors)", 4, binary.mutated_safetensors),
    ("*.gguf", "GGUF", 6, binary.mutated_gguf),
    ("*head_vocab.bin", "vocabulary of heads", 2, binary.mutated_lines),
    ("*.data", "weights (data)", 1, binary.mutated_bytes),
)
LINKS = "files and links"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"


def make_seeds(folder: Path) -> dict[str, list[Path]]:
    """Make bundles and sources, each in a separate folder."""
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
            threads=1, quantizer="rtn", head_vocab=600 if whole else None, draft_vocab=600 if whole else None,
        )  # fmt: skip
        export_model(options, golden=False)
        (options.output / "chat_template.jinja").write_text(CHAT, "utf-8")
        made["bundle"].append(options.output)
    made["source"] = _sources(folder / "sources")
    options = ExportOptions(model=str(folder / "sources" / "foreign"), output=folder / "bundles" / "optimum", threads=1)
    export_model(options, golden=False)
    made["bundle"].append(options.output)
    return made


def _sources(folder: Path) -> list[Path]:
    config = hf.CONFIGS[SMALL]
    plain = hf.write_checkpoint(folder / "folder", config, 0, chat_template=CHAT)
    hf.write_checkpoint(folder / "shards", config, 0, shards=2)
    write_export(folder / "foreign", config, 0)

    def copied(name: str) -> Path:
        return Path(shutil.copytree(plain, folder / name))

    write_adapter(copied("adapter"), config)
    shutil.copytree(plain, copied("draft") / "draft")
    for kind in ("medusa", "blockwise", "paradecode"):
        headed = copied(kind)
        make_heads(headed / f"heads-{kind}", kind, str(plain), count=2)
    for kind in ("gptq4", "fp8_blocks"):
        packed.pack_checkpoint(copied(kind), *packed.KINDS[kind])
    for name, types in (("gguf", GGMLQuantizationType.F32), ("gguf-q4", GGMLQuantizationType.Q4_0)):
        (folder / name).mkdir()
        write_gguf(folder / name / "model.gguf", SMALL, kind=types)
    sentencepiece = hf.write_checkpoint(folder / "sentencepiece", config | {"vocab_size": 512}, 0)
    (sentencepiece / "tokenizer.json").unlink()
    (sentencepiece / "tokenizer.model").write_bytes(spm.train("llama", 500))
    return sorted(path for path in folder.iterdir() if path.is_dir())


Change = tuple[str, str]
"""The changed part (a second word of ``MUTATORS``, or ``LINKS``), and how it was changed."""


def mutant(seed: Path, folder: Path, rng: Random) -> list[Change]:
    """Make a copy of a seed with one to three changes, whose manifest has the files' new hashes."""
    shutil.copytree(seed, folder)
    said = [_change(folder, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    follow_hashes(folder)
    return said


def _change(folder: Path, rng: Random) -> Change:
    linked = rng.random() < 0.04
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    able = [(name, what, often, how) for name in names for what, often, how in mutators(name)]
    if not able:  # one change put a pipe or a folder in the place of the only file
        return LINKS, "nothing is left"
    if linked:
        file = rng.choice(files)
        other = rng.choice(("gone", "folder", "outside", "loop", "private", "pipe"))
        put(file, other)
        return LINKS, f"{file.name}: {other}"
    name, what, _, how = rng.choices(able, [often for _, _, often, _ in able])[0]
    file = folder / name
    try:
        data, said = how(file.read_bytes(), rng)
    except (ValueError, LookupError, TypeError, OSError, RecursionError, struct.error):  # mutated before
        data, said = binary.mutated_bytes(file.read_bytes(), rng)
    file.write_bytes(data)
    return what, f"{name}: {said}"


def mutators(name: str) -> list[tuple[str, int, Mutator]]:
    """Give what a file is, how often it is changed, and by what: of the first word that fits, and those of its kind."""
    fitting = [(what, often, how) for pattern, what, often, how in MUTATORS if fnmatch(name, pattern)]
    return [one for one in fitting if one[0] == fitting[0][0]]
