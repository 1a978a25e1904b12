"""The other layout of a bundle's weights, made on demand and kept in a cache of its own.

A bundle stores its weights once, packed for native operators or as stock ones want them.  Where the other kind runs,
every tensor is converted by the index that the export wrote; levels and scales stay the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.cache import cache_folder, describe, keep_within, touch
from edgespec.runtimes.files.manifest import Graph, Layout, ModelPart
from edgespec.runtimes.files.packing import TILE, Packed
from edgespec.runtimes.files.staged import remove_stale, staged
from edgespec.runtimes.files.weights_index import AGAIN, Entry, read_index

_TILES = 256  # tiles converted at a time: bounds the memory


def usable_graph(folder: Path, part: ModelPart, graph: Graph) -> Path:
    """The path of a graph whose weights have the layout that its operators want, converting them if need be.

    Args:
        folder: of the bundle.
        part: the model.
        graph: one of its graphs.

    Raises:
        BundleError: there is nothing to convert by, or no room for the result.
    """
    path = folder / graph.file
    if graph.operators == part.layout:
        return path
    if part.index is None or part.converted is None:
        raise BundleError(f"{path}: the bundle has no weights for {graph.operators} operators", "export it again")
    weights, index = folder / part.weights, folder / part.index
    target = cache_folder() / f"{_identity(weights, index)}-{graph.operators}"
    copy = target / path.name
    try:
        if not (target / part.converted).is_file():
            _convert(weights, index, part.layout, target / part.converted)
            keep_within(target)
        else:
            remove_stale(target)  # of one that was killed while another was faster
            touch(target)
        if not _is_current(copy, path):
            _replace(copy, path)
    except OSError as error:
        raise BundleError(
            f"{target}: cannot convert the weights: {error}", "free some space, or set EDGESPEC_CACHE to another folder"
        ) from error
    return copy


def repacked_bytes(folder: Path, part: ModelPart) -> int:
    """Bytes that converted weights of this model take in the cache now."""
    if part.index is None:
        return 0
    weights = folder / part.weights
    name = _identity(weights, folder / part.index)
    return sum(file.stat().st_size for file in cache_folder().glob(f"{name}-*/*") if file.is_file())


def _identity(weights: Path, index: Path) -> str:
    """Names the contents without reading them all: where, when and how large."""
    facts = [weights.resolve().as_posix(), weights.stat().st_mtime_ns, weights.stat().st_size, sha256(index)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _is_current(copy: Path, path: Path) -> bool:
    """Whether ``copy`` was made of this very graph: copies keep the time of what they were made from."""
    if not copy.is_file():
        return False
    mine, its = copy.stat(), path.stat()
    return (mine.st_size, mine.st_mtime_ns) == (its.st_size, its.st_mtime_ns)


def _replace(copy: Path, path: Path) -> None:
    with staged(copy) as part:
        shutil.copyfile(path, part)
        shutil.copystat(path, part)


def _convert(weights: Path, index: Path, layout: Layout, target: Path) -> None:
    """Write all tensors in the other layout; the file's folder appears when it is complete."""
    known = read_index(index, layout, weights.stat().st_size)
    present, wanted = known.entries(layout), known.entries("stock" if layout == "native" else "native")
    source = np.memmap(weights, np.uint8, "r")
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    # another process may be faster
    with staged(target.parent, folder=True, replace=False) as part, (part / target.name).open("wb") as file:
        convert = _to_stock if layout == "native" else _to_native
        made = set()
        for name, matrix in known.matrices.items():
            for entry, pieces in convert(name, matrix.packed, source, present, wanted):
                made.add(entry.offset)
                file.seek(entry.offset)
                for piece in pieces:
                    file.write(np.ascontiguousarray(piece).data)
        for name, entry in wanted.items():
            if name in present and present[name][1:] == entry[1:]:
                made.add(entry.offset)
                file.seek(entry.offset)
                file.write(source[present[name].offset : present[name].offset + entry.length].data)
        if lost := [name for name, entry in wanted.items() if entry.length and entry.offset not in made]:
            raise BundleError(f"{index}: says of nothing that {lost[0]} is made of", AGAIN)
        describe(part, weights)


Pieces = Iterator[NDArray[Any]]


def _to_stock(
    name: str, packed: Packed, source: NDArray[np.uint8], present: dict[str, Entry], wanted: dict[str, Entry]
) -> Iterator[tuple[Entry, Pieces]]:
    offset, length = present[f"{name}.packed"][:2]
    data = source[offset : offset + length]
    tiles = length // packed.tile_bytes
    # padded heads are dropped from the matrix as a whole
    step = tiles if packed.head_dim % TILE else _TILES

    def parts() -> Iterator[tuple[NDArray[Any], ...]]:
        left = packed.n
        for start in range(0, tiles, step):
            found = packed.unpack(data, slice(start, start + step))
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
            yield (
                wanted[entry],
                (
                    packed.form.to_stock(levels, scales, packed.k)[item].astype(wanted[entry].dtype)
                    for levels, scales in parts()
                ),
            )


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
    yield target, packed.pack_blocks(packed.form.from_stock(levels[s : s + step], scales[s : s + step]) for s in starts)
