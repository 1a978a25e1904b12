"""One model in memory: its session, and the buffers that all KV slots over it share."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, InvalidRequest, first_line
from edgespec.runtimes.files.attention import exact_attention, read_tables
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.graph_check import check_graph
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.repack import usable_graph
from edgespec.runtimes.ort.hugepages import huge_pages, read_in_huge_pages
from edgespec.runtimes.ort.session import check_threads, default_threads, make_session
from edgespec.runtimes.slots.adapters import AdapterStore
from edgespec.runtimes.slots.expert_store import ExpertStore, unread_expert
from edgespec.runtimes.slots.inserted import EmbeddingSpanCache

if TYPE_CHECKING:
    from edgespec.runtimes.text.translation import Translation

MOST_VIEWS = 128  # of buffers, that are kept
LEAST_PAGES = 1 << 16  # bytes of an array that gets separate pages
HUGE = 4 << 20  # bytes of an array that gets huge pages


OLD_INPUTS = {"ids": "input_ids", "pos": "position_ids"}  # of stock graphs up to schema 2 of bundles, and since


def inputs_of(session: Any) -> dict[str, str]:
    """Map the names of a session's inputs, as they are today, to what the graph calls them."""
    return {OLD_INPUTS.get(one.name, one.name): one.name for one in session.get_inputs()}


class Bound:
    """A numpy array and the OrtValue over the same memory (zero copy): write one, the session reads the other."""

    __slots__ = ("_address", "array", "value")

    def __init__(self, array: NDArray[Any]) -> None:
        import onnxruntime as ort

        self.array = array  # kept: the OrtValue does not own the memory
        self._address = 0
        self.value = ort.OrtValue.ortvalue_from_numpy(array)

    @property
    def address(self) -> int:
        """Where the array's memory begins."""
        if not self._address:  # numpy takes as long to say it as the library to use it
            self._address = self.array.ctypes.data
        return self._address


def own_pages(shape: tuple[int, ...], dtype: type[np.generic], sparse: bool = False) -> NDArray[Any]:
    """Make a zeroed array on separate pages, which return to the system with it; pages never written cost nothing.

    Caches come, grow and go with the requests.  numpy's memory comes from malloc, which would keep the holes.

    ``sparse``: large parts may never be written, so it may be larger than the memory.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < LEAST_PAGES:
        return np.zeros(shape, dtype)
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    if sparse and sys.platform == "linux":
        private["flags"] |= getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    try:
        pages = mmap.mmap(-1, size, **private)
    except OSError as error:  # as numpy says it
        raise MemoryError(f"no {size} bytes for an array") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE:  # as numpy does
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


class Model:
    """A loaded graph.  Several slots may use it, one pass at a time.

    Args:
        folder: the folder of the model's part of the bundle.
        part: its entry in the manifest.
        graph: which of its graphs.
        threads: intra-op threads; None = all processors this process may use.
        kv: how a native graph keeps keys and values; None = float32 in a float32 model, else float16.
        checked: of the bundle that it is of.
        expert_cache: bytes for experts, or layers, that are read when a pass needs them; None = they are mapped.
        adapters: folders of LoRA adapters by name, for native operators alone.
    """

    pairs: bool | None = None
    """Whether a lone row of a strict stock graph goes as a pair; None = not known yet (pairs.py)."""
    translation: Translation | None = None
    """Between the tokenizers of the target and this draft; None = they are the same."""

    experts: ExpertStore | None = None  # where they, or the layers, are read from; None: all weights are mapped
    adapters: AdapterStore | None = None

    def __init__(
        self,
        folder: Path,
        part: ModelPart,
        graph: str,
        threads: int | None = None,
        kv: KvFormat | None = None,
        checked: Checked | None = None,
        expert_cache: int | None = None,
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        check_threads(threads)
        self.folder, self.part, self.facts = folder, part, part.facts
        self.graph_name, self.graph = graph, part.graphs[graph]
        self.kv = kv or ATTENTION[exact_attention(part)]
        self.threads = threads or default_threads()
        native = self.graph.operators == "native"
        path = usable_graph(folder, part, self.graph, checked)
        check_graph(path, self.graph.operators, part.foreign)
        if expert_cache is not None:
            weights = part.weights if part.layout == "native" else part.converted or ""
            self.experts = ExpertStore(path, path.parent / weights, expert_cache, checked)
        if adapters and not native:
            raise no_adapters()
        if adapters:
            self.adapters = AdapterStore(path, adapters, part.facts.architecture)
        with ExitStack() as around:
            if self.experts is not None:
                around.enter_context(self.experts.used())
            if self.adapters is not None:
                around.enter_context(self.adapters.used())
            if not native:
                around.enter_context(huge_pages())
            self.session = make_session(
                path, self.threads, native
            )  # native operators use weights where they are mapped
        if (
            native and self.facts.experts is None and part.weights
        ):  # of experts, a token reads a few, far from each other
            read_in_huge_pages(path.parent / (part.weights if part.layout == "native" else part.converted or ""))
        # the last dimension of each input: its size, or a name where it differs from pass to pass
        self.given: dict[str, Any] = {one.name: [0, *one.shape][-1] for one in self.session.get_inputs()}
        self.key_tables = Bound(read_tables(folder, part, self.kv))  # [n]: what coded keys were learnt with
        self.inserted = EmbeddingSpanCache()  # of images, in texts of its slots
        self._flat: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Bound] = {}
        self._last_rows: dict[tuple[int, int], Bound] = {}

    def run_bound(self, io: Any) -> tuple[float, float]:
        """Run a pass whose inputs and outputs are bound -> milliseconds that it waited for a disk, and bytes of it.

        Raises:
            BundleError: the graph does not match the manifest, or the memory is not enough for the pass.
        """
        store = self.experts
        before = store.read_so_far() if store else None
        try:
            self.session.run_with_iobinding(io)
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            if self.experts is not None and (why := unread_expert(str(error))):
                raise BundleError(why, "check the disk, and copy the bundle again") from error
            raise BundleError(
                f"{self.folder / self.graph.file}: ONNX Runtime cannot run this graph: {first_line(error)}",
                "export the bundle again; if memory ran out, ask for a shorter context",
            ) from error
        if store is None or before is None:
            return 0.0, 0.0
        waited, read = store.read_so_far()
        return 1000 * (waited - before[0]) / self.threads, read - before[1]

    def last_rows(self, n: int, count: int) -> Bound:
        """Return the numbers of the last ``count`` of n rows, int64 [count]; it is read-only."""
        key = n, count
        if key not in self._last_rows:
            if len(self._last_rows) >= MOST_VIEWS:
                del self._last_rows[next(iter(self._last_rows))]
            self._last_rows[key] = Bound(np.arange(n - count, n, dtype=np.int64))
        return self._last_rows[key]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Bound:
        """Return a view of shape ``shape`` of the growing buffer ``name``; all shapes share its memory.

        New memory is zero; on growth old views of the buffer are dropped.
        """
        key = (name, shape)
        if key in self._views:
            return self._views[key]
        size = int(np.prod(shape))
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            more = 0 if flat is None else flat.size * 3 // 2  # slots may keep the old one until their next pass
            self._flat[name] = flat = own_pages((max(size, more),), dtype)
            for old in [old for old in self._views if old[0] == name]:
                del self._views[old]
        if len(self._views) >= MOST_VIEWS:  # of stock attention every length of a text makes another one
            del self._views[next(iter(self._views))]
        self._views[key] = Bound(flat[:size].reshape(shape))
        return self._views[key]


def no_adapters() -> InvalidRequest:
    """Make the error of adapters of a model whose rows they cannot be added to one by one."""
    return InvalidRequest(
        "adapters are added row by row on native operators, and this model runs on stock ones or on a device",
        "leave out operators and device, or merge the adapter at export: `edgespec export MODEL --adapter FOLDER`",
    )
