"""Train an adapter with which a model drafts for itself: its files, its arithmetic, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.decoding.target import Pass
from edgespec.engine.loading import load
from edgespec.errors import TrainingError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.draft_adapter import DESCRIPTION, DraftAdapter
from edgespec.runtimes.files.lora import read_pairs
from tests.export.training.conftest import Train
from tests.export.training.test_train import files
from tests.support import hf

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.filterwarnings("default")]
METHOD = "selfdraft"
NAMES = {"adapter_config.json", "adapter_model.safetensors", DESCRIPTION}


def test_an_adapter_and_its_description(train: Train, tmp_path: Path) -> None:
    trained = train(method=METHOD, rank=3)
    assert set(files(tmp_path / "out")) == NAMES
    found = DraftAdapter.read(tmp_path / "out")
    assert (found.block, found.rank, len(found.acceptance)) == (2, 3, 2)
    assert found.training["steps"] == len(trained.history.losses) == 6
    assert set(trained.report["ranks"]) == {"sampled", "greedy"}
    pairs = list(read_pairs(tmp_path / "out"))
    assert len(pairs) == 2 * 7
    assert {pair.a.shape[0] for pair in pairs} == {3}
    assert {pair.scale for pair in pairs} == {2.0}
    assert any(pair.b.any() for pair in pairs)


def test_the_loss_falls(train: Train) -> None:
    losses = train(method=METHOD, steps=40, lr=2e-2, self_distill=32).history.losses
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


@pytest.mark.parametrize("changes", [{}, {"loss": "ce"}, {"loss": "d-pace"}, {"layout": "sglang"}])
def test_twice_the_same_bits(train: Train, tmp_path: Path, changes: dict[str, Any]) -> None:
    for name in ("one", "two"):
        train(method=METHOD, output=tmp_path / name, **changes)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (DraftAdapter.read(tmp_path / "one").mask is None) == ("layout" in changes)


def test_an_interrupted_training_goes_on(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.export.training import loop

    train(method=METHOD, output=tmp_path / "whole")
    real, seen = loop.one_step, list[int]()

    def one_step(*arguments: Any) -> float:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(loop, "one_step", one_step)
    with pytest.raises(KeyboardInterrupt):
        train(method=METHOD)
    monkeypatch.setattr(loop, "one_step", real)
    train(method=METHOD)
    for name in NAMES - {DESCRIPTION}:
        assert files(tmp_path / "out")[name] == files(tmp_path / "whole")[name]


@pytest.mark.usefixtures("native")
def test_the_engine_computes_the_mask_rows_of_training(train: Train, model: Path, tmp_path: Path, torch: Any) -> None:
    from edgespec.export.training.options import TrainOptions
    from edgespec.export.training.self_draft import SelfDraft
    from edgespec.export.training.target import Source, Target

    train(method=METHOD, steps=12, lr=5e-2)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    target = Target(Source.open(str(model)), "no", torch.device("cpu"))
    learner = SelfDraft(target, TrainOptions(METHOD, "", Path(), heads=2))
    with torch.no_grad():
        for name, value in learner.tensors().items():
            value.copy_(torch.from_numpy(saved[name].astype(np.float32)))
        tokens = torch.arange(5, 25)[None]
        rows = learner._rows(tokens, torch.tensor([[7, 19]]))[1]
        expected = target.scored(rows)[0].numpy()  # [2, 2, vocab]
    export_model(ExportOptions(str(model), tmp_path / "b", [], "fp32", threads=1, operators="native"), golden=False)
    with load(tmp_path / "b", threads=1, draft_adapter=tmp_path / "out") as engine:
        drafter: Any = engine.new_session().drafter(engine.choose("uno"), engine.defaults.drafts)
        for place, wanted in zip((7, 19), expected, strict=True):
            ids = tokens[0, : place + 1].tolist()
            drafter.target.follow([])
            drafter.target.prefill(ids[:-1])
            rows = np.array([ids[-1], *drafter.masks])
            found = drafter.target.run(Pass(rows, draft=True, adapters=np.array([0, 1, 1]))).logits
            np.testing.assert_allclose(found[1:], wanted, atol=2e-3 * np.abs(wanted).max())
            plain = drafter.target.run(Pass(rows, draft=True)).logits
            assert np.abs(plain[1:] - wanted).max() > 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["mistral_window", "gemma2_caps"])
def test_models_with_windows_are_refused(tmp_path: Path, train: Train, name: str) -> None:
    source = hf.write_reference_checkpoint(tmp_path / "model", name)
    with pytest.raises(TrainingError, match="attends to the whole text"):
        train(method=METHOD, model=str(source))


def test_more_mask_rows_than_a_block_has_are_refused(train: Train) -> None:
    with pytest.raises(TrainingError, match="--heads 17: expected at most 16"):
        train(method=METHOD, heads=17)
