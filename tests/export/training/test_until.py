"""A training of eagle that ends by itself, and its files in the layouts of other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.errors import TrainingError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from edgespec.export.training.options import TrainOptions, check_options
from tests.export.training.conftest import Train
from tests.support.published import Published

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.filterwarnings("default")]


def course(*tokens: float, every: float = 30.0) -> Any:
    from edgespec.export.training.until import Course

    found = [(every * (1 + at), each) for at, each in enumerate(tokens)]
    return Course(found[-1][0] if found else 0.0, found)


def test_the_rate_rises_stays_and_falls_to_the_end(torch: Any) -> None:
    from edgespec.export.training.until import FALL, WARM, Schedule

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
    """Tokens that grow with the logarithm of the time go on so; those that do not grow are worth nothing."""
    from edgespec.export.training.until import curve

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
    from types import SimpleNamespace

    from edgespec.export.training.until import Schedule, wants_text

    going, pool = course(1.5, 1.6), SimpleNamespace(windows=None, seconds=seconds)
    schedule = Schedule(10, going)
    assert wants_text(pool, read, going, schedule, lambda of: (1.6 + ahead, [])) == wanted


def test_it_ends_and_says_what_it_is_worth(train: Train, tmp_path: Path) -> None:
    trained = train(method="eagle", steps=None, minutes=0.05, self_distill=0)
    about = trained.report["training"]
    assert about["ended"] in ("0.05 minutes are over", "acceptance has stopped rising")
    assert about["texts"] >= 24
    assert set(about["tokens_per_round"]) == {"greedy", "sampled"}
    assert all(1 <= value <= 3 for value in about["tokens_per_round"].values())
    assert about["curve"][-1][0] <= about["seconds"]
    assert not (tmp_path / "out" / ".training").exists()


def test_time_is_for_a_training_that_ends_by_itself() -> None:
    for wrong in ({"method": "medusa", "minutes": 3.0}, {"method": "eagle", "minutes": -1.0},
                  {"method": "draft", "layout": "sglang"}, {"method": "medusa"}):  # fmt: skip
        with pytest.raises(TrainingError):
            check_options(TrainOptions(model="m", output=Path("o"), **wrong))
    check_options(TrainOptions(method="eagle", model="m", output=Path("o")))


# what SGLang's loader reads of an EAGLE-3 drafter, as SpecForge's exporter lists it
SGLANG = ("fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t")


@pytest.mark.parametrize("layout", ["sglang", "speculators", None])
def test_files_are_in_the_layout_of_other_programs(train: Train, model: Path, tmp_path: Path, layout: str) -> None:
    """The keys are those that their loaders list, and edgespec reads the same drafter back."""
    train(method="eagle", steps=2, layout=layout)
    folder = tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    theirs = Published.read("eagle3_speculators")
    if layout == "speculators":
        assert set(tensors) == set(theirs.shapes)
        known = theirs.config["transformer_layer_config"]
        assert set(config["transformer_layer_config"]) <= set(known)
        assert config["speculators_config"].keys() == theirs.config["speculators_config"].keys()
        assert config["transformer_layer_config"]["rope_parameters"].keys() == known["rope_parameters"].keys()
    if layout == "sglang":
        layer = {name.replace("layers.0", "midlayer") for name in theirs.shapes if name.startswith("layers.0")}
        assert set(tensors) == {*SGLANG, *layer}
        assert tensors["t2d"].all()
        assert not tensors["d2t"].any()
        own = config["eagle_aux_hidden_state_layer_ids"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [at - 1 for at in own]
    drafter = read_drafter(folder, open_model(model, None))
    assert drafter.tokens is None
    assert list(drafter.tapped) == config["eagle_aux_hidden_state_layer_ids"]
    np.testing.assert_array_equal(drafter.arch.source.read("lm_head.weight"), tensors["lm_head.weight"])
