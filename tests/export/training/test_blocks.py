"""Drafters of blocks and layers for multi-token prediction learn what they guess with when they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.draft_cache import draft_cache_of
from edgespec.drafters.sampling_drafts import Draw
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from tests.export.training.conftest import short
from tests.support import hf
from tests.support.any_drafter import Pair

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.filterwarnings("default")]
TOKENS = np.random.default_rng(3).integers(3, 150, 24)


@pytest.mark.parametrize("model_kind", ["llama_tied_gqa", "qwen3_tied"])
@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp"])
def test_a_guess_in_training_is_a_guess_in_use(
    native: None, torch: Any, tmp_path: Path, method: Any, model_kind: str
) -> None:
    """The layer's arithmetic, its places in the text and what its rows see, in float32, in every layout."""
    from edgespec.export.training.layouts import laid_out
    from edgespec.export.training.options import LAYOUTS
    from edgespec.export.training.target import Source, Target
    from edgespec.export.training.train import LEARNERS

    model = hf.write_reference_checkpoint(tmp_path / "model", model_kind)
    options = replace(short(model, tmp_path / "out"), method=method, heads=4)
    target = Target(Source.open(str(model)), "no", torch.device("cpu"))
    learner = LEARNERS[options.method](target, options)
    with torch.no_grad():
        for value in learner.parameters():
            value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    tensors = {name: value.detach().numpy() for name, value in learner.tensors().items()}
    for layout in (None, *LAYOUTS[method]):
        folder = tmp_path / str(layout)
        folder.mkdir()
        found, config = laid_out(
            replace(options, layout=layout), dict(tensors), dict(learner.described()), target.source
        )
        save_file({name: np.ascontiguousarray(value) for name, value in found.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        arch = open_model(model, None)
        pair = Pair(folder, arch, read_drafter(folder, arch))
        recorder = pair.recorder()
        cache, most = draft_cache_of(recorder.target, recorder.slot), learner.steps
        for count in (3, 9, 16):
            text = TOKENS[:count].tolist()
            taps = streams(target, torch.tensor([text]), pair.tapped)
            cache.crop(0)
            if rows := count - 1 - cache.deferred_rows:
                cache.append(text[1 : 1 + rows], taps[:rows])
            made = cache.draw(taps[rows : count - 1], Draw(text, 160, SamplingParams(temperature=0), Noise(0)), most)
            guesses = made.tokens.tolist()
            tokens = torch.tensor([[*text, *guesses, *[3] * 12]])
            learnt = learner.guesses(tokens, torch.tensor([tokens.shape[1]]))
            row = count - 1 - (method == "mtp")
            expected = [int(logits[0, row].argmax()) for logits, _, _ in learnt]
            assert guesses == expected
            assert len(guesses) == most


def streams(target: Any, tokens: Any, tapped: Sequence[int]) -> Any:
    """Return the residual stream at each boundary, before any norm, [T, taps * hidden]."""
    found: list[Any] = []
    hook = target.norm.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    *states, _ = target.tapped(tokens, tapped)
    hook.remove()
    last = target.facts.layers
    return np.concatenate([found[0] if at == last else state for at, state in zip(tapped, states, strict=True)], -1)[0]
