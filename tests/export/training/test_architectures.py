"""Trainings for models that are no Llama: other names of the last norm, capped and scaled logits, other rotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import NumpyOps, reference_logits
from edgespec.export.training.options import TrainOptions
from tests.export.training.conftest import short

NAMES = [
    "gpt2_default",
    "gemma2_caps",
    "gemma3_old",
    "granite_tied",
    "gpt_neox_parallel",
    "falcon_7b",
    "phi_half",
    "nanochat_capped",
]


@pytest.mark.parametrize(
    "name, method", [*((name, "medusa") for name in NAMES), ("gemma3_old", "draft"), ("gpt2_default", "paradecode")]
)
def test_architectures_are_trained_for(
    torch: Any, checkpoint: Callable[[str], Path], tmp_path: Path, fresh_accelerate: None, name: str, method: Any
) -> None:
    from edgespec.export.training.train import Trainer

    options: TrainOptions = replace(short(checkpoint(name), tmp_path / "out"), method=method)
    assert Trainer(options).run()
    assert list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_a_target_scores_as_the_export_does(torch: Any, checkpoint: Callable[[str], Path], name: str) -> None:
    """Hidden states after the last norm, and what the LM head makes of them, scaled and capped."""
    from edgespec.export.training.target import Source, Target

    target = Target(Source.open(str(checkpoint(name))), "no", "cpu")
    arch, tokens = open_model(checkpoint(name), None), np.random.default_rng(0).integers(2, 160, 12)
    hidden = target.hidden(torch.from_numpy(tokens)[None])
    np.testing.assert_allclose(target.logits(hidden)[0].numpy(), reference_logits(arch, tokens.tolist()), atol=1e-4)

    class Stream(NumpyOps):
        def head(self, x: Any, norm: Any, head: Any) -> Any:
            return self.norm(x, norm)

    np.testing.assert_allclose(hidden[0].numpy(), Stream(arch, tokens.tolist()).run(arch.trace())[0], atol=1e-4)
    (exit_,) = target.exits(torch.from_numpy(tokens)[None], [arch.facts.layers - 1])[1]
    assert exit_.shape == hidden.shape
