"""Open a bundle on disk, check every file, and read its parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.formats import FILE, GGML
from edgespec.runtimes.files.manifest import MANIFEST, Manifest, ModelPart, read_manifest
from edgespec.runtimes.files.manifest_parts import INSIDE, InsidePath

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
TEXT_FILES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE

FEWEST = min(spec.bytes / spec.group for spec in GGML.values())  # bytes of a weight of a file


def sha256(path: Path) -> str:
    """SHA-256 of a file as hex digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class Bundle:
    """An opened bundle."""

    path: Path  # its folder
    manifest: Manifest = field(repr=False)  # the validated manifest
    # what of it was compared with its SHA-256, and what else it runs
    checked: Checked = field(default_factory=partial(Checked, False), compare=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], check: bool = True) -> Bundle:
        """Open a bundle and check its files.

        Args:
            path: the folder.
            check: compare the SHA-256 of every file, taken again where the file may have changed since it was taken
                last (``checked``); presence and size are always checked.

        Raises:
            BundleError: the file that is missing, short, altered or outside the folder is named.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        bundle = cls(folder, manifest, checked := Checked(check))
        for name in _named(manifest):
            if name not in manifest.files:
                raise BundleError(f"{folder / MANIFEST}: uses {name!r} but does not list it under files")
        _check_links(folder)
        for name, entry in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise BundleError(f"{file}: missing from the bundle", "copy the whole folder, or export again")
            size = file.stat().st_size
            if size != entry.size:
                word = "truncated" if size < entry.size else "altered"
                raise BundleError(f"{file}: {word}: expected {entry.size} bytes, got {size}", "copy or export it again")
            if check and (got := checked.digest(file)) != entry.sha256:
                raise BundleError(
                    f"{file}: altered: expected SHA-256 {entry.sha256[:12]}..., got {got[:12]}...",
                    "export it again, or pass --no-check if you changed it on purpose",
                )
        check_sizes(folder, manifest)
        for name in _read_by_name(folder):
            if name not in manifest.files:
                checked.note(f"{name} is in the folder, but the manifest does not list it")
        checked.save()
        return bundle

    def part(self, name: str) -> ModelPart:
        """Return the model called ``name``: ``target``, ``draft`` or ``drafter``."""
        part: ModelPart | None = getattr(self.manifest, name)
        if part is None:
            how = "--method speculative --draft MODEL2" if name == "draft" else "--method eagle --drafter DRAFTER"
            raise BundleError(f"{self.path}: has no {name} model", f"export with `{how}`")
        return part


def _check_links(folder: Path) -> None:
    """Reject links that lead out of the folder, also in files that the manifest does not list, such as templates."""
    root = folder.resolve()
    for at, folders, files in os.walk(folder):
        for file in (Path(at, name) for name in (*folders, *files)):
            if file.is_symlink() and not Path(os.path.realpath(file)).is_relative_to(root):
                raise BundleError(f"{file}: a link that leaves the bundle is not allowed")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that the weights have the sizes in the facts: buffers, caches and predictions depend on them.

    Raises:
        BundleError: the model whose weights are too small is named, or weights that the manifest does not list.
    """
    towers = [part.audio.tower for part in manifest.models if part.audio]
    # projectors and convolutions have no layers
    flat = [one for part in manifest.models for one in part.front[1:] if not any(one is tower for tower in towers)]
    for part in manifest.models:
        if part.weights not in manifest.files:
            raise BundleError(f"{folder / MANIFEST}: uses {part.weights!r} but does not list it under files")
        if not any(part is one for one in flat):
            _check_size(folder, part, manifest.files[part.weights].size)


def _check_size(folder: Path, part: ModelPart, size: int) -> None:
    f = part.facts
    per_layer = f.hidden * (f.head_dim * 2 * (f.heads + f.kv_heads) + 2 * f.intermediate)
    each = f.hidden + f.layers * f.layer_embedding
    rows = part.head_vocab.size if part.decoder and part.head_vocab else f.vocab  # a drafter has no embedding
    weight = FEWEST if part.format == FILE else 0.5
    least = int((f.layers * per_layer + rows * each) * weight) if part.origin == "edgespec" else f.kv_bytes_per_token
    if size < least:
        raise BundleError(
            f"{folder / MANIFEST}: the facts are those of a model of at least {least} bytes, but {part.weights} has "
            f"{size}",
            "export the bundle again",
        )


def read_head_tokens(folder: Path, part: ModelPart) -> NDArray[np.int64] | None:  # [size]
    """Read the tokens of the rows of ``part``'s pruned LM head; None = it is not pruned.

    Raises:
        BundleError: not as many as the manifest says, not ascending, or outside the vocabulary.
    """
    if part.head_vocab is None:
        return None
    file = folder / part.head_vocab.file
    size, vocab = part.head_vocab.size, part.facts.vocab
    if file.stat().st_size == 4 * size:
        tokens = np.fromfile(file, "<i4").astype(np.int64)
        if tokens[0] >= 0 and tokens[-1] < vocab and np.all(np.diff(tokens) > 0):
            return tokens
    raise BundleError(f"{file}: expected {size} ascending tokens below {vocab}, as int32", "export the bundle again")


def read_final_norm(folder: Path, part: ModelPart) -> NDArray[np.float32] | None:  # [1 or 2, hidden]
    """Read the weights of a model's final norm, and its biases; None = the bundle has none.

    Raises:
        BundleError: not as many as the model is wide.
    """
    if (norm := part.final_norm) is None:
        return None
    found = np.fromfile(folder / norm.file, "<f4")
    rows = 1 + norm.biased
    if found.size != rows * part.facts.hidden:
        raise BundleError(f"{folder / norm.file}: expected {rows} x {part.facts.hidden} numbers", "export it again")
    return found.reshape(rows, -1)


def read_confidence(folder: Path, part: ModelPart) -> NDArray[np.float32] | None:  # [1 + hidden + vocab]
    """Read the weights of a drafter's confidence head (``DecoderPart``); None = it has none.

    Raises:
        BundleError: not as many numbers as the drafter is wide and the vocabulary long.
    """
    name = part.decoder.confidence if part.decoder else None
    return _numbers(folder, name, 1 + part.facts.hidden + part.facts.vocab)


def read_masked(folder: Path, part: ModelPart) -> NDArray[np.float32] | None:  # [columns - hidden]
    """Read the replacement of hidden states in a drafter's mask rows; None = it has no such rows.

    Raises:
        BundleError: not as many numbers as a row has columns for them.
    """
    decoder = part.decoder
    return _numbers(folder, decoder.masked, decoder.columns - part.facts.hidden) if decoder else None


def read_selector(folder: Path, part: ModelPart) -> NDArray[np.float16] | None:  # [hidden + 2 * vocab, rank]
    """Map the numbers of a drafter's selector (``SelectorPart``) into memory; None = it has none.

    Raises:
        BundleError: not as many numbers as the drafter is wide and the vocabulary long.
    """
    found = part.decoder.selector if part.decoder else None
    if found is None:
        return None
    rows, file = part.facts.hidden + 2 * part.facts.vocab, folder / found.file
    if file.stat().st_size != 2 * rows * found.rank:
        raise BundleError(f"{file}: expected {rows} x {found.rank} numbers of 16 bits", "export the bundle again")
    return np.memmap(file, "<f2", "r", shape=(rows, found.rank))


def _numbers(folder: Path, name: str | None, size: int) -> NDArray[np.float32] | None:  # [size]
    if name is None:
        return None
    found = np.fromfile(folder / name, "<f4")
    if found.size != size:
        raise BundleError(f"{folder / name}: expected {size} numbers", "export the bundle again")
    return found


def _read_by_name(folder: Path) -> list[str]:
    """List the tokenizer and chat template files of ``folder``, which have no entry in the manifest."""
    fixed = [name for name in TEXT_FILES if os.path.lexists(folder / name)]
    return fixed + [file.relative_to(folder).as_posix() for file in (folder / TEMPLATE_FOLDER).glob("*.jinja")]


def _named(part: Part) -> Iterator[str]:
    """Yield every file that an entry of the manifest, or one inside it, uses."""
    for name, about in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, str) and (INSIDE in about.metadata or InsidePath in get_args(about.annotation)):
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(inner, Part):
                yield from _named(inner)
