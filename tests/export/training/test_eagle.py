"""Training of EAGLE-3: losses and measures against the arithmetic of published drafters, one chain at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.export.training.options import HEAD_DECAY
from tests.export.training.test_losses import (
    TOKENS,
    loss_of,
    mean_loss,
    numpy,
    shares_by_rank,
    target,
    windows,
)
from tests.support.eagle import Reference

pytestmark = pytest.mark.usefixtures("torch")

__all__ = ["target"]

TAPPED, STEPS = (1, 2), 3


@pytest.fixture
def learner(target: Any, torch: Any) -> Any:
    from edgespec.export.training.drafters import Eagle

    made = Eagle(target, "kl", False, TAPPED, STEPS, 48, seed=4)
    with torch.no_grad():
        for norm in made.norms.values():
            norm.normal_(1.0, 0.3)
    return made


def chains(learner: Any, folder: Path, torch: Any, tokens: Any) -> Any:
    """Logits [B, N, steps, vocab]: row i has seen tokens up to i + 1; what it is fed after that is the text."""
    save_file({name: value.detach().numpy() for name, value in learner.tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(learner.described()), "utf-8")
    drafter, model = Reference(folder), learner.target.model
    states = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    embedded, taps = numpy(states[0]), np.concatenate([numpy(states[at]) for at in TAPPED], -1)
    count = tokens.shape[1] - 1 - STEPS
    return np.array(
        [
            [drafter.logits(text[: at + 2], tap[: at + 1], text[at + 2 : at + 1 + STEPS]) for at in range(count)]
            for text, tap in zip(embedded, taps, strict=True)
        ]
    )


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_chain_learns_what_comes_after_what_it_is_fed(
    learner: Any, target: Any, torch: Any, tmp_path: Path, loss: Any
) -> None:
    learner.loss = loss
    logits, model = chains(learner, tmp_path, torch, TOKENS), numpy(target.model(torch.from_numpy(TOKENS)).logits)
    expected = 0.0
    for step in range(STEPS):
        expected += HEAD_DECAY**step * mean_loss(logits[:, :, step], model, step, loss)
    assert loss_of(learner, torch) == pytest.approx(expected, rel=1e-4)


def test_right_guesses_of_a_chain(learner: Any, torch: Any, tmp_path: Path) -> None:
    from edgespec.export.training.save import rank_shares

    texts = windows()
    logits = chains(learner, tmp_path, torch, texts.tokens)
    rows, expected = logits.shape[1], []
    for step in range(STEPS):
        wanted = np.roll(texts.tokens, -step - 2, 1)[:, :rows]
        expected.append(shares_by_rank(logits[:, :, step], wanted, texts, 2, step + 2))
    assert sum(map(sum, expected)) > 0
    assert rank_shares(learner, texts, 2) == expected
