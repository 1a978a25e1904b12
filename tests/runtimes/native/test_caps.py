"""Windows and caps of native attention in every format of keys, read off the weights that it gives to tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import KeyFormat
from edgespec.runtimes.files.kv import KvFormat
from tests.runtimes.native.test_windows import attention, width_of
from tests.support.native_graph import Floats, Rows

pytestmark = pytest.mark.usefixtures("native")

TOKENS = DIMENSIONS = 160  # values are the unit vectors: what attention gives is the weights themselves
SHAPE = (2, 1, DIMENSIONS)
KEYS: tuple[KeyFormat, ...] = ("f32", "f16", "int8", "int4", "nomad1", "nomad2")
FORMATS = {name: KvFormat(name, "f32") for name in KEYS} | {
    "int8 recent": KvFormat("int8", "f32", window=21, sinks=3),
    "int4 recent": KvFormat("int4", "f32", window=64, sinks=4),
    "nomad2 recent": KvFormat("nomad2", "f32", window=128, sinks=4),
    "f16 drafts by nomad1": KvFormat("f16", "f32", codes="nomad1", sinks=4, draft_window=32),
    "int8 drafts by int4": KvFormat("int8", "f32", codes="int4"),
}


def tables_of(name: KeyFormat | None) -> Floats:
    """Made-up tables of one head; keys are about normal."""
    random = np.random.default_rng(7)
    if name == "int4":
        return np.stack([np.full(DIMENSIONS, 0.3), np.full(DIMENSIONS, -2.2)]).astype(np.float32)
    if name in ("nomad1", "nomad2"):
        return random.standard_normal(DIMENSIONS * 16).astype(np.float32)
    return np.zeros(0, np.float32)


Weighing = Callable[..., NDArray[np.float64]]


@pytest.fixture(params=FORMATS)
def weighing(request: pytest.FixtureRequest, tmp_path: Path) -> Weighing:
    """(window, cap) -> how the last rows weigh all tokens, [rows, heads, tokens]."""
    kv = FORMATS[request.param]
    tables = np.concatenate([tables_of(kv.keys).reshape(-1), tables_of(kv.codes).reshape(-1)])
    x = np.random.default_rng(3).standard_normal((TOKENS, width_of(*SHAPE))).astype(np.float32)
    x[:, : 2 * DIMENSIONS] *= 2 * DIMENSIONS**-0.5  # scores have a standard deviation of 2
    x[:, -DIMENSIONS:] = np.eye(DIMENSIONS)

    def run(window: int = 0, cap: float = 0) -> NDArray[np.float64]:
        node = attention(tmp_path, window=window, cap=cap, shape=SHAPE, kv=kv, tables=tables, tokens=256)
        for at in range(0, TOKENS - 20, 70):
            node.run(Rows.chain(70, at), x[at : at + 70])
        last = node.run(Rows.chain(20, TOKENS - 20), x[-20:], read_codes=kv.codes is not None)[0]
        return last.reshape(20, 2, DIMENSIONS).astype(np.float64)

    return run


@pytest.mark.parametrize("window", [1, 10, 64, 150])
def test_windows_in_every_format(weighing: Weighing, window: int) -> None:
    whole, found = weighing(), weighing(window)
    for row, position in enumerate(range(TOKENS - 20, TOKENS)):
        seen = np.zeros(TOKENS, bool)
        seen[max(0, position - window + 1) : position + 1] = True
        assert not found[row][:, ~seen].any()
        expected = whole[row] * seen
        np.testing.assert_allclose(found[row], expected / expected.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cap", [1.5, 30.0])
def test_caps_in_every_format(weighing: Weighing, cap: float) -> None:
    """The weights determine all scores up to a common constant: one number that must fit all tokens."""
    whole, capped = weighing(), weighing(cap=cap)
    for row in range(0, 20, 4):
        n = TOKENS - 20 + row + 1
        for head in range(2):
            d, c = (np.log(weights[row, head, :n]) for weights in (whole, capped))
            d, c = d - d[0], c - c[0]

            def misfit(common: float, d: NDArray[np.float64] = d, c: NDArray[np.float64] = c) -> float:
                fitted = cap * (np.tanh((common + d) / cap) - np.tanh(common / cap))
                return float(np.abs(fitted - c).max())

            common, step = 0.0, 8.0
            while step > 1e-7:  # finer and finer about the best so far
                tried = common + step * np.linspace(-1, 1, 41)
                common, step = float(min(tried, key=misfit)), step / 8
            assert misfit(common) < 2e-5
            assert np.abs(d - c).max() > (1 if cap < 2 else 1e-3)


def test_drafts_of_a_window_and_a_cap_change_no_other_row(tmp_path: Path) -> None:
    """Codes in addition to float16 keys: passes that do not read them have the bits of a cache without them."""
    kv = FORMATS["f16 drafts by nomad1"]
    x = np.random.default_rng(4).standard_normal((TOKENS, width_of(*SHAPE))).astype(np.float32)
    both = attention(tmp_path, window=50, cap=4, shape=SHAPE, kv=kv, tables=tables_of("nomad1"), tokens=256)
    plain = attention(tmp_path, window=50, cap=4, shape=SHAPE, kv=replace(kv, codes=None, draft_window=0), tokens=256)
    for at in range(0, TOKENS, 20):
        rows, part = Rows.chain(20, at), x[at : at + 20]
        drafted = both.run(rows, part, read_codes=True)[0]
        exact = both.run(rows, part)[0]
        np.testing.assert_array_equal(exact, plain.run(rows, part)[0])
        if at >= 40:  # before, the newest keys are all there are, and those are read exactly
            assert not np.array_equal(drafted, exact)
