"""Mixtures of experts: chosen as numpy chooses, equal bits for any rows, and the others are not read."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.quantization.k_blocks import K_BLOCKS, KName, quantize_k
from edgespec.runtimes.files.formats import FILE_KINDS, Kind
from tests.support.native_graph import Floats, Node, Rows, Weights

pytestmark = pytest.mark.usefixtures("native")

HIDDEN, INNER, EXPERTS, CHOSEN, VOCAB = 48, 64, 6, 2, 40
NEVER = 4  # the expert that no token is sent to
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 37).tolist()
WIDE = 256  # of a mixture whose down is of another type, in and out


def random(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parts() -> tuple[Floats, Floats, dict[str, Floats]]:
    """Rows of tokens [vocab, hidden], a router [experts, hidden], and the matrices of all experts."""
    table, router = random(VOCAB, HIDDEN, seed=1), random(EXPERTS, HIDDEN, seed=2)
    table[:, 0], router[NEVER] = 3.0, 0.0
    router[NEVER, 0] = -9.0
    sizes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "w": (HIDDEN, INNER)}
    matrices = {name: random(EXPERTS * n, k, seed=k + len(name)) * np.float32(1 / 8) for name, (n, k) in sizes.items()}
    return table, router, matrices


def run(
    folder: Path, kind: Kind, tokens: list[int], spoilt: int | None = None, biased: dict[str, Floats] | None = None
) -> NDArray[np.float32]:
    """Run ``tokens`` through one mixture; return the stream [n, hidden]. The matrices of expert ``spoilt`` are NaN.

    ``biased``: vectors of the router, of each product and of the weights of experts, as gpt-oss and Gemma 4 have them.
    """
    table, router, matrices = parts()
    weights = Weights()
    ids = {}
    for name, matrix in matrices.items():
        ids[name] = weights.matrix(matrix, kind)
        packed = weights.arrays[ids[name]].reshape(EXPERTS, -1)
        if spoilt is not None:
            packed[spoilt] = np.full(packed.shape[1] // 4, np.nan, np.float32).view(packed.dtype)
    given = {name: weights.vector(value) for name, value in (biased or {}).items()}
    more = {"route": "", "experts": ""} if biased is None else {
        "route": f"w={given['factors']}",
        "experts": f"fn=swiglu_oai gatebias={given['gate']} upbias={given['up']} bias={given['w']}",
    }  # fmt: skip
    lines = [
        *(f"floats {id} {width}" for id, width in enumerate((HIDDEN, EXPERTS, 2 * CHOSEN))),
        f"acts 0 {HIDDEN}", f"acts 1 {HIDDEN}",
        f"embed w={weights.vector(table)} kind=r32 n={VOCAB} k={HIDDEN} out=0",
        f"quantize x=0 norm=-1 k={HIDDEN} kind=f32 out=0",
        f"linear act=0 w={weights.matrix(router)} kind=f32 n={EXPERTS} k={HIDDEN} "
        f"bias={given.get('router', -1)} out=1 add=0",
        f"quantize x=0 norm=-1 k={HIDDEN} kind={kind} out=1",
        f"route x=1 n={EXPERTS} k={CHOSEN} out=2 add=1 scale=0.5 {more['route']}",
        f"experts act=1 x=2 gate={ids['gate']} up={ids['up']} w={ids['w']} kind={kind} n={INNER} k={HIDDEN} "
        f"times={EXPERTS} heads={CHOSEN} out=0 add=1 {more['experts']}",
        f"store x=0 k={HIDDEN}",
    ]  # fmt: skip
    node = Node(folder, "\n".join(lines), weights, HIDDEN)
    return np.asarray(node.run(Rows.chain(len(tokens), token=tokens), reach=[])[3])


def test_a_mixture_is_numpys(tmp_path: Path) -> None:
    table, router, matrices = parts()
    x = table[TOKENS].astype(np.float64)
    chance = np.exp(x @ router.T)
    chosen = np.argsort(-chance, -1, "stable")[:, :CHOSEN]
    assert NEVER not in chosen
    expected = x.copy()
    for row, experts in enumerate(chosen):
        for expert in experts:
            gate, up, down = (np.split(matrices[name], EXPERTS)[expert] for name in ("gate", "up", "w"))
            inner = gate @ x[row]
            made = down @ (inner / (1 + np.exp(-inner)) * (up @ x[row]))
            expected[row] += 0.5 * chance[row, expert] / chance[row, experts].sum() * made
    np.testing.assert_allclose(run(tmp_path, "f32", TOKENS), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_rows_have_the_same_bits_in_any_pass_and_other_experts_are_not_read(tmp_path: Path, kind: Kind) -> None:
    whole = run(tmp_path / "whole", kind, TOKENS)
    assert np.isfinite(whole).all()
    for at in (0, 7, 36):
        np.testing.assert_array_equal(run(tmp_path / str(at), kind, TOKENS[at : at + 1])[0], whole[at])
    np.testing.assert_array_equal(run(tmp_path / "part", kind, TOKENS[3:9]), whole[3:9])
    np.testing.assert_array_equal(run(tmp_path / "spoilt", kind, TOKENS, NEVER), whole)


def test_a_mixture_with_biases_is_numpys(tmp_path: Path) -> None:
    table, router, matrices = parts()
    biased = {"gate": random(EXPERTS * INNER, seed=11) * 4, "up": random(EXPERTS * INNER, seed=12) * 4,
              "w": random(EXPERTS * HIDDEN, seed=13), "router": random(EXPERTS, seed=14),
              "factors": random(EXPERTS, seed=15)}  # fmt: skip
    x = table[TOKENS].astype(np.float64)
    chance = np.exp(x @ router.T + biased["router"])
    chosen = np.argsort(-chance, -1, "stable")[:, :CHOSEN]
    expected, clamped = x.copy(), 0
    for row, experts in enumerate(chosen):
        for expert in experts:
            gate, up, down = (np.split(matrices[name], EXPERTS)[expert] for name in ("gate", "up", "w"))
            own = {name: np.split(biased[name], EXPERTS)[expert] for name in ("gate", "up", "w")}
            g, u = gate @ x[row] + own["gate"], up @ x[row] + own["up"]
            clamped += int((g > 7).sum() + (np.abs(u) > 7).sum())
            g, u = np.minimum(g, 7), np.clip(u, -7, 7)
            made = down @ (g / (1 + np.exp(-1.702 * g)) * (u + 1)) + own["w"]
            expected[row] += 0.5 * chance[row, expert] / chance[row, experts].sum() * biased["factors"][expert] * made
    assert clamped > 50
    whole = run(tmp_path / "whole", "f32", TOKENS, biased=biased)
    np.testing.assert_allclose(whole, expected, atol=1e-4 * np.abs(expected).max())
    kinds: tuple[Kind, ...] = ("f32", "q8")
    for kind in kinds:
        many = run(tmp_path / kind, kind, TOKENS, biased=biased)
        np.testing.assert_array_equal(run(tmp_path / f"{kind} 1", kind, TOKENS[7:8], biased=biased)[0], many[7])


# -- down of another type ---------------------------------------------------------------------------------------------


def stored(values: Floats, kind: str) -> tuple[NDArray[np.uint8], Floats]:
    """Rows of a matrix in a type of files, and their values."""
    if kind in ("F16", "BF16"):
        short = values.astype(np.float16 if kind == "F16" else ml_dtypes.bfloat16)
        return short.view(np.uint8), short.astype(np.float32)
    name: KName = next(name for name in K_BLOCKS if name.upper() == kind)
    return quantize_k(values, K_BLOCKS[name])


def in_types(folder: Path, inner: str, down: str, more: str = "") -> tuple[Node, dict[str, Floats], Floats, Floats]:
    """Make a mixture of WIDE numbers in these types -> its node, values, a table of tokens and a router."""
    table, router, weights = random(VOCAB, WIDE, seed=1), random(EXPERTS, WIDE, seed=2), Weights()
    ids, values = dict[str, tuple[int, int]](), dict[str, Floats]()
    for at, (name, kind) in enumerate({"gate": inner, "up": inner, "w": down}.items()):
        rows, values[name] = stored(random(EXPERTS * WIDE, WIDE, seed=20 + at) / np.float32(16), kind)
        ids[name] = weights.rows(rows, WIDE, kind)
    keys = {"gate": "gatelow", "up": "uplow", "w": "low"}
    matrices = " ".join(f"{name}={high} {keys[name]}={low}" for name, (high, low) in ids.items())
    lines = [
        *(f"floats {id} {width}" for id, width in enumerate((WIDE, EXPERTS, 2 * CHOSEN))),
        f"acts 0 {WIDE}", f"acts 1 {WIDE}",
        f"embed w={weights.vector(table)} kind=r32 n={VOCAB} k={WIDE} out=0",
        f"quantize x=0 norm=-1 k={WIDE} kind=f32 out=0",
        f"linear act=0 w={weights.matrix(router)} kind=f32 n={EXPERTS} k={WIDE} out=1",
        f"quantize x=0 norm=-1 k={WIDE} kind={FILE_KINDS[inner]} out=1",
        f"route x=1 n={EXPERTS} k={CHOSEN} out=2 add=1",
        f"experts act=1 x=2 {matrices} kind={FILE_KINDS[inner]} downkind={FILE_KINDS[down]} n={WIDE} k={WIDE} "
        f"times={EXPERTS} heads={CHOSEN} out=0 add=0 {more}",
        f"store x=0 k={WIDE}",
    ]  # fmt: skip
    return Node(folder, "\n".join(lines), weights, WIDE), values, table, router


def eight_bits(x: NDArray[np.float64]) -> NDArray[np.float64]:  # [k]
    """Round numbers as activations are: 32 together."""
    blocks = x.reshape(-1, 32)
    step = np.abs(blocks).max(1, keepdims=True) / 127
    return np.asarray(np.rint(blocks / step) * step).reshape(x.shape)


def stream(node: Node, tokens: list[int], gates: tuple[bool, ...] = ()) -> Floats:
    return np.asarray(node.run(Rows.chain(len(tokens), token=tokens), reach=[], gates=gates)[3])


def distance(found: Floats, expected: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    "inner, down", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q8_0", "Q5_K"), ("Q4_1", "Q4_K"), ("F16", "BF16")]
)
def test_down_of_another_type_is_numpys_and_rows_are_exact(tmp_path: Path, inner: str, down: str) -> None:
    node, values, table, router = in_types(tmp_path, inner, down)
    rounded = np.asarray if inner == "F16" else eight_bits
    x = table[TOKENS].astype(np.float64)
    chance = np.exp(x @ router.T - (x @ router.T).max(-1, keepdims=True))
    chosen = np.argsort(-chance, -1, "stable")[:, :CHOSEN]
    expected = np.zeros_like(x)
    for row, experts in enumerate(chosen):
        for expert in experts:
            gate, up, last = (np.split(values[name], EXPERTS)[expert] for name in ("gate", "up", "w"))
            g = gate @ rounded(x[row])
            made = last @ rounded(g / (1 + np.exp(-g)) * (up @ rounded(x[row])))
            expected[row] += chance[row, expert] / chance[row, experts].sum() * made
    whole = stream(node, TOKENS)
    assert distance(whole, expected) < 2e-3
    for count in (1, 2, 3, 4, 5, 8, 17, 30):
        for at in (0, 7):
            np.testing.assert_array_equal(stream(node, TOKENS[at : at + count]), whole[at : at + count])


@pytest.mark.parametrize("inner, down", [("Q5_K", "Q8_0"), ("Q8_0", "Q5_K")])
def test_only_the_high_plane_of_one_of_them(tmp_path: Path, inner: str, down: str) -> None:
    node, *_ = in_types(tmp_path, inner, down, "plane=0")
    whole, high = (stream(node, TOKENS, (gate,)) for gate in (True, False))
    assert 1e-3 < distance(high, whole) < 0.25
    np.testing.assert_array_equal(stream(node, TOKENS[7:8], (False,))[0], high[7])
    np.testing.assert_array_equal(stream(node, TOKENS, (True,)), whole)


@pytest.mark.parametrize("inner, down", [("F16", "Q6_K"), ("Q4_K", "F16")])
def test_types_that_multiply_other_activations_are_refused(tmp_path: Path, inner: str, down: str) -> None:
    with pytest.raises(Exception, match="expected a downkind of the same activations as kind"):
        in_types(tmp_path, inner, down)
