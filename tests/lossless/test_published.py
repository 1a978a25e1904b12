"""Drafters as their authors' code writes them leave the text as it is, however badly they guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.support import hf
from tests.support.published import REFERENCES, Published, write_target

PROMPT = "The harbour lights came on"


@pytest.mark.parametrize("name", sorted(path.stem for path in REFERENCES.glob("*.npz")))
def test_texts_are_plain_decodings(native: None, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, coupled and by rejection, where the seed gives the same text again."""
    monkeypatch.setattr("edgespec.export.measuring.drafters.LEAST", 0.0)  # their weights are random
    target = write_target(tmp_path / "model")
    drafter = Published.read(name).write(tmp_path / "drafter", target)
    made = ExportOptions(str(target), tmp_path / "bundle", ["medusa"], "int8", threads=1, heads=[str(drafter)])
    if not name.startswith("medusa"):
        kind = read_drafter(drafter, open_model(target, None)).method
        made = replace(made, methods=[kind], heads=[], drafter=str(drafter))
    (method,) = made.methods
    export_model(made, golden=False)
    greedy = Settings(max_new_tokens=24, ignore_eos=True, fallback=False, adaptive=False, gamma=4)
    drawn = greedy.changed(temperature=0.7, seed=3, acceptance="coupled")
    rejected = greedy.changed(temperature=1.0, seed=3)
    with load(made.output, threads=1) as engine:
        for settings in (greedy, drawn):
            found = engine.generate(PROMPT, settings, method=method)
            assert found.tokens == engine.generate(PROMPT, settings, method="ar").tokens
            assert found.stats.drafted > 8
            assert found.stats.dropped_reason is None
            assert found.lossless
        first, again = (engine.generate(PROMPT, rejected, method=method) for _ in range(2))
        assert first.tokens == again.tokens
        assert first.stats.drafted > 8
        assert first.lossless


def test_heads_that_are_stored_with_their_model_and_early_exits(native: None, tmp_path: Path) -> None:
    """Medusa-2's checkpoint is model and heads; LayerSkip's are models whose upper layers a draft leaves out."""
    model, random = hf.write_reference_checkpoint(tmp_path / "model", "llama_tied_gqa"), np.random.default_rng(0)
    tensors, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text("utf-8"))
    hidden = config["hidden_size"]
    for head in range(3):
        block = {"linear.weight": random.standard_normal((hidden, hidden)), "linear.bias": np.zeros(hidden)}
        tensors |= {f"medusa_head.{head}.0.{name}": value.astype(np.float32) for name, value in block.items()}
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3, "medusa_num_layers": 1}), "utf-8")
    (tmp_path / "exit.json").write_text('{"attention": [1], "mlp": [1]}', "utf-8")
    made = ExportOptions(str(model), tmp_path / "bundle", ["medusa", "self-spec"], "int8", threads=1,
                         heads=[str(model)], skip_set=tmp_path / "exit.json")  # fmt: skip
    export_model(made, golden=False)
    with load(made.output, threads=1) as engine:
        texts = [engine.generate(PROMPT, method=each, max_new_tokens=24) for each in ("ar", "medusa", "self-spec")]
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens
    assert min(text.stats.drafted for text in texts[1:]) > 0
