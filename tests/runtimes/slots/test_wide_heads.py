"""Stock operators: rows have plain decoding's bits for heads of any size, at any depth, in passes of any length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.wide import LONGEST, Depths, crossing, stock_model, walk

# sums over heads up to 128 are one piece; those of wider ones are cut where the length of the text says
SIZES = (16, 64, 128, 136, 192, 256, 320, 512)
POWERS = [1 << at for at in range(4, LONGEST.bit_length())]
FEW, ALL = (2, 5, 17, 32), range(2, 33)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("head_dim", SIZES)
def test_rows_at_every_depth_equal_plain_decoding(tmp_path: Path, head_dim: int, threads: int) -> None:
    depths = Depths(stock_model(tmp_path, head_dim, "fp32", threads))
    passes = walk(400) + [one for at in POWERS for one in crossing(at, FEW if at <= 1024 else FEW[-1:])]
    assert depths.differing(passes) == []


def test_so_do_they_where_activations_are_quantized(tmp_path: Path) -> None:
    depths = Depths(stock_model(tmp_path, 256, "int4", 1), 512)
    assert depths.differing(walk(512)) == []


def test_a_context_shorter_than_what_wide_heads_need(tmp_path: Path) -> None:
    model = stock_model(tmp_path, 256, "fp32", 1, positions=8)
    assert Depths(model, 8).differing([(0, 2), (3, 5), (7, 1), (0, 8)]) == []


@pytest.mark.stress
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [*range(16, 513, 16), 24, 40, 72, 104, 136, 200, 312, 456])
def test_every_head_size_every_power_of_two_every_number_of_rows(tmp_path: Path, head_dim: int, threads: int) -> None:
    for form in ("fp32", "int4"):
        depths = Depths(stock_model(tmp_path, head_dim, form, threads))
        assert depths.differing(walk(2048) + [one for at in POWERS for one in crossing(at, ALL)]) == [], form
