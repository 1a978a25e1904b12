"""Options of a training, and what can be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from edgespec.cli.app import cli
from edgespec.errors import TrainingError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import NumpyOps, reference_logits
from edgespec.export.training.options import (
    LAYOUTS,
    METHODS,
    ONLY_FOR,
    TrainOptions,
    check_options,
    choose_exits,
    draft_shape,
    learning_rate,
    window_length,
)
from edgespec.runtimes.files.manifest import ModelFacts
from tests.export.training.conftest import short
from tests.support import hf, packed
from tests.support.checkpoints import write_adapter
from tests.support.gguf_files import write_gguf

FACTS = ModelFacts(
    architecture="llama",
    layers=8,
    hidden=256,
    intermediate=688,
    heads=8,
    kv_heads=4,
    head_dim=32,
    vocab=512,
    context=128,
)


def options(**changes: Any) -> TrainOptions:
    return dataclasses.replace(short("m", Path("o")), **changes)


def test_defaults_of_the_command_are_those_of_the_library() -> None:
    group = cli.get_command(click.Context(cli), "train")
    assert isinstance(group, click.Group)
    assert group.list_commands(click.Context(group)) == list(METHODS)
    ours = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    offered = set()
    for kind in METHODS:
        command = group.get_command(click.Context(group), kind)
        assert command is not None
        found = dict(command.make_context(kind, ["m", "-o", "o"]).params)
        others = {name for name, kinds in ONLY_FOR.items() if kind not in kinds}
        others |= set() if kind in LAYOUTS else {"layout"}
        assert set(found) - {"as_json"} == set(ours) - {"method"} - others, kind
        for name in set(found) - {"as_json", "model", "output", "exits"}:
            assert found[name] == ours[name], name
        offered |= set(found)
    assert offered - {"as_json"} == set(ours) - {"method"}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"self_distill": -1}, "--self-distill: expected a number of texts, got -1"),
        ({"heads": 0}, "--heads: expected at least 1, got 0"),
        ({"steps": 0}, "--steps: expected at least 1"),
        ({"save_every": 0}, "--save-every"),
        ({"lr": 0.0}, "--lr: expected a positive number"),
        ({"epochs": float("nan")}, "--epochs"),
        ({"greedy_fraction": 1.5}, "--greedy-fraction: expected a share between 0 and 1, got 1.5"),
        ({"exits": (1,)}, "--exits is for paradecode, not for medusa"),
        ({"method": "mtp", "fsdp": True}, "--fsdp is for medusa and (.*) and selfdraft, not for mtp"),
        ({"ce_share": 0.3}, "--ce-share is for draft, not for medusa"),
        (
            {"method": "paradecode"},
            "--heads is for medusa and (.*) and selfdraft, not for paradecode",
        ),
        ({"draft_layers": 3}, "--draft-layers is for draft and dspark and dflash, not for medusa"),
        ({"loss": "d-pace"}, "--loss d-pace is for eagle and dspark and dflash and mtp and selfdraft, not for medusa"),
        ({"method": "draft", "own_lm_heads": True}, "--own-lm-heads is for medusa"),
        ({"hidden_size": 64}, "--hidden-size is for blockwise"),
        ({"draft_hidden": 64}, "--draft-hidden is for draft"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    check_options(options())
    with pytest.raises(TrainingError, match=said):
        check_options(options(**changes))


def test_the_window() -> None:
    assert window_length(options(length=None), FACTS) == 128  # the context
    assert window_length(options(length=64), FACTS) == 64
    for length in (5, 129):
        with pytest.raises(TrainingError, match=f"--length: expected 6 to 128 tokens(.|\n)*got {length}"):
            window_length(options(length=length), FACTS)


def test_exits() -> None:
    assert choose_exits((), 8) == (2, 4, 6)
    assert choose_exits((), 32) == (8, 16, 24)
    assert choose_exits((), 2) == (1,)
    assert choose_exits((6, 2, 2), 8) == (2, 6)
    for bad in (0, 8, -1):
        with pytest.raises(TrainingError, match=rf"from 1 to 7 \(the model has 8 layers\), got {bad}"):
            choose_exits((4, bad), 8)
    with pytest.raises(TrainingError, match="two layers or more, this one has 1"):
        choose_exits((), 1)


def test_the_shape_of_a_draft() -> None:
    shape = draft_shape(options(method="draft"), FACTS)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads) == (2, 64, 192, 2, 1)
    assert shape.heads * shape.head_dim == shape.hidden
    given = draft_shape(options(method="draft", draft_hidden=96, draft_heads=6, draft_intermediate=128), FACTS)
    assert (given.hidden, given.intermediate, given.heads, given.kv_heads, given.head_dim) == (96, 128, 6, 3, 16)
    # heads of 64 do not divide a quarter of 896 (Qwen2.5-0.5B), heads of 112 do
    odd = FACTS.model_copy(update={"hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "intermediate": 4864})
    shape = draft_shape(options(method="draft"), odd)
    assert (shape.hidden, shape.heads, shape.head_dim, shape.kv_heads) == (224, 2, 112, 1)
    with pytest.raises(TrainingError, match="7 heads do not divide a width of 64"):
        draft_shape(options(method="draft", draft_heads=7), FACTS)


def test_wider_models_take_smaller_steps() -> None:
    rates = [learning_rate(options(), hidden) for hidden in (32, 64, 256, 4096)]
    assert rates[0] == rates[1] > rates[2] > rates[3] > 1e-3
    assert learning_rate(options(lr=0.5), 4096) == 0.5


def test_what_shapes_the_result_and_what_does_not() -> None:
    base = options().identity({"model": "x"})
    assert base == options(output=Path("p"), save_every=9, threads=3, overwrite=True, model="y").identity(
        {"model": "x"}
    )
    assert base != options(lr=0.5).identity({"model": "x"})
    assert base != options().identity({"model": "z"})


NAME = "llama_tied_gqa"


@pytest.mark.parametrize("kind", ["gptq", "gguf", "adapter"])
def test_only_plain_folders(torch: Any, tmp_path: Path, kind: str) -> None:
    from edgespec.export.training.target import Source

    model = hf.write_checkpoint(tmp_path / "model", hf.CONFIGS[NAME], 3)
    assert Source.open(str(model)).path == model
    if kind == "gptq":
        packed.pack_checkpoint(model, *packed.KINDS["gptq4"])
    elif kind == "gguf":
        model = tmp_path / "model.gguf"
        write_gguf(model, NAME)
    else:
        write_adapter(tmp_path / "lora", hf.CONFIGS[NAME], base=model)
        model = tmp_path / "lora"
    with pytest.raises(TrainingError, match="training needs a plain Hugging Face folder"):
        Source.open(str(model))


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

    assert Trainer(short(checkpoint(name), tmp_path / "out", method)).run()
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
