"""The other layout of a bundle's weights, converted on demand and kept in a separate cache.

A bundle stores its weights once, packed for native operators or as stock ones want them.  Where the other kind runs,
every tensor is converted by the index that the export wrote; levels and scales stay the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.cache import ORIGIN, cache_folder, describe, is_gone, keep_within, touch
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.formats import TILE
from edgespec.runtimes.files.large_writes import LargeWrites
from edgespec.runtimes.files.manifest import Graph, Layout, ModelPart, Operators
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.files.sealed import read_sealed, user_key
from edgespec.runtimes.files.staged import remove_stale, staged
from edgespec.runtimes.files.weights_index import AGAIN, Entry, read_index
from edgespec.version import __version__

MADE_AS = f"{__version__}-1"  # a conversion of another version is not used
_TILES = 256  # tiles converted at a time: bounds the memory


def usable_graph(folder: Path, part: ModelPart, graph: Graph, checked: Checked | None = None) -> Path:
    """Return the path of ``graph`` with weights in the layout that its operators want, converting them if need be.

    A conversion is named by the digests of its inputs, and has its own in a sealed record; one that differs
    from its record is never used, but recreated.

    ``checked``, of the bundle, also covers the cache.

    Raises:
        BundleError: there is nothing to convert by, or no room for the result.
    """
    path = folder / graph.file
    if graph.operators == part.layout:
        return path
    if part.index is None or part.converted is None:
        raise BundleError(f"{path}: the bundle has no weights for {graph.operators} operators", "export it again")
    checked = checked or Checked()
    weights, index = folder / part.weights, folder / part.index
    source = Source.of(folder, part, graph.operators, checked)
    target = source.folder
    copy = target / path.name
    try:
        if not _is_sound(target / part.converted, weights, source, checked):
            _clear(target, checked)
            _convert(weights, index, part.layout, target / part.converted, source)
            if user_key() is None:  # this process made it, and watches it from here on
                checked.digest(target / part.converted)
            elif not _is_sound(target / part.converted, weights, source, checked):
                raise BundleError(f"{target}: write verification failed", "check the disk")
            keep_within(target)
        else:
            remove_stale(target)  # of one that was killed while another was faster
            touch(target)
        if not copy.is_file() or checked.digest(copy) != checked.digest(path):
            checked.forget(copy)
            with staged(copy) as staging:
                shutil.copyfile(path, staging)
            if checked.digest(copy) != checked.digest(path):
                raise BundleError(f"{copy}: is not the copy of {path} that was written", "check the disk")
        checked.save()
    except OSError as error:
        raise BundleError(
            f"{target}: cannot convert the weights: {error}", "free some space, or set EDGESPEC_CACHE to another folder"
        ) from error
    return copy


def repacked_bytes(folder: Path, part: ModelPart, checked: Checked | None = None) -> int:
    """Bytes of converted weights of this model in the cache."""
    if part.index is None or part.converted is None:
        return 0
    other: Operators = "stock" if part.layout == "native" else "native"
    target = Source.of(folder, part, other, checked or Checked()).folder
    return sum(file.stat().st_size for file in target.glob("*") if file.is_file())


@dataclass(frozen=True)
class Source:
    """SHA-256 digests of the conversion inputs: weights, index, graphs."""

    weights: str
    index: str
    graphs: tuple[str, ...]
    file: str
    operators: Operators

    @classmethod
    def of(cls, folder: Path, part: ModelPart, operators: Operators, checked: Checked) -> Source:
        """Describe the files of ``part`` in ``folder``."""
        assert part.index is not None
        assert part.converted is not None
        graphs = sorted(graph.file for graph in part.graphs.values() if graph.operators == operators)
        digests = tuple(checked.digest(folder / file) for file in graphs)
        weights, index = checked.digest(folder / part.weights), checked.digest(folder / part.index)
        return cls(weights, index, digests, part.converted, operators)

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        made = [MADE_AS, self.weights, self.index, *self.graphs, self.file]
        return cache_folder() / f"{hashlib.sha256(json.dumps(made).encode()).hexdigest()[:24]}-{self.operators}"


def _is_sound(made: Path, weights: Path, source: Source, checked: Checked) -> bool:
    """Return whether converted weights are authentic; False without a key."""
    target = made.parent
    if not made.is_file():
        return False
    try:
        said = read_sealed(target / ORIGIN, f"weights {target.name}")
    except (OSError, ValueError):
        if user_key() is not None:
            return False
        checked.note("converted weights in the cache cannot be checked: there is no key to seal them with")
        checked.digest(made)
        return True
    if said.get("source") != [source.weights, source.index] or said.get("sha256") != checked.digest(made):
        return False
    if is_gone(target):  # another bundle of the same weights keeps using it
        with suppress(OSError):
            describe(target, weights, said, target.name)
    return True


def _clear(target: Path, checked: Checked) -> None:
    """Remove an invalid conversion as a whole."""
    checked.forget(target)
    if os.path.lexists(target):
        aside = target.with_name(f".{target.name}.part-{secrets.token_hex(6)}")
        with suppress(FileNotFoundError):  # another process was faster
            target.rename(aside)
            shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()


def _convert(weights: Path, index: Path, layout: Layout, target: Path, origin: Source) -> None:
    """Write all tensors in the other layout; the file's folder appears when it is complete."""
    known = read_index(index, layout, weights.stat().st_size)
    present, wanted = known.entries(layout), known.entries("stock" if layout == "native" else "native")
    source = np.memmap(weights, np.uint8, "r")
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    # another process may be faster
    with staged(target.parent, folder=True, replace=False) as part:
        convert = _to_stock if layout == "native" else _to_native
        made = set()
        with LargeWrites(part / target.name) as file:
            for name, packed in known.matrices.items():
                for entry, pieces in convert(name, packed, source, present, wanted):
                    made.add(entry.offset)
                    at = entry.offset
                    for piece in pieces:
                        at += file.write_at(at, np.ascontiguousarray(piece).reshape(-1).data)
            for name, entry in wanted.items():
                if name in present and present[name][1:] == entry[1:]:
                    made.add(entry.offset)
                    first = present[name].offset
                    file.write_at(entry.offset, source[first : first + entry.length].data, scattered=True)
        if lost := [name for name, entry in wanted.items() if entry.length and entry.offset not in made]:
            raise BundleError(f"{index}: says of nothing that {lost[0]} is made of", AGAIN)
        facts = {"source": [origin.weights, origin.index], "sha256": sha256(part / target.name)}
        describe(part, weights, facts, target.parent.name)


Pieces = Iterator[NDArray[Any]]


def _to_stock(
    name: str, packed: Packed, source: NDArray[np.uint8], present: dict[str, Entry], wanted: dict[str, Entry]
) -> Iterator[tuple[Entry, Pieces]]:
    def stored(entry: Entry) -> NDArray[np.uint8]:
        return source[entry.offset : entry.offset + entry.length]

    data = stored(present[f"{name}.packed"])
    low = stored(present[f"{name}.low"]) if packed.low_nbytes else None
    tiles = len(data) // packed.tile_bytes
    # padded heads are dropped from the matrix as a whole
    step = tiles if packed.head_dim % TILE else _TILES

    def parts() -> Iterator[tuple[NDArray[Any], ...]]:
        left = packed.n
        for start in range(0, tiles, step):
            found = packed.unpack(data, slice(start, start + step), low)
            found = tuple(packed.drop_padding(part) if step == tiles else part[:left] for part in found)
            left -= len(found[0])
            yield found

    def rows(item: int) -> Pieces:
        return (found[item] for found in parts())

    if packed.kind == "f32":
        whole, at = np.concatenate(list(rows(0))), 0
        for part, n in packed.parts:  # stock float32 matrices are not joined
            yield wanted[part], iter([whole[at : at + n].T])
            at += n
    elif packed.kind == "c8":
        yield wanted[f"{name}.levels"], iter([np.concatenate(list(rows(0))).T])
        yield wanted[f"{name}.scales"], (scales.astype("<f4") for scales in rows(1))
    else:
        for item, entry in enumerate((f"{name}.levels", f"{name}.scales")):
            made = (packed.form.to_stock(levels, scales, packed.k)[item] for levels, scales in parts())
            yield wanted[entry], (piece.astype(wanted[entry].dtype) for piece in made)


def _to_native(
    name: str, packed: Packed, source: NDArray[np.uint8], present: dict[str, Entry], wanted: dict[str, Entry]
) -> Iterator[tuple[Entry, Pieces]]:
    def stored(entry: Entry) -> NDArray[Any]:
        offset, length, dtype, dims = entry
        return source[offset : offset + length].view(dtype).reshape(dims)

    target, step = wanted[f"{name}.packed"], _TILES * TILE
    starts = range(0, packed.n, step)
    if packed.kind == "f32":
        matrices = [stored(present[part]) for part, _ in packed.parts]  # [k, n] each
        rows = (one[:, at : at + step].T for one in matrices for at in range(0, one.shape[1], step))
        yield target, packed.pack_floats(rows)
        return
    levels, scales = stored(present[f"{name}.levels"]), stored(present[f"{name}.scales"])
    if packed.kind == "c8":
        yield target, packed.pack_channels((levels[:, s : s + step].T, scales[s : s + step]) for s in starts)
        return

    def blocks() -> Iterator[tuple[NDArray[np.uint8], NDArray[Any]]]:
        return (packed.form.from_stock(levels[s : s + step], scales[s : s + step]) for s in starts)

    if packed.low_nbytes:
        yield target, (high for high, _ in packed.pack_planes(blocks()))
        yield wanted[f"{name}.low"], (low for _, low in packed.pack_planes(blocks()))
    else:
        yield target, packed.pack_blocks(blocks())
