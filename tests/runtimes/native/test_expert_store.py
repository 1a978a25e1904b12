"""Experts read from the file when a pass needs them: the bits of mapped ones, or an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.formats import FILE_KINDS, Kind
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.expert_store import READS, ExpertStore
from edgespec.runtimes.slots.shared import Bound
from tests.support.gguf_files import random_blocks
from tests.support.native_graph import F32, Rows, Weights, model, run_once

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(sys.platform == "win32", reason="experts are mapped on Windows"),
]

HIDDEN, INNER, EXPERTS, CHOSEN, VOCAB, LAYERS = 64, 96, 12, 3, 50, 2
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()
WAYS = ("threads", "io_uring") if sys.platform == "linux" else ("threads",)


def graph(folder: Path, kind: Kind, down: str = "", hidden: int = HIDDEN, inner: int = INNER) -> Path:
    """Write a node of two mixtures, one after the other, with its weights in a separate file.

    With ``down``, types of files: of the last matrices of the second mixture, all others being of ``kind``.
    """
    draw, weights = np.random.default_rng(7), Weights()
    lines = [f"floats {id} {width}" for id, width in enumerate((hidden, EXPERTS, 2 * CHOSEN))]
    lines += [f"acts 0 {hidden}", f"acts 1 {hidden}"]
    table = draw.standard_normal((VOCAB, hidden)).astype(np.float32)
    lines.append(f"embed w={weights.vector(table)} kind=r32 n={VOCAB} k={hidden} out=0")
    for layer in range(LAYERS):
        router = weights.matrix(draw.standard_normal((EXPERTS, hidden)).astype(np.float32))
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "w": (hidden, inner)}
        last, matrices = "", ""
        for name, (n, k) in sizes.items():
            if down:
                its = down if layer and name == "w" else kind.upper()
                high, low = weights.rows(random_blocks(its, EXPERTS * n, k), k, its)
                last = f"downkind={FILE_KINDS[its]}" if name == "w" and its == down else ""
                matrices += f"{name}={high} {'' if name == 'w' else name}low={low} "
            else:
                matrix = (draw.standard_normal((EXPERTS * n, k)) / 8).astype(np.float32)
                matrices += f"{name}={weights.matrix(matrix, kind)} "
        lines += [
            f"quantize x=0 norm=-1 k={hidden} kind=f32 out=0",
            f"linear act=0 w={router} kind=f32 n={EXPERTS} k={hidden} bias=-1 out=1 add=0",
            f"quantize x=0 norm=-1 k={hidden} kind={kind} out=1",
            f"route x=1 n={EXPERTS} k={CHOSEN} out=2 add=1 scale=0.5",
            f"experts act=1 x=2 {matrices}kind={kind} {last} n={inner} k={hidden} "
            f"times={EXPERTS} heads={CHOSEN} out=0 add=1",
        ]
    lines.append(f"store x=0 k={hidden}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "node.onnx"
    made = model("\n".join(lines), weights, hidden)
    onnx.save(made, path, save_as_external_data=True, location="node.data", size_threshold=0, convert_attribute=False)
    return path


def opened(path: Path, slots: int, checked: Checked | None = None) -> ExpertStore:
    """Open a store with room for as many experts."""
    data = path.with_name("node.data")
    each = ExpertStore(path, data, 1 << 24).slot_bytes
    return ExpertStore(path, data, slots * each, checked)


def passes(
    path: Path, store: ExpertStore | None = None, hidden: int = HIDDEN
) -> Callable[[list[int]], NDArray[np.float32]]:
    """Open the node -> a function that runs tokens and gives the stream [n, hidden]."""
    if store is None:
        session = make_session(path, 2, True)
    else:
        with store.used():
            session = make_session(path, 2, True)

    def run(tokens: list[int]) -> NDArray[np.float32]:
        rows = Rows.chain(len(tokens), token=tokens)
        feeds = {
            "plan": rows.plan, "rows": np.zeros(0, np.int64), "gates": np.zeros(0, bool),
            "moves": np.zeros((0, 3), np.int64), "control": np.array([0, *F32.controls()], np.int64),
            "tables": np.zeros(0, np.float32), "hidden_in": np.zeros((0, hidden), np.float32),
        }  # fmt: skip
        return np.asarray(run_once(session, Bound(np.zeros((1, 64), np.uint8)), feeds)[3])

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("slots", [2, 7, LAYERS * EXPERTS])
def test_streamed_experts_have_the_bits_of_mapped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, slots: int, way: str
) -> None:
    monkeypatch.setenv(READS, way)
    path = graph(tmp_path, kind)
    store = opened(path, slots, Checked())
    mapped, streamed = passes(path), passes(path, store)
    for tokens in (TOKENS[:1], TOKENS, TOKENS[3:9], TOKENS[:1]):
        np.testing.assert_array_equal(streamed(tokens), mapped(tokens))
    counts = store.counts()
    assert counts.passes == 4 * LAYERS
    assert counts.sent == (1 + 40 + 6 + 1) * CHOSEN * LAYERS
    assert store.distinct_by_rows()[1] == CHOSEN
    assert counts.hits < counts.distinct
    if slots == LAYERS * EXPERTS:  # each was read once
        assert counts.distinct - counts.hits <= LAYERS * EXPERTS
    assert store.reads in WAYS


@pytest.mark.parametrize("kind, down", [("q4_k", "Q6_K"), ("q5_k", "Q8_0")])
@pytest.mark.parametrize("slots", [2, 7])
def test_a_mixture_whose_down_is_of_another_type(tmp_path: Path, kind: Kind, down: str, slots: int) -> None:
    path = graph(tmp_path, kind, down, 256, 512)
    store = opened(path, slots, Checked())
    mapped, streamed = passes(path, hidden=256), passes(path, store, 256)
    for tokens in (TOKENS[:1], TOKENS, TOKENS[3:9], TOKENS[:1]):
        found = streamed(tokens)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, mapped(tokens))
    assert store.counts().hits < store.counts().distinct
    weight = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in (kind.upper(), down)}
    size = 256 * 512 * EXPERTS
    expected = sum(count * size * weight[name][1] // weight[name][0] for name, count in ((kind.upper(), 5), (down, 1)))
    assert expected <= store.expert_bytes <= 1.05 * expected


def test_an_expert_in_the_cache_is_not_read_again(tmp_path: Path) -> None:
    path = graph(tmp_path, "q8")
    store = opened(path, LAYERS * EXPERTS)
    run = passes(path, store)
    run(TOKENS)
    store.forget_counts()
    run(TOKENS)
    assert store.counts().bytes == 0
    assert store.counts().hit_rate == 1


@pytest.mark.parametrize("way", WAYS)
def test_changed_and_missing_bytes_are_errors_and_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv(READS, way)
    path = graph(tmp_path, "q8")
    data = path.with_name("node.data")
    whole = data.read_bytes()
    expected = passes(path)(TOKENS)
    run = passes(path, opened(path, 4, Checked()))
    np.testing.assert_array_equal(run(TOKENS), expected)
    places = np.random.default_rng(1).integers(len(whole) // 2, len(whole), 3).tolist()
    for at in places:  # any bit of what is read
        with data.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 4]))
        with pytest.raises(Exception, match="are not those that were checked"):
            run(TOKENS)
        with data.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])
        np.testing.assert_array_equal(run(TOKENS), expected)
    os.truncate(data, len(whole) // 2)
    with pytest.raises(Exception, match="the file ends at byte"):
        run(TOKENS)
    with data.open("r+b") as file:
        file.write(whole)
    np.testing.assert_array_equal(run(TOKENS), expected)


def test_without_a_check_an_expert_must_stay_as_it_was_read_first(tmp_path: Path) -> None:
    path = graph(tmp_path, "q8")
    data = path.with_name("node.data")
    run, whole = passes(path, opened(path, 4)), data.read_bytes()
    expected = run(TOKENS)
    changed = bytearray(whole)
    changed[-2000] ^= 64
    data.write_bytes(changed)
    with pytest.raises(Exception, match="not those of the read before"):
        run(TOKENS)
    data.write_bytes(whole)
    np.testing.assert_array_equal(run(TOKENS), expected)


def test_checksums_are_recorded_with_those_of_the_file(tmp_path: Path) -> None:
    path = graph(tmp_path, "q8")
    expected = passes(path)(TOKENS)
    opened(path, 4, Checked())
    data = path.with_name("node.data")
    whole = data.read_bytes()
    changed = bytearray(whole)
    changed[-2000] ^= 64
    data.write_bytes(changed)  # another file: the text of these weights, not an error
    other = passes(path, opened(path, 4, Checked()))(TOKENS)
    assert not np.array_equal(other, expected)
    data.write_bytes(whole)
    np.testing.assert_array_equal(passes(path, opened(path, 4, Checked()))(TOKENS), expected)


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    path = graph(tmp_path, "q8")
    data = path.with_name("node.data")
    with pytest.raises(BundleError, match="expected at least"):
        ExpertStore(path, data, 100)
    with pytest.raises(BundleError, match="cannot be opened"):
        ExpertStore(tmp_path / "none.onnx", data, 1 << 24)
    store = opened(path, 4)
    with pytest.raises(BundleError, match="does not read weights"), store.used():
        pass


FAULT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
ssize_t pread64(int file, void* to, size_t size, off64_t at) {
  static ssize_t (*real)(int, void*, size_t, off64_t);
  if (!real) real = (ssize_t(*)(int, void*, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
  if (getenv("FAULT_SLOW")) usleep(3000);
  if (getenv("FAULT_EIO") && size > 4096) { errno = EIO; return -1; }
  return real(file, to, getenv("FAULT_SHORT") && size > 4096 ? 4096 : size, at);
}
ssize_t pread(int file, void* to, size_t size, off_t at) { return pread64(file, to, size, at); }
"""

CHILD = """
import os, sys
from pathlib import Path
from tests.runtimes.native.test_expert_store import TOKENS, opened, passes
path = Path(sys.argv[1])
expected = passes(path)(TOKENS)
run = passes(path, opened(path, 4))
os.environ["FAULT_SHORT"] = "1"  # reads of fewer bytes than asked for are continued
assert (run(TOKENS) == expected).all()
os.environ["FAULT_SLOW"] = "1"  # a device that is throttled: passes wait as long as it takes
assert (run(TOKENS) == expected).all()
del os.environ["FAULT_SLOW"]
os.environ["FAULT_EIO"] = "1"
try:
    run(TOKENS)
except Exception as error:
    assert "Input/output error" in str(error), error
else:
    raise SystemExit("no error")
del os.environ["FAULT_EIO"]
assert (run(TOKENS) == expected).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_errors_of_the_disk_are_errors(tmp_path: Path) -> None:
    source, library = tmp_path / "fault.c", tmp_path / "fault.so"
    source.write_text(FAULT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    path = graph(tmp_path, "q8")
    environment = os.environ | {"LD_PRELOAD": str(library), READS: "threads"}
    done = subprocess.run([sys.executable, "-c", CHILD, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
