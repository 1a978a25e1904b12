"""Training that stops automatically, and files in the layouts of other programs."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.errors import TrainingError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import read_heads
from edgespec.export.drafters.read import read_drafter
from edgespec.export.training.options import DRAFTERS, LAYOUTS, SELF_DRAFT, TrainOptions, check_options
from tests.export.training.conftest import Train, short
from tests.support import hf
from tests.support.elsewhere import python_with, run_elsewhere
from tests.support.published import Published

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.filterwarnings("default")]


def course(*tokens: float, every: float = 30.0) -> Any:
    from edgespec.export.training.early_stopping import TrainingProgress

    found = [(every * (1 + at), each) for at, each in enumerate(tokens)]
    return TrainingProgress(found[-1][0] if found else 0.0, found)


def test_the_rate_rises_stays_and_falls_to_the_end(torch: Any) -> None:
    from edgespec.export.training.early_stopping import FALL, WARM, Schedule

    going = course()
    schedule = Schedule(10, going)
    assert schedule.rate(0) == 1 / WARM
    going.seconds = 600 * (1 - FALL) - 1
    assert (schedule.rate(WARM), schedule.falling, schedule.over) == (1.0, False, False)
    going.seconds = 600 * (1 - FALL / 2)
    assert schedule.rate(WARM) == pytest.approx(0.5)
    going.seconds = 600
    assert schedule.over
    going.seconds = 210
    schedule.settle()  # the rest takes as long as in a training of five minutes
    assert schedule.falling
    assert schedule.ends_at == pytest.approx(300)


def test_what_looks_say(torch: Any) -> None:
    """A curve that grows with the logarithm of time is extrapolated; a flat one predicts no gain."""
    from edgespec.export.training.early_stopping import curve

    growing = course(*(1 + 0.2 * math.log(30 * at) for at in range(1, 11)))
    assert growing.worth(300) == pytest.approx(0.2 * math.log(2))
    assert not growing.stalled()
    still = course(1.2, 1.5, 1.9, 1.9, 1.9, 1.89, 1.9)
    assert still.stalled()
    assert still.worth() == pytest.approx(0, abs=0.02)
    assert course(1.2, 1.3).worth() is None
    assert curve(still) == "▁▄███▇█"


@pytest.mark.parametrize(
    "read, ahead, seconds, wanted",
    [(5, 0.0, 0, True), (3, 0.3, 0, True), (3, 0.0, 0, False), (1, 0.9, 0, False), (5, 0.9, 400, False)],
)
def test_text_is_written_where_it_is_missing(
    torch: Any, read: float, ahead: float, seconds: float, wanted: bool
) -> None:
    from edgespec.export.training.early_stopping import Schedule, wants_text

    going, pool = course(1.5, 1.6), SimpleNamespace(windows=None, seconds=seconds)
    schedule = Schedule(10, going)
    assert wants_text(pool, read, going, schedule, lambda of: (1.6 + ahead, [])) == wanted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 20 ms pass whenever a training looks at its clock, however busy the machine is."""
    from edgespec.export.training import early_stopping, train

    ticks = itertools.count()
    for module in (train, early_stopping):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.02 * next(ticks)))


def test_it_ends_and_says_what_it_is_worth(train: Train, clock: None, tmp_path: Path) -> None:
    trained = train(method="eagle", steps=None, minutes=0.03, self_distill=0)
    about = trained.report["training"]
    assert about["ended"] in ("0.03 minutes are over", "acceptance has stopped rising")
    assert about["texts"] >= 24
    assert set(about["tokens_per_round"]) == {"greedy", "sampled"}
    assert all(1 <= value <= 3 for value in about["tokens_per_round"].values())
    assert about["curve"][-1][0] <= about["seconds"]
    assert not (tmp_path / "out" / ".training").exists()


def test_time_is_for_a_training_that_ends_by_itself() -> None:
    for wrong in ({"method": "medusa", "minutes": 3.0}, {"method": "eagle", "minutes": -1.0},
                  {"method": "draft", "layout": "sglang", "self_distill": 9},
                  {"method": "mtp", "layout": "sglang"}):  # fmt: skip
        with pytest.raises(TrainingError):
            check_options(TrainOptions(model="m", output=Path("o"), **wrong))
    check_options(TrainOptions(method="eagle", model="m", output=Path("o")))


# what SGLang's loader reads of an EAGLE-3 drafter, as SpecForge's exporter lists it
SGLANG = {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"}
COPIES = {"embed_tokens.weight", "lm_head.weight"}  # of the target's; SGLang's loaders of blocks leave them out
# of the archives: a cut vocabulary, and what speculators' loader ignores
LEFT_OUT = {"d2t", "t2d", "verifier_lm_head.weight"}


def expected_keys(method: str, layout: str, theirs: set[str]) -> set[str]:
    """Return the names of tensors that the other program's loader expects."""
    if method == "mtp":  # of the target's kind, which has no norms of heads
        theirs = {name for name in theirs if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    if layout == "speculators":
        return theirs
    if method == "eagle":
        return SGLANG | {name.replace("layers.0", "midlayer") for name in theirs if name.startswith("layers.0")}
    return theirs - COPIES


def finished(target: Any, folder: Path, **changes: Any) -> Path:
    """Write the files of a training that has just begun."""
    from edgespec.export.training.save import finished_files
    from edgespec.export.training.train import LEARNERS

    options = replace(short(target.source.path, folder), **changes)
    for name, write in finished_files(LEARNERS[options.method](target, options), target.source, {}, options).items():
        write(folder / name)
    return folder


@pytest.mark.parametrize(
    "method, layout",
    [(method, layout) for method in DRAFTERS if method != SELF_DRAFT for layout in (*LAYOUTS[method], None)],
    ids=str,
)
def test_files_are_in_the_layout_of_other_programs(
    target: Any, model: Path, tmp_path: Path, method: str, layout: str
) -> None:
    """The keys are those that their loaders list, and edgespec reads the same drafter back."""
    folder = finished(target, tmp_path, method=method, layout=layout)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    theirs = Published.read("eagle3_speculators" if method == "eagle" else f"{method}_speculators")
    if layout:
        assert set(tensors) == expected_keys(method, layout, set(theirs.shapes) - LEFT_OUT)
    if layout == "speculators":
        layer, known = config["transformer_layer_config"], theirs.config["transformer_layer_config"]
        assert set(config) <= set(theirs.config)
        assert method == "mtp" or set(layer) <= set(known)
        assert config["speculators_config"].keys() == theirs.config["speculators_config"].keys()
        assert layer["rope_parameters"].keys() == known["rope_parameters"].keys()
    drafter = read_drafter(folder, open_model(model, None))
    assert drafter.tokens is None
    name = "model.layers.0.mlp.up_proj.weight"
    written = next(value for key, value in tensors.items() if key.endswith(name.removeprefix("model.layers.0.")))
    np.testing.assert_array_equal(drafter.arch.source.read(name), written)
    if layout == "sglang":
        check_sglang(method, config, tensors, drafter.tapped)


def check_sglang(method: str, config: dict[str, Any], tensors: Any, tapped: tuple[int, ...]) -> None:
    """Check what SGLang's parsers of drafters' configurations read: it counts layers by their outputs."""
    if method == "eagle":
        assert tensors["t2d"].all()
        assert not tensors["d2t"].any()
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [at - 1 for at in tapped]
        return
    said = config["dflash_config"] if method == "dflash" else config
    assert said["target_layer_ids"] == [at - 1 for at in tapped]
    assert 0 <= said["mask_token_id"] < config["vocab_size"]
    assert config["architectures"] == [{"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[method]]
    if method == "dspark":
        assert (config["markov_head_type"], config["block_size"]) == ("vanilla", 7)
        assert tensors["markov_head.markov_w2.weight"].shape == (config["vocab_size"], config["markov_rank"])


@pytest.mark.nightly  # their package, in a separate environment
@pytest.mark.parametrize("kind", ["qwen3_tied", "llama_tied_gqa"])
def test_speculators_load_what_is_written(torch: Any, tmp_path: Path, kind: str) -> None:
    """Every tensor, and what is missing is a copy of the target's; of layers for multi-token prediction only Qwen's."""
    from edgespec.export.training.target import Source, Target

    python_with("speculators")
    model = hf.write_reference_checkpoint(tmp_path / "model", kind)
    target = Target(Source.open(str(model)), "no", torch.device("cpu"))
    methods = [method for method in DRAFTERS if method != "mtp" or kind == "qwen3_tied"]
    folders = [tmp_path / method for method in methods]
    for folder, method in zip(folders, methods, strict=True):
        folder.mkdir()
        finished(target, folder, method=method, layout="speculators")
    for other, missing in run_elsewhere("speculators", *folders).values():
        assert not other
        assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight", *COPIES}


@pytest.mark.parametrize("own", [False, True])
def test_heads_are_in_the_layout_of_their_authors(target: Any, tmp_path: Path, own: bool) -> None:
    """Each has an LM head, as the authors' code expects: the model's, if none was trained."""
    folder = finished(target, tmp_path, method="medusa", layout="medusa", own_lm_heads=own)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    parts = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert set(tensors) == {f"{head}.{part}" for head in range(2) for part in parts}
    heads = read_heads(folder)
    assert (heads.file.count, heads.file.own) == (2, True)
    np.testing.assert_array_equal(
        heads.tensors["medusa.1.lm_head.weight"].read(slice(None), None), tensors["1.1.weight"]
    )


class Stopped(Exception):
    """Raised to stop a training."""


def test_one_that_ends_by_itself_goes_on_where_it_was(
    model: Path, tmp_path: Path, clock: None, fresh_accelerate: None
) -> None:
    """Its looks, its steps, its clock and the texts that it wrote on the way are kept."""
    import torch
    from accelerate.state import AcceleratorState

    from edgespec.export.training.train import Trainer

    options = replace(short(model, tmp_path / "out", "dspark"), steps=None, minutes=0.03, self_distill=0)

    def stop(stage: str, done: int, of: int, detail: str) -> None:
        if stage == "train" and detail.count("step") and len(looks) == 3:
            raise Stopped
        looks.extend([detail] if stage == "train" else [])

    looks: list[str] = []
    with pytest.raises(Stopped):
        Trainer(options, stop).run()
    state = tmp_path / "out" / ".training"
    kept = torch.load(state / "checkpoint.pt", weights_only=True)
    texts = {path.name: path.read_bytes() for path in (state / "texts").iterdir()}
    assert len(kept["tokens"]) == 3
    AcceleratorState._reset_state(True)
    seen: list[set[str]] = []

    def note(stage: str, done: int, of: int, detail: str) -> None:
        if not seen and stage == "train":
            now = {path.name: path.read_bytes() for path in (state / "texts").iterdir()}
            seen.append({name for name in texts if now[name] != texts[name]})

    about = Trainer(options, note).run().report["training"]
    assert about["curve"][:3] == [[round(at, 1), round(tokens, 3)] for at, tokens in kept["tokens"]]
    assert about["steps"] > kept["step"]
    assert about["seconds"] > kept["seconds"]
    assert seen == [set()]
