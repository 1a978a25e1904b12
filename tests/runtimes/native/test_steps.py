"""Single steps of the native operator against numpy: functions, norms, positions, and LM heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.quantization import levels as quantize
from edgespec.runtimes.files.formats import Kind
from tests.support.native_graph import Floats, Node, Rows, Weights, beside, levels

pytestmark = pytest.mark.usefixtures("native")

ROWS = (1, 3, 17, 40)
FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
WIDTH, INNER, VOCAB, POSITIONS = 72, 88, 50, 64  # fill neither blocks nor tiles
Exact = NDArray[np.float64]


def apply(fn: str, x: Exact) -> Exact:
    """Apply the activation function ``fn`` to ``x`` in double precision."""
    if fn == "silu":
        return x / (1 + np.exp(-x))
    if fn == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if fn == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0) ** (2 if fn == "relu2" else 1)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def close(found: NDArray[Any], expected: Exact, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * float(np.abs(expected).max()))


def layer_norm(x: Exact, eps: float, center: bool = True) -> Exact:  # [n, k]
    x = x - x.mean(-1, keepdims=True) if center else x
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)


def rounded(matrix: Floats) -> Exact:  # [n, k]
    """Quantize ``matrix`` to q8 and back."""
    values, scales = levels(matrix)
    return quantize.dequantize_block(values, scales.astype(np.float16).astype(np.float32), matrix.shape[1], 8).astype(
        np.float64
    )


def rounded_rows(x: Exact) -> Exact:  # [n, k]
    """Quantize activations ``x`` and back: 127 levels a block of 32."""
    n, k = x.shape
    blocks = np.pad(x, ((0, 0), (0, -k % 32))).reshape(n, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(step > 0, step, 1)) * step).reshape(n, -1)[:, :k]


# -- what is computed --------------------------------------------------------------------------------------------------


def test_the_last_buffers(tmp_path: Path) -> None:
    """A program may name 64 of each kind; a 65th is refused (tests/runtimes/native/test_errors.py)."""
    weights, x = Weights(), random(3, WIDTH)
    matrix = random(VOCAB, WIDTH, seed=1)
    program = (
        f"floats 63 {WIDTH}\nacts 63 {WIDTH}\nload out=63 k={WIDTH}\nquantize x=63 k={WIDTH} kind=f32 out=63 rows=1\n"
        f"logits act=63 w={weights.matrix(matrix)} kind=f32 n={VOCAB} k={WIDTH}"
    )
    found = Node(tmp_path, program, weights, WIDTH).run(Rows.chain(3), x)[0]
    close(found, x.astype(np.float64) @ matrix.T.astype(np.float64))


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("n", ROWS)
def test_activate_all_rows(tmp_path: Path, fn: str, n: int) -> None:
    program = f"floats 0 {WIDTH}\nload out=0 k={WIDTH}\nactivate x=0 k={WIDTH} fn={fn}\nstore x=0 k={WIDTH}"
    node = Node(tmp_path, program, Weights(), WIDTH)
    for scale in (0.01, 1.0, 30.0):
        x = random(n, WIDTH, scale=scale)
        found = node.run(Rows.chain(n), x)[3]
        expected = apply(fn, x.astype(np.float64))
        assert np.abs(found - expected).max() < 1e-6 * max(1.0, scale, np.abs(expected).max())
    if fn == "relu2":
        return
    large = np.array([[-1e30, -1e5, -90, 0, 90, 1e5, 3e38, -0.0] * (WIDTH // 8)] * n, np.float32)
    np.testing.assert_allclose(node.run(Rows.chain(n), large)[3], np.maximum(large, 0), atol=1e-7)


def test_xielu_reads_its_numbers(tmp_path: Path) -> None:
    weights = Weights()
    w = weights.vector(np.array([0.7, 1.1, 0.5], np.float32))
    program = f"floats 0 {WIDTH}\nload out=0 k={WIDTH}\nactivate x=0 k={WIDTH} fn=xielu w={w}\nstore x=0 k={WIDTH}"
    node = Node(tmp_path, program, weights, WIDTH)
    for scale in (0.001, 1.0, 30.0):
        x = random(17, WIDTH, scale=scale).astype(np.float64)
        low, high = np.minimum(x, 0), np.maximum(x, 0)
        found = node.run(Rows.chain(17), x.astype(np.float32))[3]
        close(found, 0.7 * high**2 + 1.1 * (np.expm1(low) - low) + 0.5 * x)


@pytest.mark.parametrize("late", [0, 1])
def test_norms_after_rotation_and_queries_that_grow(tmp_path: Path, late: int) -> None:
    weights, dim, width, places = Weights(), 16, 48, 8
    angles = np.arange(places)[:, None] * 0.3 ** np.arange(dim // 2)
    cos, sin, growth = np.cos(angles), np.sin(angles), 1 + 0.5 * np.arange(places)
    norms = [random(dim, seed=seed) for seed in (5, 6)]
    eye = np.eye(width, dtype=np.float32)
    cut = [weights.matrix(eye[at : at + dim]) for at in (0, dim, 2 * dim)]
    back = weights.matrix(np.ascontiguousarray(eye[:, :dim]))  # as wide as what was loaded
    ids = [weights.vector(v.astype(np.float32)) for v in (cos, sin, growth, *norms)]
    named = zip(("cos", "sin", "growth", "qnorm", "knorm"), ids, strict=True)
    program = "\n".join(
        [
            *(f"floats {at} {size}" for at, size in enumerate((width, dim, dim, dim, dim))),
            f"acts 0 {width}\nacts 1 {dim}\nload out=0 k={width}\nquantize x=0 k={width} kind=f32 out=0",
            *(f"linear act=0 w={w} kind=f32 n={dim} k={width} out={at}" for at, w in enumerate(cut, 1)),
            f"heads qx=1 kx=2 vx=3 dim={dim} heads=1 kv=1 layer=0 rotary={dim} late={late} eps=1e-6 scale=0.25 "
            + " ".join(f"{key}={at}" for key, at in named),
            f"attend out=4 layer=0 heads=1 kv=1 dim={dim}\nquantize x=4 k={dim} kind=f32 out=1",
            f"linear act=1 w={back} kind=f32 n={width} k={dim} out=0\nstore x=0 k={width}",
        ]
    )
    x = random(4, width)
    q, k, v = np.split(x.astype(np.float64), 3, -1)

    def placed(rows: Exact, weight: Floats) -> Exact:
        rows = rows if late else layer_norm(rows, 1e-6, False) * weight
        one, two = np.split(rows, 2, -1)
        turned = np.concatenate([one * cos[:4] - two * sin[:4], two * cos[:4] + one * sin[:4]], -1)
        return layer_norm(turned, 1e-6, False) * weight if late else turned

    scores = placed(q, norms[0]) * growth[:4, None] @ placed(k, norms[1]).T * 0.25
    scores[np.triu_indices(4, 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = shares / shares.sum(-1, keepdims=True) @ v
    close(Node(tmp_path, program, weights, width, head=(1, dim)).run(Rows.chain(4), x)[3][:, :dim], expected, 2e-3)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_activate_rows_of_the_head_only(tmp_path: Path, fn: str) -> None:
    weights = Weights()
    w, eye = weights.matrix(random(INNER, WIDTH, scale=0.2)), weights.matrix(np.eye(INNER, dtype=np.float32))
    middle = f"activate x=1 k={INNER} fn={fn} rows=1"
    program = (
        f"floats 0 {WIDTH}\nfloats 1 {INNER}\nacts 0 {WIDTH}\nacts 1 {INNER}\nload out=0 k={WIDTH}\n"
        f"quantize x=0 k={WIDTH} kind=f32 out=0 rows=1\nlinear act=0 w={w} kind=f32 n={INNER} k={WIDTH} out=1 rows=1\n"
        f"{middle}\nquantize x=1 k={INNER} kind=f32 out=1 rows=2\nlogits act=1 w={eye} kind=f32 n={INNER} k={INNER}"
    )
    x, reach = random(17, WIDTH), [16, 2, 2]
    found = Node(tmp_path / "a", program, weights, WIDTH).run(Rows.chain(17), x, reach=reach)[0]
    close(found, apply(fn, x[reach].astype(np.float64) @ random(INNER, WIDTH, scale=0.2).T.astype(np.float64)))
    if fn == "silu":  # the older word for it
        older = program.replace(middle, f"silu x=1 k={INNER}")
        same = Node(tmp_path / "b", older, weights, WIDTH).run(Rows.chain(17), x, reach=reach)[0]
        np.testing.assert_array_equal(same, found)


def glu_program(weights: Weights, fn: str, kind: Kind) -> str:
    """load -> glu of matrices INNER x WIDTH -> down to WIDTH -> store."""
    gate, up = (weights.matrix(random(INNER, WIDTH, seed=s, scale=0.2), kind) for s in (1, 2))
    down, bias = weights.matrix(random(WIDTH, INNER, seed=3, scale=0.2), kind), weights.vector(random(INNER, seed=4))
    form = "f32" if kind == "f32" else "q4"
    return (
        f"floats 0 {WIDTH}\nacts 0 {WIDTH}\nacts 1 {INNER}\nload out=0 k={WIDTH}\n"
        f"quantize x=0 k={WIDTH} kind={form} out=0\n"
        f"glu act=0 gate={gate} up={up} bias={bias} kind={kind} n={INNER} k={WIDTH} out=1 fn={fn}\n"
        f"linear act=1 w={down} kind={kind} n={WIDTH} k={INNER} out=0\nstore x=0 k={WIDTH}"
    )


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_glu(tmp_path: Path, fn: str, kind: Kind) -> None:
    weights = Weights()
    node = Node(tmp_path, glu_program(weights, fn, kind), weights, WIDTH)
    w = [
        random(*shape, seed=s, scale=0.2)
        for s, shape in ((1, (INNER, WIDTH)), (2, (INNER, WIDTH)), (3, (WIDTH, INNER)))
    ]
    gate, up, down = (rounded(m) if kind == "q8" else m.astype(np.float64) for m in w)
    for n in ROWS:
        x = random(n, WIDTH, seed=n)
        rows = rounded_rows(x.astype(np.float64)) if kind == "q8" else x.astype(np.float64)
        inner = apply(fn, rows @ gate.T + random(INNER, seed=4)) * (rows @ up.T)
        found = node.run(Rows.chain(n), x)[3]
        if kind == "f32":
            close(found, inner @ down.T)
        else:  # a level may be rounded the other way
            error = np.abs(found - rounded_rows(inner) @ down.T)
            assert np.median(error) < 1e-5 * np.abs(found).max()
            assert error.max() < 0.02 * np.abs(found).max()


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_an_activation_that_is_made_with_its_matrix(tmp_path: Path, fn: str, kind: Kind) -> None:
    """A gate without up has the bits of a matrix, then the activation, then a matrix's input made from that."""
    weights, form = Weights(), "f32" if kind == "f32" else "q4"
    w, bias = weights.matrix(random(INNER, WIDTH, seed=1, scale=0.2), kind), weights.vector(random(INNER, seed=4))
    back = weights.matrix(random(WIDTH, INNER, seed=3, scale=0.2), kind)
    matrix = f"={w} bias={bias} kind={kind} n={INNER} k={WIDTH} out=1"
    apart = f"linear act=0 w{matrix}\nactivate x=1 k={INNER} fn={fn}\nquantize x=1 k={INNER} kind={form} out=1"
    head = f"floats 0 {WIDTH}\nfloats 1 {INNER}\nacts 0 {WIDTH}\nacts 1 {INNER}\nload out=0 k={WIDTH}\n"
    head += f"quantize x=0 k={WIDTH} kind={form} out=0\n"
    tail = f"\nlinear act=1 w={back} kind={kind} n={WIDTH} k={INNER} out=0\nstore x=0 k={WIDTH}"
    one, other = (
        Node(tmp_path / name, head + steps + tail, weights, WIDTH, tokens=512)
        for name, steps in (("a", apart), ("b", f"glu act=0 gate{matrix} fn={fn}"))
    )
    for n in (*ROWS, 500):
        x = random(n, WIDTH, seed=n)
        np.testing.assert_array_equal(one.run(Rows.chain(n), x)[3], other.run(Rows.chain(n), x)[3])


def test_positions_and_norms_in_place(tmp_path: Path) -> None:
    weights, places, weight = Weights(), random(POSITIONS, WIDTH, seed=1), random(WIDTH, seed=2)
    program = (
        f"floats 0 {WIDTH}\nload out=0 k={WIDTH}\nplace x=0 k={WIDTH} positions={weights.vector(places)}\n"
        f"norm x=0 out=0 k={WIDTH} norm={weights.vector(weight)} center=1 eps=1e-5\nstore x=0 k={WIDTH}"
    )
    node, x = Node(tmp_path, program, weights, WIDTH), random(40, WIDTH)
    expected = layer_norm((x + places[3:43]).astype(np.float64), 1e-5) * weight
    close(node.run(Rows.chain(40, past=3), x)[3], expected)
    with pytest.raises(Exception, match="position 64 is beyond the table of positions"):
        node.run(Rows.chain(1, past=POSITIONS), x[:1])
    with pytest.raises(Exception, match="expected out beside x"):
        Node(tmp_path, program.replace("eps=1e-5", "eps=1e-5 add=1"), weights, WIDTH)


@pytest.mark.parametrize("center, norm, beta", [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 1), (0, 1, 0)])
@pytest.mark.parametrize("add", [0, 1])
def test_norm(tmp_path: Path, center: int, norm: int, beta: int, add: int) -> None:
    weights, weight, shift = Weights(), random(WIDTH, seed=1), random(WIDTH, seed=2)
    w, b = (weights.vector(v) if there else -1 for v, there in ((weight, norm), (shift, beta)))
    program = (
        f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nacts 0 {WIDTH}\nload out=0 k={WIDTH}\nload out=1 k={WIDTH}\n"
        f"norm x=0 norm={w} beta={b} center={center} eps=1e-3 k={WIDTH} out=1 add={add}\nstore x=1 k={WIDTH}"
    )
    node = Node(tmp_path, program, weights, WIDTH)
    for n in ROWS:
        for mean in (0, 30):
            x = random(n, WIDTH, seed=n) + np.float32(mean)
            expected = layer_norm(x.astype(np.float64), 1e-3, bool(center))
            expected = expected * (weight if norm else 1) + (shift if beta else 0) + (x if add else 0)
            close(node.run(Rows.chain(n), x)[3], expected)


def test_rows_are_added_without_a_norm(tmp_path: Path) -> None:
    program = (
        f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nload out=0 k={WIDTH}\nload out=1 k={WIDTH}\n"
        f"norm x=0 k={WIDTH} out=1 add=1\nstore x=1 k={WIDTH}"
    )
    x = random(17, WIDTH)
    np.testing.assert_array_equal(Node(tmp_path, program, Weights(), WIDTH).run(Rows.chain(17), x)[3], 2 * x)


@pytest.mark.parametrize("length, biased", [(1, True), (2, False), (5, True), (16, False)])
def test_each_channel_is_convolved_over_the_rows_of_its_slot(tmp_path: Path, length: int, biased: bool) -> None:
    weights, taps, bias = Weights(), random(length, WIDTH, seed=1), random(WIDTH, seed=2) * biased
    more = f" bias={weights.vector(bias)}" if biased else ""
    program = (
        f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nload out=0 k={WIDTH}\n"
        f"depthwise x=0 k={WIDTH} length={length} w={weights.vector(taps.ravel())} out=1{more}\nstore x=1 k={WIDTH}"
    )
    node = Node(tmp_path, program, weights, WIDTH, slots=2)

    def convolved(x: Exact) -> Exact:
        padded = np.pad(x, ((length - 1, 0), (0, 0)))
        made: Exact = np.sum([taps[j] * padded[j : j + len(x)] for j in range(length)], 0) + bias
        return made

    for n in ROWS:
        x = random(n, WIDTH, seed=n)
        close(node.run(Rows.chain(n), x)[3], convolved(x.astype(np.float64)))
    x = random(20, WIDTH)
    both = beside(Rows.chain(12), Rows.chain(8, slot=1))
    parts = [convolved(part.astype(np.float64)) for part in (x[:12], x[12:])]
    close(node.run(both, x)[3], np.concatenate(parts))
    with pytest.raises(Exception, match="expected another buffer for out"):
        Node(tmp_path, program.replace(f"out=1{more}\nstore", f"out=0{more}\nstore"), weights, WIDTH)


@pytest.mark.parametrize("length, groups", [(1, 1), (2, 4), (3, WIDTH)])
@pytest.mark.parametrize("second", [False, True])
def test_taps_of_a_convolution_may_be_a_rows_own(tmp_path: Path, length: int, groups: int, second: bool) -> None:
    weights, taps = Weights(), random(length, WIDTH, seed=1)
    size = 2 * length * groups
    matrix = random(size, WIDTH, seed=2) / np.float32(8)
    at = length * groups * second
    program = (
        f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nfloats 2 {size}\nacts 0 {WIDTH}\nload out=0 k={WIDTH}\n"
        f"quantize x=0 k={WIDTH} kind=f32 out=0\n"
        f"linear act=0 w={weights.matrix(matrix, 'f32')} kind=f32 n={size} k={WIDTH} out=2\n"
        f"depthwise x=0 k={WIDTH} length={length} w={weights.vector(taps.ravel())} out=1 b=2 n={groups} at={at}\n"
        f"store x=1 k={WIDTH}"
    )
    node = Node(tmp_path, program, weights, WIDTH, slots=2)

    def convolved(x: Exact) -> Exact:
        own = (x @ matrix.T.astype(np.float64)).reshape(len(x), 2, length, groups)[:, int(second), ::-1]
        every = taps[:, None] + np.repeat(own, WIDTH // groups, -1).swapaxes(0, 1)  # [length, rows, WIDTH]
        padded = np.pad(x, ((length - 1, 0), (0, 0)))
        made: Exact = np.sum([every[j] * padded[j : j + len(x)] for j in range(length)], 0)
        return made

    x = random(20, WIDTH)
    both = beside(Rows.chain(12), Rows.chain(8, slot=1))
    parts = [convolved(part.astype(np.float64)) for part in (x[:12], x[12:])]
    close(node.run(both, x)[3], np.concatenate(parts))
    for wrong, message in ((program.replace(f" n={groups} at", " n=0 at"), "expected n with b"),
                           (program.replace(f"at={at}\nstore", f"at={at + size}\nstore"), "at within b")):  # fmt: skip
        with pytest.raises(Exception, match=message):
            Node(tmp_path, wrong, weights, WIDTH)


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("center, beta", [(1, 1), (1, 0), (0, 1)])
def test_quantize_with_a_norm(tmp_path: Path, kind: Kind, center: int, beta: int) -> None:
    weights, weight, shift = Weights(), random(WIDTH, seed=1), random(WIDTH, seed=2)
    matrix = random(WIDTH, WIDTH, seed=3)
    w, b, m = weights.vector(weight), weights.vector(shift) if beta else -1, weights.matrix(matrix, kind)
    program = (
        f"floats 0 {WIDTH}\nacts 0 {WIDTH}\nload out=0 k={WIDTH}\nquantize x=0 norm={w} beta={b} center={center} "
        f"eps=1e-5 k={WIDTH} kind={'f32' if kind == 'f32' else 'q4'} out=0\n"
        f"linear act=0 w={m} kind={kind} n={WIDTH} k={WIDTH} out=0\nstore x=0 k={WIDTH}"
    )
    node = Node(tmp_path, program, weights, WIDTH)
    for n in ROWS:
        x = random(n, WIDTH, seed=n) + np.float32(3)
        y = layer_norm(x.astype(np.float64), 1e-5, bool(center)) * weight + (shift if beta else 0)
        found = node.run(Rows.chain(n), x)[3]
        if kind == "f32":
            close(found, y @ matrix.T.astype(np.float64))
        else:
            error = np.abs(found - rounded_rows(y) @ rounded(matrix).T)
            assert np.median(error) < 1e-5 * np.abs(found).max()
            assert error.max() < 0.02 * np.abs(found).max()


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("normed", [False, True])
def test_quantize_in_another_order(tmp_path: Path, kind: Kind, normed: bool) -> None:
    """A matrix whose inputs are permuted gives the bits of the one that reads them in order."""
    weights, matrix = Weights(), random(WIDTH, WIDTH, seed=3)
    order = np.random.default_rng(4).permutation(WIDTH)
    w, o = weights.vector(random(WIDTH, seed=1)), weights.vector(order.astype(np.float32))
    ordered, plain = weights.matrix(matrix[:, order].copy(), kind), weights.matrix(matrix[:, order].copy(), kind)
    eye = weights.matrix(np.eye(WIDTH, dtype=np.float32)[order])  # moves the numbers of a row
    form, norm = "f32" if kind == "f32" else "q4", f"norm={w} eps=1e-5" if normed else "norm=-1"
    begin = f"floats 0 {WIDTH}\nfloats 1 {WIDTH}\nacts 0 {WIDTH}\nload out=0 k={WIDTH}\n"
    end = f"linear act=0 w={{}} kind={kind} n={WIDTH} k={WIDTH} out=1\nstore x=1 k={WIDTH}"
    moved = (
        f"quantize x=0 {norm} k={WIDTH} kind=f32 out=0\n"
        f"linear act=0 w={eye} kind=f32 n={WIDTH} k={WIDTH} out=1\nquantize x=1 norm=-1 k={WIDTH} kind={form} out=0\n"
    )
    step = f"quantize x=0 {norm} order={o} k={WIDTH} kind={form} out=0\n"
    nodes = [Node(tmp_path / name, begin + program + end.format(m), weights, WIDTH)
             for name, program, m in (("moved", moved, plain), ("ordered", step, ordered))]  # fmt: skip
    for n in ROWS:
        x = random(n, WIDTH, seed=n)
        expected, found = (node.run(Rows.chain(n), x)[3] for node in nodes)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_an_order_beyond_the_row_reads_no_other_memory(tmp_path: Path) -> None:
    weights, eye = Weights(), np.eye(4, dtype=np.float32)
    order, m = weights.vector(np.array([3, -5, 1e9, np.nan], np.float32)), weights.matrix(eye)
    program = (
        f"floats 0 4\nacts 0 4\nload out=0 k=4\nquantize x=0 norm=-1 order={order} k=4 kind=f32 out=0\n"
        f"linear act=0 w={m} kind=f32 n=4 k=4 out=0\nstore x=0 k=4"
    )
    x = np.array([[1, 2, 3, 4]], np.float32)
    np.testing.assert_array_equal(Node(tmp_path, program, weights, 4).run(Rows.chain(1), x)[3], [[4, 1, 1, 1]])


def test_embed_scales_and_adds_positions(tmp_path: Path) -> None:
    weights, table, places = Weights(), random(VOCAB, WIDTH), random(POSITIONS, WIDTH, seed=1)
    for kind, w in (("r32", weights.vector(table)), ("f32", weights.matrix(table))):
        program = (
            f"floats 0 {WIDTH}\nembed w={w} kind={kind} n={VOCAB} k={WIDTH} out=0 scale=8.5 "
            f"positions={weights.vector(places)}\nstore x=0 k={WIDTH}"
        )
        node = Node(tmp_path / kind, program, weights, WIDTH)
        for n in ROWS:
            rows = Rows.chain(n, 24, token=[i * 7 % VOCAB for i in range(n)])
            np.testing.assert_array_equal(
                node.run(rows)[3], table[list(rows.token)] * np.float32(8.5) + places[24 : 24 + n]
            )
        with pytest.raises(Exception, match="position 64 is beyond the table of positions"):
            node.run(Rows.chain(1, POSITIONS))


def test_inserted_rows_stand_in_for_tokens_or_are_added(tmp_path: Path) -> None:
    weights, table, given = Weights(), random(VOCAB, WIDTH), random(3, 2 * WIDTH, seed=1)
    program = (
        f"floats 0 {WIDTH}\nembed w={weights.vector(table)} kind=r32 n={VOCAB} k={WIDTH} out=0 scale=2\n"
        f"insert x=0 k={WIDTH}\ninsert x=0 k={WIDTH} at={WIDTH} add=1\nstore x=0 k={WIDTH}"
    )
    node = Node(tmp_path, program, weights, WIDTH, inserted=2 * WIDTH)
    node.inserted = given
    found = node.run(Rows.chain(4, token=[5, -3, 7, -1]))[3]
    np.testing.assert_array_equal(found[[0, 2]], table[[5, 7]] * np.float32(2))
    np.testing.assert_array_equal(found[[1, 3]], given[[2, 0], :WIDTH] + given[[2, 0], WIDTH:])
    for rows, more, message in [
        (Rows.chain(1, token=[-4]), given, "outside the vocabulary"),
        (Rows.chain(1), given[:, :WIDTH], "expected inserted rows"),
    ]:
        node.inserted = np.ascontiguousarray(more)
        with pytest.raises(Exception, match=message):
            node.run(rows)


# -- LM heads ----------------------------------------------------------------------------------------------------------


def head_program(weights: Weights, matrix: Floats, options: str, kind: Kind = "f32") -> str:
    n, k = matrix.shape
    form = "f32" if kind == "f32" else "q4"
    w = weights.matrix(matrix, kind)
    return (
        f"floats 0 {k}\nacts 0 {k}\nload out=0 k={k}\nquantize x=0 k={k} kind={form} out=0 rows=1\n"
        f"logits act=0 w={w} kind={kind} n={n} k={k} {options}"
    )


@pytest.mark.parametrize("kind", ["f32", "q8"])
@pytest.mark.parametrize("bias, scale, cap", [(0, 1.0, 30.0), (1, 1.0, 0.0), (0, 0.0625, 0.0), (1, 2.5, 4.0)])
def test_logits(tmp_path: Path, kind: Kind, bias: int, scale: float, cap: float) -> None:
    vocab = 1003  # no whole tile at the end
    weights, matrix, shift = Weights(), random(vocab, WIDTH), random(vocab, seed=1)
    options = f"bias={weights.vector(shift) if bias else -1} scale={scale} cap={cap}"
    node = Node(tmp_path, head_program(weights, matrix, options, kind), weights, WIDTH)
    for n in ROWS:
        x = random(n, WIDTH, seed=n)
        logits = node.run(Rows.chain(n), x)[0]
        if kind == "f32":
            expected = (x.astype(np.float64) @ matrix.T + (shift if bias else 0)) * scale
            close(logits, cap * np.tanh(expected / cap) if cap else expected)
        order = np.argsort(-logits, 1, kind="stable")[:, :9]
        for top in (1, 9):
            _, ids, values, _ = node.run(Rows.chain(n), x, top=top)
            np.testing.assert_array_equal(ids, order[:, :top])
            np.testing.assert_array_equal(values, np.take_along_axis(logits, order[:, :top], 1))


def test_numbers_that_are_none_stay_so(tmp_path: Path) -> None:
    matrix = np.zeros((VOCAB, WIDTH), np.float32)
    matrix[:, 0] = np.arange(VOCAB)
    weights, shift = Weights(), np.zeros(VOCAB, np.float32)
    shift[[3, 7]] = np.nan, -np.inf
    node = Node(tmp_path, head_program(weights, matrix, f"bias={weights.vector(shift)} cap=30"), weights, WIDTH)
    x = np.eye(1, WIDTH, dtype=np.float32)
    logits = node.run(Rows.chain(1), x)[0][0]
    assert np.isnan(logits[3])
    assert logits[7] == -30
    assert np.isfinite(np.delete(logits, 3)).all()
