"""Trainings from beginning to end: files, results, the same twice, interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine.loading import load
from edgespec.errors import ExportError, TrainingError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import check_heads, read_heads
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import vocabularies_differ
from edgespec.export.training.state import DRAFT_REPORT, FOLDER
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.text.codec import TextCodec
from tests.export.training.conftest import Train
from tests.support.drawn import check_drawn

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.filterwarnings("default")]

LINES = Path(__file__).parents[2] / "data" / "restore.txt"
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "own": {"method": "medusa", "own_lm_heads": True},
    "blockwise": {"method": "blockwise"},
    "inner": {"method": "blockwise", "hidden_size": 40},
    "paradecode": {"method": "paradecode"},
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_heads(train: Train, model: Path, tmp_path: Path, name: str, loss: str) -> None:
    trained = train(**HEADS[name], loss=loss)
    folder = tmp_path / "out"
    assert set(files(folder)) == {"edgespec_heads.json", "heads.safetensors"}
    heads = read_heads(folder)
    check_heads(heads, open_model(model, None), TextCodec(model), folder)
    file = heads.file
    assert set(file.ranks) == {"sampled", "greedy"}
    assert len(file.ranks["sampled"]) == file.count == (1 if name == "paradecode" else 2)
    for ranks in file.ranks["greedy"]:
        assert len(ranks) == 10
        assert 0 <= sum(ranks) <= 1 + 1e-3  # each share is rounded
    assert file.training["steps"] == 6
    assert len(trained.history.losses) == 6
    for tensor in heads.tensors.values():
        value = tensor.read(slice(None), None)
        assert (value == value.astype(np.float16)).all()


def test_the_loss_falls_and_guesses_get_better(train: Train) -> None:
    trained = train(steps=60, lr=2e-2, loss="kl", self_distill=32, greedy_fraction=0.0)
    losses = trained.history.losses
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    assert sorted(trained.history.accuracy) == [12, 24, 36, 48]


@pytest.mark.parametrize("name", [*HEADS, "draft"])
def test_twice_the_same_bits(train: Train, tmp_path: Path, name: str) -> None:
    changes = HEADS.get(name, {"method": "draft"})
    train(**changes)
    train(**changes, output=tmp_path / "again")
    assert files(tmp_path / "out") == files(tmp_path / "again")
    train(**changes, output=tmp_path / "other", seed=1)
    assert files(tmp_path / "other") != files(tmp_path / "again")


def test_a_draft(train: Train, model: Path, tmp_path: Path) -> None:
    trained = train(method="draft", steps=20)
    folder = tmp_path / "out"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files(folder)) == names | {DRAFT_REPORT}
    draft, target = open_model(folder, None), open_model(model, None)
    assert vocabularies_differ(target.facts, draft.facts, TextCodec(model), TextCodec(folder)) is None
    assert (draft.facts.hidden, draft.facts.layers, draft.facts.tied) == (32, 2, True)
    report = json.loads((folder / DRAFT_REPORT).read_text("utf-8"))
    assert report["acceptance"] == trained.report["acceptance"]
    for kind in ("sampled", "greedy"):
        assert 0 < report["acceptance"][kind]["overlap"] < 1
        assert 0 <= report["acceptance"][kind]["agreement"] <= 1


def test_what_is_said_of_a_draft_is_what_transformers_computes(
    train: Train, model: Path, tmp_path: Path, torch: Any
) -> None:
    from transformers import AutoModelForCausalLM

    # as wide as the target: its embedding is taken over
    train(method="draft", draft_hidden=64, loss="lk", ce_share=0.5)
    draft, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert draft.config.vocab_size == 160
    assert draft(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("changes", [{"method": "blockwise"}, {"data": (LINES,), "self_distill": 0}])
def test_heads_of_an_encoder_decoder(train: Train, tmp_path: Path, changes: dict[str, Any]) -> None:
    trained = train(model="builtin:restore", steps=20, lr=2e-2, **changes)
    assert np.mean(trained.history.losses[-3:]) < np.mean(trained.history.losses[:3]) - 5
    assert trained.windows == (13 if "data" in changes else 12)
    heads, folder = read_heads(tmp_path / "out"), resolve("builtin:restore")
    check_heads(heads, open_model(folder, None), TextCodec(folder), folder)
    assert set(heads.file.ranks) == {"sampled", "greedy"}
    form: Format = "int4" if "data" in changes else "int8"
    made = ExportOptions("builtin:restore", tmp_path / "b", [heads.file.kind], form, heads=[str(tmp_path / "out")],
                         threads=1, quick=True)  # fmt: skip
    export_model(made, golden=False)
    sources, accepted = [line.lower() for line in LINES.read_text("utf-8").splitlines()[:6]], 0
    with load(tmp_path / "b", threads=1) as engine:
        for source in sources:
            plainly = engine.generate(source, method="ar")
            found = engine.generate(source, method=heads.file.kind, adaptive=False, fallback=False)
            assert (found.tokens, found.text, found.finish) == (plainly.tokens, plainly.text, plainly.finish)
            assert found.exact
            accepted += found.stats.accepted
        together = engine.generate_batch(sources, method=heads.file.kind, batch=3)
        assert [one.tokens for one in together] == [engine.generate(one, method="ar").tokens for one in sources]
        check_drawn(engine, sources[1], heads.file.kind, length=4, least=5)
    assert accepted > 0
    with pytest.raises(TrainingError, match="the data has 16 different sources"):
        train(model="builtin:restore", data=(LINES,), held_out=16, output=tmp_path / "few")


def test_text_of_files(train: Train, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The harbour lights came on one after another while the ferry was still far out. " * 30, "utf-8")
    trained = train(data=(text,), self_distill=0)
    assert set(trained.report["ranks"]) == {"sampled", "greedy", "text"}
    assert read_heads(tmp_path / "out").file.training["data"] == ["text.txt"]
    both = train(data=(text,), output=tmp_path / "both")
    assert both.windows > trained.windows
    text.write_text("too short", "utf-8")
    with pytest.raises(TrainingError, match="at least two windows of 24 tokens"):
        train(data=(text,), output=tmp_path / "short")


def test_heads_compute_what_the_manifest_says(model: Path, torch: Any) -> None:
    """The arithmetic of HeadGroup, from the saved tensors, in numpy."""
    from edgespec.export.training.learners import Blockwise, EarlyExitHeads, Medusa
    from edgespec.export.training.options import TrainOptions
    from edgespec.export.training.target import Source, Target

    target = Target(Source.open(str(model)), "no", torch.device("cpu"))
    tokens = torch.arange(2, 14)[None]
    hidden = target.hidden(tokens)
    options = TrainOptions("medusa", "", Path(), heads=2, own_lm_heads=True, hidden_size=24, exits=(1,))
    heads = Medusa(target, options), Blockwise(target, options)
    with torch.no_grad():
        for learner in heads:
            assert all(torch.equal(rows, hidden) for rows in learner.rows(hidden))  # next-token prediction at first
            for value in learner.parameters():
                value.normal_(std=0.3)
    h = hidden[0].numpy()
    saved = {name: value.detach().numpy() for learner in heads for name, value in learner.tensors().items()}

    def silu(x: Any) -> Any:
        return x / (1 + np.exp(-x))

    inner = silu(h @ saved["blockwise.inner.weight"].T + saved["blockwise.inner.bias"])
    outer = inner @ saved["blockwise.outer.weight"].T + saved["blockwise.outer.bias"]
    for i in range(2):
        ours = [learner.logits(i, learner.rows(hidden)[i])[0].detach().numpy() for learner in heads]
        y = h + silu(h @ saved[f"medusa.{i}.weight"].T + saved[f"medusa.{i}.bias"])
        np.testing.assert_allclose(ours[0], y @ saved[f"medusa.{i}.lm_head.weight"].T, atol=1e-3)
        y = h + outer[:, 64 * i : 64 * (i + 1)]
        np.testing.assert_allclose(ours[1], y @ target.lm_head.numpy().T, atol=1e-3)
    exits = EarlyExitHeads(target, options)
    (guessed,) = (logits for logits, *_ in exits.guesses(tokens, torch.tensor([12])))
    residual = target.model.base_model(tokens, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(guessed, target.logits(target.norm(residual)))


@pytest.mark.parametrize(
    "name, stop", [("medusa", 0), ("medusa", 1), ("medusa", 4), ("paradecode", 5), ("blockwise", 2), ("draft", 5)]
)
def test_an_interrupted_training_goes_on(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stop: int
) -> None:
    from edgespec.export.training import loop

    changes = {"method": name}
    train(**changes, output=tmp_path / "whole")
    real, seen, limit = loop.one_step, list[int](), [stop]

    def one_step(*arguments: Any) -> float:
        if len(seen) == limit[0]:
            raise KeyboardInterrupt
        seen.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(loop, "one_step", one_step)
    with pytest.raises(KeyboardInterrupt):
        train(**changes)
    assert set(files_or_folders(tmp_path / "out")) == {FOLDER}
    with pytest.raises(TrainingError, match="seed was 0, is 1"):
        train(**changes, seed=1)
    limit[0] = -1
    monkeypatch.setattr("edgespec.export.training.train.write_texts", None)  # nothing is written again
    train(**changes)
    assert seen == [*range(stop), *range(stop - stop % 2, 6)]  # from the last checkpoint
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def files_or_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_nan_ends_the_training_and_keeps_the_checkpoint(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: Any, what: str
) -> None:
    from edgespec.export.training.learners import Medusa

    real, calls = Medusa.forward, []

    def forward(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        loss = real(self, *arguments)
        if len(calls) != 4:
            return loss
        # the square root of 0: a good value with a bad gradient
        return loss * float("nan") if what == "loss" else loss + (self.weight * 0).sum().sqrt() * 0

    monkeypatch.setattr(Medusa, "forward", forward)
    with pytest.raises(TrainingError, match=f"the {what} of step 4 (.|\n)*last checkpoint is kept(.|\n)*--lr"):
        train()
    kept = torch.load(tmp_path / "out" / FOLDER / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 2
    assert all(value.isfinite().all() for value in kept["learner"].values())
    monkeypatch.setattr(Medusa, "forward", real)
    train()
    assert read_heads(tmp_path / "out").file.training["steps"] == 6


def test_recomputation_changes_nothing_that_matters(train: Train, tmp_path: Path) -> None:
    for name in ("own", "draft"):
        changes = HEADS.get(name, {"method": "draft"})
        one = train(**changes, output=tmp_path / name)
        two = train(**changes, output=tmp_path / f"{name}-again", gradient_checkpointing=True)
        np.testing.assert_allclose(one.history.losses, two.history.losses, rtol=1e-4)


def test_bfloat16(train: Train) -> None:
    assert np.isfinite(train(precision="bf16").history.losses).all()


def test_float16_needs_a_gpu(train: Train, torch: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TrainingError, match=r"--precision fp16(.|\n)*hint: train with --precision no or bf16"):
        train(precision="fp16")


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"model": "builtin:hamlet"}, ExportError, "no embedded model 'hamlet'"),
        ({"model": "builtin:shakespeare-medusa"}, ExportError, r"has no config\.json"),
        ({"model": "builtin:restore", "method": "draft"}, TrainingError, "is an encoder-decoder(.|\n)*another size"),
        ({"model": "builtin:spoken-digits"}, TrainingError, "expected a model that reads text"),
        ({"method": "paradecode", "exits": (2,)}, TrainingError, "numbers from 1 to 1"),
        ({"length": 600}, TrainingError, "--length: expected 6 to 512 tokens"),
        ({"method": "draft", "draft_hidden": 33}, TrainingError, "--draft-hidden: expected an even number, got 33"),
    ],
)
def test_bad_input(train: Train, tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        train(**changes)
    assert not (tmp_path / "out").exists()


def test_layers_that_are_shared_compute_the_same(model: Path, target: Any, torch: Any) -> None:
    from torch.distributed.tensor import DTensor

    from edgespec.export.training.target import Source, Target

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shared = Target(Source.open(str(model)), "no", torch.device("cpu"), sharded=True)
        tokens = torch.tensor([[5, 6]])
        assert torch.equal(shared.tapped(tokens, (0, 1)), target.tapped(tokens, (0, 1)))
        kinds = {type(value) for name, value in shared.model.named_parameters() if ".layers." in name}
        assert kinds == {DTensor}
    finally:
        torch.distributed.destroy_process_group()
