"""Small models to train for, and trainings short enough for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.training.options import ONLY_FOR, TrainOptions
from tests.support import hf

MODEL = "llama_tied_gqa"
WITHOUT_BOS = "qwen2_tied_gqa7"


@pytest.fixture(scope="session")
def torch() -> Any:
    """Import torch; skip the tests that train where it is missing."""
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'edgespec[train]'")
    found = pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    found.set_num_threads(1)
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of two layers whose tokenizer puts a BOS in front."""
    return hf.write_reference_checkpoint(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="module")
def target(model: Path, torch: Any) -> Any:
    """Open that model as training does."""
    from edgespec.export.training.target import Source, Target

    return Target(Source.open(str(model)), "no", torch.device("cpu"))


@pytest.fixture
def fresh_accelerate(torch: Any) -> Iterator[None]:
    """Let every training choose its precision again, as in a new process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


Train = Callable[..., Any]


@pytest.fixture
def train(model: Path, tmp_path: Path, fresh_accelerate: None) -> Train:
    """Return a function that trains briefly; its arguments replace fields of TrainOptions."""
    from edgespec.export.training.train import Trainer

    def run(**changes: Any) -> Any:
        return Trainer(replace(short(model, tmp_path / "out", changes.get("method", "medusa")), **changes)).run()

    return run


def short(model: Path | str, output: Path, method: str = "medusa") -> TrainOptions:
    """Options of a training that takes a second."""
    return TrainOptions(
        method=method,
        model=str(model),
        output=output,
        self_distill=12,
        heads=2 if method in ONLY_FOR["heads"] else TrainOptions.heads,
        batch=4,
        length=24,
        steps=6,
        held_out=3,
        new_tokens=16,
        save_every=2,
    )
