"""A weight file as it is written: aligned, whole, one tensor at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.export.bundle.model_part import open_model
from edgespec.export.bundle.sizes import weight_bytes
from edgespec.export.emit.fill import WeightFile, fill
from edgespec.export.emit.plan import LARGE_ALIGN, WeightLayout
from edgespec.export.emit.plans import storage_plans
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Layout
from tests.conftest import LARGE, TARGET, write_large
from tests.support import hf

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint(NAME))


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    layout, small, large = WeightLayout(), np.arange(10, dtype=np.float32), np.ones((512, 1024), np.float32)
    with WeightFile(tmp_path / "w.data") as file:
        file.write(layout.add("small", (10,), np.float32), [small[:4], small[4:]])
        file.write(layout.add("large", (512, 1024), np.float32), [large])
        file.write(layout.add("after", (3,), np.uint8), [np.array([1, 2, 3], np.uint8)])
    entries, content = layout.entries, (tmp_path / "w.data").read_bytes()
    assert [entries[name].offset for name in ("small", "large", "after")] == [
        0, LARGE_ALIGN, LARGE_ALIGN + large.nbytes,
    ]  # fmt: skip
    assert len(content) == layout.end
    assert content[:40] == small.tobytes()
    assert content[-3:] == b"\1\2\3"


def test_a_tensor_of_another_size_than_announced_is_noticed(tmp_path: Path) -> None:
    with (
        WeightFile(tmp_path / "w.data") as file,
        pytest.raises(AssertionError, match="wrote 8 bytes at 0, expected 12"),
    ):
        file.write(WeightLayout().add("a", (3,), np.float32), [np.zeros(2, np.float32)])


@pytest.mark.parametrize("layout", ["stock", "native"])
def test_progress_grows_to_the_end(tmp_path: Path, layout: Layout) -> None:
    """With every tensor, so that a bar moves while the matrices of a large model are searched."""
    plan = storage_plans(open_model(resolve(TARGET), None), "int4", None, None)[layout]
    told: list[tuple[int, int]] = []
    fill(tmp_path / "w.data", plan, progress=lambda done, of: told.append((done, of)))
    assert {of for _, of in told} == {plan.end}
    assert sorted(told) == told
    assert len({done for done, _ in told}) >= len(plan.matrices)
    assert told[-1][0] == plan.end == (tmp_path / "w.data").stat().st_size


# -- memory ------------------------------------------------------------------------------------------------------------

CONVERT = """
import sys, threading, time
from pathlib import Path
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels

chosen = DirectLevels(QUANTIZERS["mse"])

def private():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

source, folder, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
tiny = folder / "tiny"
tiny.mkdir()
spec = ModelSpec(form, gated=True)
write_model(tiny, open_model(Path(sys.argv[4]), None), spec, chosen)  # everything is imported now
arch = open_model(source, None)
before = peak = private()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, private())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
write_model(folder, arch, spec, chosen)
peak = max(peak, private())
done.set()
watcher.join()
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("form", ["int4", "w8a8", "fp32"])
def test_a_conversion_holds_one_tensor_at_a_time(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, target: str, form: Format
) -> None:
    large = tmp_path_factory.getbasetemp() / "large"
    if not large.exists():
        assert write_large(large, LARGE) > 100_000_000
    command = [sys.executable, "-c", CONVERT, str(large), str(tmp_path), form, target]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    largest = 4 * LARGE["vocab_size"] * LARGE["hidden_size"]
    growth = int(ran.stdout)
    assert 1 << 20 < growth < largest + (64 << 20)
    size = (tmp_path / "model.data").stat().st_size
    assert size > 50 << 20
    assert weight_bytes(open_model(large, None), form) == size
