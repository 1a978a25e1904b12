"""Programs with newer steps that the native operator rejects with a message; nothing ends the process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import BundleError
from tests.runtimes.native.test_steps import random
from tests.support.native_graph import Node, Rows, Weights

pytestmark = pytest.mark.usefixtures("native")
ROOT = Path(__file__).resolve().parents[3]

GOOD = """floats 0 32
floats 1 32
floats 2 16
acts 0 32
load out=1 k=32
split x=1 n=16 times=2 out=2
embed w=0 kind=r32 n=8 k=32 out=0 scale=2 positions=1
activate x=0 k=32 fn=gelu rows=0
norm x=0 norm=2 beta=3 center=1 eps=1e-5 k=32 out=1 add=1
heads qx=0 kx=2 vx=2 dim=16 heads=2 kv=1 layer=0
attend out=1 layer=0 heads=2 kv=1 dim=16 window=4 cap=2
quantize x=1 norm=2 beta=3 center=1 k=32 kind=f32 out=0 rows=1
logits act=0 w=4 kind=f32 n=8 k=32 bias=5 scale=0.5 cap=30
store x=1 k=32"""
DELTA = "z=1 a=1 b=1 length=3 w=2 bias=2 rate=2 norm=2"


def good(**sizes: int) -> Weights:
    """Weights of ``GOOD``, some of another size."""
    weights = Weights()
    for name, size in (("table", 8 * 32), ("positions", 4 * 32), ("norm", 32), ("beta", 32)):
        weights.vector(np.ones(sizes.get(name, size), np.float32))
    weights.matrix(np.ones((8, 32), np.float32))
    weights.vector(np.ones(sizes.get("bias", 8), np.float32))
    return weights


def test_the_program_that_is_spoilt_below_runs(tmp_path: Path) -> None:
    logits, *_ = Node(tmp_path, GOOD, good(), 32, head=(1, 16)).run(Rows.chain(3), random(3, 32))
    assert np.isfinite(logits).all()
    assert logits.shape == (3, 8)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "fn=gelu",
            "fn=swish",
            "unknown fn swish: expected silu, gelu, gelu_tanh, relu, relu2, sigmoid, swiglu_oai, xielu or clamp",
        ),
        ("fn=gelu rows=0", "fn=gelu rows=2", "rows out of place"),
        ("fn=gelu rows=0", "fn=xielu", "expected w for xielu and clamp alone"),
        ("fn=gelu rows=0", "fn=relu2 w=2", "expected w for xielu and clamp alone"),
        ("store x=1", "convolve x=1 k=32 length=3 w=2 out=0", "no such buffer, or too narrow"),
        ("store x=1", "convolve x=1 k=8 length=1 w=2 out=0", "expected a length of at least 2"),
        ("store x=1", "convolve x=1 k=8 length=3 out=0", "expected w"),
        ("store x=1", f"delta x=1 k=32 heads=2 kv=1 dim=8 n=16 out=0 {DELTA}", "expected dim and n that are multiples"),
        ("store x=1", f"delta x=1 k=32 heads=2 kv=1 dim=16 n=16 out=0 {DELTA}", "expected k to be that of q, k and v"),
        ("store x=1", "multiply x=0 k=32 fn=sigmoid out=0", "expected out beside x"),
        ("layer=0\nattend", "layer=4097\nattend", "expected layer of 0 to 4096"),
        ("store x=1", "glu act=0 gate=4 up=4 n=32 k=32 kind=f32 out=0", "expected out beside act"),
        ("activate x=0 k=32", "activate x=0 k=33", "no such buffer, or too narrow"),
        ("activate x=0 k=32", "activate x=0", "expected k"),
        ("activate x=0 k=32 fn=gelu rows=0", "silu x=0 k=32 fn=gelu", "fn out of place"),
        ("activate x=0 k=32 fn=gelu rows=0", "silu x=0 k=32 rows=1", "rows out of place"),
        ("window=4", "window=-1", "expected window of 0 to"),
        ("window=4", "window=x", "expected an integer"),
        ("dim=16 window=4 cap=2", "dim=16 window=4 cap=-2", "expected a finite cap of at least 0"),
        ("cap=30", "cap=nan", "expected a finite cap of at least 0"),
        ("cap=30", "cap=much", "expected a number"),
        ("scale=2", "scale=nan", "expected a finite scale"),
        ("kx=2 vx=2", "vx=2", "expected all of qx, kx and vx, or none"),
        ("kx=2 vx=2", "kx=2", "expected all of qx, kx and vx, or none"),
        ("qx=0 ", "", "expected all of qx, kx and vx, or none"),
        ("qx=0 kx=2 vx=2", "act=0 k=32", "expected act, w and k, or qx, kx and vx"),
        ("qx=0", "qx=2", "no such buffer, or too narrow"),
        ("kv=1 layer", "kv=2 layer", "no such buffer, or too narrow"),
        ("kv=1 layer", "kv=0 layer", "expected kv"),
        ("norm x=0 norm=2 beta=3 center=1 eps=1e-5 k=32 out=1 add=1", "norm x=0 k=32 out=1", "expected norm"),
        ("norm x=0 norm=2", "norm x=0", "beta without norm"),
        ("quantize x=1 norm=2", "quantize x=1", "beta without norm"),
        ("out=1 add=1", "out=0 add=1", "expected out beside x"),
        ("out=1 add=1", "out=2 add=1", "no such buffer, or too narrow"),
        ("quantize x=1", "quantize at=16 x=1", "at out of place"),
        ("store x=1", "store positions=1 x=1", "positions out of place"),
        ("heads=2 kv=1 layer=0\n", "heads=2 kv=1 layer=0\nstore x=1 k=32\n", "expected the heads of this layer"),
    ],
)
def test_programs_that_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(BundleError, match=message):
        Node(tmp_path, GOOD.replace(old, new), good(), 32, head=(1, 16))


def test_a_step_refuses_every_key_that_its_row_does_not_have(tmp_path: Path) -> None:
    table = (ROOT / "runtimes" / "native" / "steps.inl").read_text("utf-8")
    keys = set(re.findall(r"(?:WEIGHT|BUFFER|NUMBER|REAL)\((\w+)[,)]", table)) - {"x", "k", "at"}
    assert len(keys) > 40
    for key in sorted(keys | {"fn", "kind"}):
        with pytest.raises(BundleError, match=f" {key} out of place"):
            Node(tmp_path, GOOD.replace("store x=1", f"store {key}=1 x=1"), good(), 32, head=(1, 16))


@pytest.mark.parametrize("name, size", [("norm", 31), ("beta", 31), ("bias", 7)])
def test_weights_that_are_too_short(tmp_path: Path, name: str, size: int) -> None:
    with pytest.raises(Exception, match="a vector of weights is too short"):
        Node(tmp_path, GOOD, good(**{name: size}), 32, head=(1, 16)).run(Rows.chain(2), random(2, 32))


def test_positions_that_are_too_few(tmp_path: Path) -> None:
    node = Node(tmp_path, GOOD, good(), 32, head=(1, 16))
    node.run(Rows.chain(4), random(4, 32))
    for rows in (Rows.chain(5), Rows.chain(1, 4)):
        with pytest.raises(Exception, match="position 4 is beyond the table of positions"):
            node.run(rows, random(len(rows), 32))


def test_a_weight_that_is_no_input(tmp_path: Path) -> None:
    node = Node(tmp_path, GOOD.replace("bias=5", "bias=6"), good(), 32, head=(1, 16))
    with pytest.raises(Exception, match="the program names weight 6 of 6"):
        node.run(Rows.chain(2), random(2, 32))


FUZZ = """
import sys
from pathlib import Path
import numpy as np
from tests.support.native_graph import Node, Rows
from tests.runtimes.native.test_refused import GOOD, good, random

folder, draws = Path(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
ran = refused = 0
for turn in range(250):
    words = GOOD.split(" ")
    for _ in range(int(draws.integers(1, 3))):
        at = int(draws.integers(len(words)))
        key, equals, value = words[at].partition("=")
        new = str(draws.choice(["0", "1", "2", "3", "7", "16", "33", "-1", "65536", "1000000000", "1e30", "silu"]))
        words[at] = key + equals + new if equals and "\\n" not in value else words[int(draws.integers(len(words)))]
    try:
        Node(folder, " ".join(words), good(), 32, head=(1, 16)).run(Rows.chain(3), random(3, 32), top=turn % 3)
        ran += 1
    except Exception as error:
        assert str(error), "an error without words"
        refused += 1
print(ran, refused)
"""


def test_no_program_ends_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FUZZ, str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    ran, refused = map(int, done.stdout.split())
    assert min(ran, refused) > 20
    assert ran + refused == 250
