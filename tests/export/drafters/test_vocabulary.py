"""A drafter's LM head is cut to other tokens, and extended by tokens that it could not draft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import CUT
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from edgespec.export.source.source import resolve
from tests.conftest import TARGET
from tests.support.eagle import write_random

CUT_TO = [*range(0, 400, 2), 901]


@pytest.mark.parametrize("cut", [True, False])
def test_rows_are_its_own_or_mapped_ones(tmp_path: Path, cut: bool) -> None:
    """Where its own rows are a linear map of the model's, those of new tokens are the same map of the model's."""
    target = open_model(resolve(TARGET), 96)
    had = np.array(CUT_TO if cut else range(1024))
    folder = write_random(
        tmp_path / "drafter", target, {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, CUT_TO if cut else None
    )
    theirs = target.source.read(target.head.weight)  # [V, hidden]
    turned = np.linalg.qr(np.random.default_rng(2).standard_normal((128, 128)))[0].astype(np.float32)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.ascontiguousarray(theirs[had] @ turned)
    save_file(tensors, folder / "model.safetensors")
    wanted = np.array([0, 3, 7, 8, 901, 1000])
    drafter = with_tokens(read_drafter(folder, target), target, wanted)
    assert drafter.tokens is not None
    assert drafter.tokens.tolist() == wanted.tolist()
    found, expected = drafter.arch.source.read(CUT), theirs[wanted] @ turned
    new = ~np.isin(wanted, had)
    np.testing.assert_array_equal(found[~new], tensors["lm_head.weight"][np.isin(had, wanted)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * float(np.abs(expected).max()))
    assert new.any() == cut == bool(drafter.notes)
