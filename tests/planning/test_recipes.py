"""Recipes: each is valid, can be exported, and fits its device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import TRANSLATORS
from edgespec.errors import ExportError, InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.weights import WeightChoice
from edgespec.planning.budget import parse_bytes
from edgespec.planning.footprint import memory_of
from edgespec.planning.recipes import (
    Recipe,
    apply_recipe,
    check_parts,
    plan_defaults,
    read_recipe,
    recipe_table,
    recipes,
)
from edgespec.runtimes.files.formats import FORMATS, Attention
from edgespec.runtimes.files.manifest import Manifest, ModelFacts
from edgespec.runtimes.options import RunOptions
from tests.support.planned import plan_of

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PARAMETERS = {  # as their authors count them
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}
# a draft of the family, where there is one that is small enough
DRAFTS = {"llama-3.2-3b": "llama-3.2-1b", "qwen2.5-3b": "qwen2.5-0.5b", "qwen2.5-1.5b": "qwen2.5-0.5b",
          "smollm2-1.7b": "smollm2-360m"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a configuration -> a model's folder with nothing else in it."""
    folder = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        (folder / name).mkdir(exist_ok=True)
        if name in TRANSLATORS:
            (folder / name / "config.json").write_text(json.dumps(TRANSLATORS[name]), "utf-8")
        else:
            shutil.copyfile(CONFIGS / f"{name}.json", folder / name / "config.json")
        return folder / name

    return get


@cache
def facts_of(folder: Path) -> ModelFacts:
    """Return the plan's facts of a model, which are the same for every recipe."""
    return plan_of(folder).target.facts


def planned(recipe: Recipe, folder: Path, draft: Path | None) -> Manifest:
    """Return what an export by a recipe would write."""
    options = apply_recipe(recipe, {})
    names = ("head_format", "methods", "draft_vocab", "head_vocab", "attention", "devices")
    return plan_of(
        folder,
        format=recipe.export.format,
        context=min(recipe.export.context, facts_of(folder).context),
        draft=None if draft is None else str(draft),
        **{name: options[name] for name in names if name in options},
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shapes_are_those_of_the_models(model: Callable[[str], Path], name: str) -> None:
    assert facts_of(model(name)).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_valid(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.device.name in name
    assert recipe.goal in name
    assert recipe.budget < parse_bytes(recipe.device.memory)
    assert recipe.export.format in FORMATS
    options = apply_recipe(recipe, {"draft": "draft"} if "speculative" in recipe.export.methods else {})
    made = ExportOptions("model", Path("out"), **options)
    assert recipe.run.method in made.wanted()
    WeightChoice.of(made.format, made.quantizer, made.head_format)


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_fits_its_device(model: Callable[[str], Path], name: str) -> None:
    recipe, tried = read_recipe(name), 0
    for which in (*PARAMETERS, *TRANSLATORS):
        facts, (least, most) = facts_of(model(which)), recipe.models.parameters
        if facts.architecture not in recipe.models.architectures or not least <= facts.parameters <= most:
            continue
        pair = DRAFTS.get(which) if "speculative" in recipe.export.methods else None
        for draft in (None, model(pair)) if pair else (None,):
            manifest = planned(recipe, model(which), draft)
            attentions: set[Attention | None] = {recipe.run.attention, "f16"}  # what does not pass its gate is float16
            for attention in attentions:
                use = RunOptions(
                    method=recipe.run.method,
                    operators=recipe.run.operators,
                    context=min(recipe.run.context, manifest.target.facts.context),
                    attention=attention,
                    batch=recipe.run.batch,
                    threads=recipe.device.threads,
                )
                assert memory_of(manifest, use).peak <= recipe.budget, (which, draft, attention)
                tried += 1
    assert tried >= 4


def test_every_kind_of_device_and_goal_has_a_recipe() -> None:
    known = [read_recipe(name) for name in recipes()]
    assert {recipe.device.name for recipe in known} == {"laptop", "phone-4gb", "phone-8gb", "single-board"}
    assert {recipe.goal for recipe in known} == {"chat", "batch", "memory", "quality"}
    assert [row["recipe"] for row in recipe_table()] == list(recipes())
    assert all(row["summary"] for row in recipe_table())


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    own = read_recipe("laptop-1b-chat").model_dump(mode="json") | {"name": "mine"}
    file = tmp_path / "mine.json"

    def refused(message: str, **change: Any) -> None:
        changed = json.loads(json.dumps(own))
        for path, value in change.items():
            *outer, last = path.split("__")
            at = changed
            for key in outer:
                at = at[key]
            at[last] = value
        file.write_text(json.dumps(changed), "utf-8")
        with pytest.raises(InvalidRequest, match=message) as caught:
            read_recipe(file)
        assert str(file) in str(caught.value)

    file.write_text(json.dumps(own), "utf-8")
    assert read_recipe(str(file)).name == "mine"
    refused("export.format: Input should be", export__format="int5")
    refused("export.methods.0: unknown method 'magic'", export__methods=["magic"])
    refused("device.budget: '1 potato' is no amount of memory", device__budget="1 potato")
    refused("color: Extra inputs", color="blue")
    refused("run.method medusa is not among", run__method="medusa")
    refused("run.context is beyond", run__context=100_000)
    refused("run.attention is not among", run__attention="nomad")
    refused("beyond the device's memory", device__budget="17GiB")
    refused("head_format is for formats in blocks", export__format="fp32")
    refused("draft_vocab is for speculative", export__methods=[], run__method="ar")
    refused("speculative needs draft", export__draft=None)
    refused("head_vocab is for heads", export__head_vocab=100)
    refused(
        "run int4, int8 and fp32 alone", export__head_format=None, export__format="w8a8", export__devices=["webgpu"]
    )
    refused("needs native operators", export__operators="stock")
    refused("fewest and most", models__parameters=[5, 3])
    for text in ("{", "[]", "\udcff"):
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(InvalidRequest, match=r"mine\.json"):
            read_recipe(file)


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    for name in ("laptop-9b-chat", "../laptop-1b-chat", ""):
        with pytest.raises(InvalidRequest, match=r"no recipe(.|\n)*phone-4gb-1b-memory"):
            read_recipe(name)
    with pytest.raises(InvalidRequest, match=r"cannot read a recipe(.|\n)*phone-4gb-1b-memory"):
        read_recipe(tmp_path / "none.json")


# -- using -------------------------------------------------------------------------------------------------------------


def test_given_options_win_and_what_does_not_go_with_them_is_left_out() -> None:
    chat = read_recipe("laptop-1b-chat")
    assert apply_recipe(chat, {}) == {
        "format": "int4",
        "head_format": "int8",
        "methods": ("speculative",),
        "draft_vocab": 8192,
        "context": 8192,
        "attention": ("int8",),
        "devices": (),
        "operators": "auto",
    }
    exact = apply_recipe(chat, {"format": "fp32", "context": 100})
    assert (exact["format"], exact["context"]) == ("fp32", 100)
    assert "head_format" not in exact
    assert "draft_vocab" not in apply_recipe(chat, {"methods": ("self-spec",)})
    assert "attention" not in apply_recipe(chat, {"operators": "stock"})
    assert apply_recipe(chat, {"methods": ("self-spec",), "draft_vocab": 9})["draft_vocab"] == 9  # for export to refuse
    heads = chat.export.model_copy(update={"methods": ["medusa"], "head_vocab": 8192})
    assert "head_vocab" not in apply_recipe(chat.model_copy(update={"export": heads}), {"methods": ()})


@pytest.mark.parametrize(
    "name, method, said",
    [
        ("laptop-1b-chat", "speculative", r"laptop-1b-chat: method speculative needs .*same family"),
        ("laptop-1b-quality", "medusa", "edgespec train medusa"),
    ],
)
def test_what_is_missing_is_said(name: str, method: str, said: str) -> None:
    recipe, draft = read_recipe(name), method == "speculative"
    with pytest.raises(ExportError, match=said):
        check_parts(recipe, (method,), draft=not draft, heads=draft)
    check_parts(recipe, (method,), draft=draft, heads=not draft)
    check_parts(recipe, (), draft=False, heads=False)


def test_a_plan_takes_what_is_not_given() -> None:
    assert plan_defaults("laptop-1b-batch") == {
        "budget": "6GiB",
        "context": 2048,
        "goal": "batch",
        "formats": ("int4",),
        "methods": ("ar", "ngram"),
        "threads": 4,
        "batch": 4,
    }
    assert plan_defaults("phone-8gb-3b-memory")["methods"] == ("ar", "ngram", "self-spec")
