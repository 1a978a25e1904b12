"""The source model: a Hugging Face folder, a hub id or an embedded model, read one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError

BUILTIN = "builtin:"
HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "spiece.model", "merges.txt", "*.jinja"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
TRUNCATED = "the file may be truncated: download it again"
PIECE_BYTES = 16 << 20  # float32 bytes converted at once: large enough for BLAS, small beside any model


def builtin_names() -> list[str]:
    """Names of the embedded models, usable as ``builtin:NAME``."""
    return _builtin_with("config.json")


def builtin_heads() -> list[str]:
    """Names of the embedded trained heads, usable as ``builtin:NAME`` where heads are asked for."""
    return _builtin_with("edgespec_heads.json")


def _builtin_with(file: str) -> list[str]:
    folder = resources.files("edgespec") / "builtin"
    return sorted(item.name for item in folder.iterdir() if (item / file).is_file()) if folder.is_dir() else []


def resolve(model: str, revision: str | None = None) -> Path:
    """Find the folder of a model or of trained heads: a local path, ``builtin:NAME``, or a hub id (downloaded to the
    hub's own cache).

    Raises:
        ExportError: nothing of that name; the message lists what was tried.
    """
    if model.startswith(BUILTIN):
        name = model.removeprefix(BUILTIN)
        if name not in (*builtin_names(), *builtin_heads()):
            known = f"embedded models: {', '.join(builtin_names())}; heads: {', '.join(builtin_heads())}"
            raise ExportError(f"no embedded model {name!r}", known)
        return Path(str(resources.files("edgespec") / "builtin" / name))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ExportError(f"{model}: expected a model folder, got a file", "give the folder that holds config.json")
    looks_like_hub_id = model.count("/") <= 1 and not model.startswith((".", "/", "~"))
    if not looks_like_hub_id:
        raise ExportError(f"{model}: no such folder", "give a local Hugging Face folder, a hub id or builtin:NAME")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises many kinds: network, not found, gated
        raise ExportError(
            f"{model}: no local folder of that name, and the hub could not provide it: {_first_line(error)}",
            "check the spelling and the network, or download the model and give its folder",
        ) from error


def resolve_heads(name: str) -> Path:
    """Find a folder of trained heads: a local path, or ``builtin:NAME`` of those that come with an embedded model.

    Raises:
        ExportError: nothing of that name.
    """
    if not name.startswith(BUILTIN):
        return Path(name).expanduser()
    if name.removeprefix(BUILTIN) not in builtin_heads():
        raise ExportError(
            f"there are no embedded heads {name!r}", "train them with `edgespec train`, and add --heads DIR"
        )
    return resolve(name)


@dataclass
class Checkpoint:
    """Weights and configuration of a source model.

    Attributes:
        path: its folder.
        config: the parsed config.json.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a model folder.

        Raises:
            ExportError: no or broken config.json, or weights only as pickles.
        """
        file = path / "config.json"
        if not file.is_file():
            raise ExportError(f"{path}: has no config.json", "give a Hugging Face model folder")
        try:
            config = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ExportError(f"{file}: not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ExportError(f"{file}: expected a JSON object, got {type(config).__name__}")
        checkpoint = cls(path, config)
        _ = checkpoint.index  # fails early, before anything is written
        return checkpoint

    @cached_property
    def index(self) -> dict[str, Path]:
        """Which file holds which tensor."""
        from safetensors import SafetensorError, safe_open

        listing = self.path / "model.safetensors.index.json"
        if listing.is_file():
            try:
                names = json.loads(listing.read_text("utf-8"))["weight_map"]
                found = {str(name): self.path / file for name, file in names.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ExportError(f"{listing}: expected a weight_map of file names: {error!r}") from error
            if outside := [str(file) for file in names.values() if Path(file).name != file]:
                raise ExportError(f"{listing}: names {outside[0]!r}, which is not a file of this folder")
            for file in sorted(set(found.values())):
                if not file.is_file():
                    raise ExportError(f"{file}: named in {listing.name} but missing", "download all shards")
            return found
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(
                p.name for p in [*self.path.glob("*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")]
            )
            if pickles:
                raise ExportError(
                    f"{self.path}: weights only as pickle ({pickles[0]}), which can run code when opened",
                    "convert it once with `model.save_pretrained(folder, safe_serialization=True)`",
                )
            raise ExportError(f"{self.path}: has no *.safetensors", "give a folder with safetensors weights")
        found = {}
        for file in files:
            try:
                with safe_open(file, "np") as opened:
                    found.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ExportError(f"{file}: not a readable safetensors file: {error}", "download it again") from error
        return found

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return name in self.index

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        from safetensors import SafetensorError, safe_open

        file = self._file(name)
        try:
            with safe_open(file, "np") as opened:
                return tuple(opened.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file}: cannot read {name}: {error}", TRUNCATED) from error

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """Read (part of) a tensor as float32, whatever it is stored as.

        The file is opened for this read alone, so that its pages do not stay in the process.

        Raises:
            ExportError: the tensor is missing or of a type that is not a plain float.
        """
        from safetensors import SafetensorError, safe_open

        file = self._file(name)
        try:
            with safe_open(file, "np") as opened:
                part = opened.get_slice(name)
                if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise ExportError(
                        f"{file}: tensor {name} is stored as {part.get_dtype()}; expected float32, float16 or bfloat16",
                        "export from the unquantized checkpoint",
                    )
                if part.get_dtype() == "BF16":
                    import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs

                array = part[rows] if columns is None else part[rows, columns]
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{file}: cannot read {name}: {error}", TRUNCATED) from error
        values = np.asarray(array, np.float32)
        flat = values.ravel()
        with np.errstate(all="ignore"):
            total = float(np.dot(flat, flat))  # one pass, no temporary: NaN and infinity survive the sum
        if not math.isfinite(total):
            raise ExportError(
                f"{file}: tensor {name} holds NaN or infinity", "the checkpoint is damaged: download it again"
            )
        return values

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """The rows of a matrix [n, k] in order, as float32 pieces [rows, k] of about PIECE_BYTES."""
        n, k = self.shape(name)
        step = max(1, PIECE_BYTES // (4 * k))
        for start in range(0, n, step):
            yield self.read(name, slice(start, min(n, start + step)))

    def _file(self, name: str) -> Path:
        if name not in self.index:
            near = [have for have in self.index if have.split(".")[-2:] == name.split(".")[-2:]][:1]
            hint = f"a similar name is {near[0]}" if near else "is it a base model without a language-model head?"
            raise ExportError(f"{self.path}: tensor {name} is missing from the checkpoint", hint)
        return self.index[name]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
