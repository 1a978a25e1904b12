"""The source model: a Hugging Face folder, a GGUF file, a hub id or an embedded model, read one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, first_line
from edgespec.export.source.opening import open_adapter, open_source
from edgespec.export.source.stored import Blocked, FileRows, Opened, Stored, read_object
from edgespec.runtimes.files.manifest import MANIFEST

BUILTIN = "builtin:"
HUB_SMALL_FILES = [
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "tokenizer.model", "spiece.model", "merges.txt", "*.jinja", "*.spm",
    "sentencepiece.bpe.model", "vocab.txt", "target_vocab.json", "*vocabulary.json", "*vocabulary.txt",
]  # fmt: skip
HUB_FILES = [
    "*.json", "*.safetensors", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm", "merges.txt",
    "*.jinja", "model.bin", "*vocabulary.txt", "vocab.txt",
]  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "adapter_config.json", "edgespec_widened.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json",
                   "chat_template.jinja")  # fmt: skip
PIECE_BYTES = 16 << 20  # float32 bytes converted at once: large enough for BLAS, small compared with any model


def builtin_names() -> list[str]:
    """Names of the embedded models, usable as ``builtin:NAME``."""
    return [name for name in _builtin_with("config.json") if name not in builtin_drafters()]


def builtin_drafters() -> list[str]:
    """Names of the embedded drafters, usable as ``builtin:NAME`` where a drafter is asked for."""
    return [name for name in _builtin_with("edgespec_draft.json") if name not in _builtin_with("tokenizer.json")]


def builtin_heads() -> list[str]:
    """Names of the embedded trained heads, usable as ``builtin:NAME`` where heads are asked for."""
    return _builtin_with("edgespec_heads.json")


def _builtin_with(file: str) -> list[str]:
    folder = resources.files("edgespec") / "builtin"
    return sorted(item.name for item in folder.iterdir() if (item / file).is_file()) if folder.is_dir() else []


def resolve(model: str, revision: str | None = None, weights: bool = True) -> Path:
    """Find the folder or .gguf file of a model, or the folder of trained heads: a local path, ``builtin:NAME``, or a
    hub id (downloaded to the hub's own cache).

    Args:
        weights: whether they are needed; else only configuration and tokenizer are downloaded.

    Raises:
        ExportError: nothing of that name; the message lists what was tried.
    """
    if model.startswith(BUILTIN):
        name = model.removeprefix(BUILTIN)
        if name not in (*builtin_names(), *builtin_heads(), *builtin_drafters()):
            kinds = {"embedded models": builtin_names(), "drafters": builtin_drafters(), "heads": builtin_heads()}
            known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
            raise ExportError(f"no embedded model {name!r}", known)
        return Path(str(resources.files("edgespec") / "builtin" / name))
    path = Path(model).expanduser()
    if (path / MANIFEST).is_file():
        raise ExportError(f"{model}: is a bundle, made by an export", "give the model that it was made of")
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ExportError(
            f"{model}: expected a model folder, got a file", "give the folder that holds config.json, or a .gguf file"
        )
    if model.count("/") > 1 or model.startswith((".", "/", "~")):  # no hub id
        raise ExportError(
            f"{model}: no such folder", "give a local Hugging Face folder, a .gguf file, a hub id or builtin:NAME"
        )
    try:
        from huggingface_hub import snapshot_download

        files = HUB_FILES if weights else HUB_SMALL_FILES
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub client raises many kinds: network, not found, gated
        raise ExportError(
            f"{model}: no local folder of that name, and the hub could not provide it: {first_line(error)}",
            "check the spelling and the network, or download the model and give its folder",
        ) from error


def resolve_heads(name: str) -> Path:
    """Find a folder of trained heads: a local path, or ``builtin:NAME`` of those that come with an embedded model."""
    if not name.startswith(BUILTIN):
        return Path(name).expanduser()
    if name.removeprefix(BUILTIN) not in builtin_heads():
        raise ExportError(
            f"there are no embedded heads {name!r}", "train them with `edgespec train`, and add --heads DIR"
        )
    return resolve(name)


class Checkpoint(Opened):
    """Weights and configuration of a source model, read one tensor at a time."""

    @classmethod
    def open(cls, path: Path, adapter: Path | None = None, tokenizer: bool = True) -> Checkpoint:
        """Open a model folder or a .gguf file; quantized weights are converted when they are read.

        Args:
            path: the model; an adapter's folder stands for its base and the adapter.
            adapter: folder of a LoRA adapter to merge into it.
            tokenizer: whether the tokenizer of a .gguf file is needed.

        Raises:
            ExportError: no or broken config.json, weights that are not there, only pickles, or quantized in a way that
                is not supported.
        """
        opened = open_source(path, tokenizer)
        return cls(**vars(opened if adapter is None else open_adapter(opened, adapter)))

    def copied(self) -> Checkpoint:
        """Return another view of the same files: an architecture changes its configuration and adds notes."""
        return type(self)(self.path, deepcopy(self.config), self.tensors, [*self.notes], self.temporary)

    @cached_property
    def index(self) -> dict[str, Path]:
        """Which file holds which tensor."""
        return {name: tensor.file for name, tensor in self.tensors.items()}

    def has(self, name: str) -> bool:
        return name in self.index

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._stored(name).shape

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """Read (part of) a tensor, converted to float32.

        Raises:
            ExportError: the tensor is missing, of a type that is not a plain float, or has values that are not finite.
        """
        tensor = self._stored(name)
        with np.errstate(all="ignore"):
            values = np.ascontiguousarray(tensor.read(rows, columns))
            flat = values.ravel()
            total = float(np.dot(flat, flat))  # one pass, no temporary: NaN and infinity survive the sum
        if not math.isfinite(total):
            raise ExportError(
                f"{tensor.file}: tensor {name} holds NaN or infinity", "the checkpoint is damaged: download it again"
            )
        return values

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Return the rows of a matrix [n, k] in order, as float32 pieces [rows, k] of at most PIECE_BYTES, alike."""
        n, k = self.shape(name)
        count = -(-n // max(1, PIECE_BYTES // (4 * k)))
        step = -(-n // max(1, count))
        for start in range(0, n, step):
            yield self.read(name, slice(start, min(n, start + step)))

    def blocks(self, name: str) -> FileRows | None:
        """Return the rows of a matrix as its file has them; None = they can only be read as float32."""
        tensor = self._stored(name)
        return tensor.blocks() if isinstance(tensor, Blocked) else None

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            near = [have for have in self.tensors if have.split(".")[-2:] == name.split(".")[-2:]][:1]
            hint = f"a similar name is {near[0]}" if near else "is it a base model without a language-model head?"
            raise ExportError(f"{self.path}: tensor {name} is missing from the checkpoint", hint)
        return self.tensors[name]


class ConfigOnly(Checkpoint):
    """A model with only a config.json: every tensor is assumed to exist, and none can be read.

    It cannot detect a tied model that claims to be untied but holds no LM head.
    """

    @staticmethod
    def suits(path: Path) -> bool:
        """Whether a folder has a config.json and no weights of any kind."""
        if not (path / "config.json").is_file():
            return False
        return not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES)

    @classmethod
    def open(cls, path: Path, adapter: Path | None = None, tokenizer: bool = True) -> ConfigOnly:
        """Read the folder's config.json; an adapter changes no shape, and no tokenizer is read.

        Raises:
            ExportError: not a JSON object.
        """
        return cls(path, read_object(path / "config.json", "give a Hugging Face model folder or a .gguf file"))

    def has(self, name: str) -> bool:
        return True

    def blocks(self, name: str) -> FileRows | None:
        return None


def renamed(base: Checkpoint, names: dict[str, str]) -> Checkpoint:
    """Select tensors of a checkpoint; ``names``: new names to old ones."""
    tensors = {new: base.tensors[old] for new, old in names.items()}
    return Checkpoint(base.path, base.config, tensors, base.notes, base.temporary)


def without_prefix(base: Checkpoint, prefixes: Sequence[str]) -> Checkpoint:
    """Name the tensors of an encoder as if it were saved without a head, and norms as new versions of BERT do."""
    prefix = next((one for one in prefixes if any(name.startswith(one) for name in base.index)), "")
    names = {name.removeprefix(prefix): name for name in base.index}
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        names = {name.removesuffix(old) + new if name.endswith(old) else name: own for name, own in names.items()}
    return renamed(base, names)


def with_usual_prefix(source: Checkpoint, layers_at: str) -> Checkpoint:
    """Return a checkpoint whose layers are named ``layers_at``, such as ``model.layers``.

    Other known prefixes: without the first word (a base model saved without its head), below ``language_model`` (the
    text part of a vision-language model, in the order of either version of transformers), or below ``text_model``
    (Idefics 3, SmolVLM).
    """
    first, _, rest = layers_at.partition(".")
    if not rest:
        return source

    def starts(prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.0.") for name in source.index)

    if starts(layers_at):
        return source
    if starts(rest):
        bare = {name: name if name.startswith("lm_head.") else f"{first}.{name}" for name in source.index}
        return renamed(source, {new: old for old, new in bare.items()})
    inside = ((f"{first}.language_model.", f"{first}."), (f"{first}.text_model.", f"{first}."), ("language_model.", ""))
    for outer, inner in inside:
        if starts(outer + (rest if inner else layers_at)):
            names = {inner + name.removeprefix(outer): name for name in source.index if name.startswith(outer)}
            names |= {name: name for name in source.index if name.startswith("lm_head.")}
            return renamed(source, names)
    return source
