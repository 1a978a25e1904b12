"""Recipes: export and run settings for a kind of model on a kind of device; data in edgespec/configs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from edgespec.drafters.registry import METHODS, NGRAM, SPECULATIVE, needing
from edgespec.errors import ExportError, InvalidRequest
from edgespec.planning.budget import parse_bytes, show_bytes
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import BLOCK_FORMATS, DEVICE_FORMATS, Attention, Format, listed
from edgespec.runtimes.files.json_file import parse_json, validated
from edgespec.runtimes.files.manifest import Manifest, Operators

CONFIGS = resources.files("edgespec") / "configs"
Goal = Literal["chat", "batch", "memory", "quality"]


def _amount(text: str) -> str:
    try:
        parse_bytes(text)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return text


def _method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; methods: {', '.join(METHODS)}")
    return name


def _incompatible_options(form: str, methods: Collection[str], operators: str) -> dict[str, str]:
    """Options of an export that do not go with these, and why."""
    blocks, headed = form in BLOCK_FORMATS, set(needing("heads")) & set(methods)
    rules = {
        "head_format": (blocks, "head_format is for formats in blocks"),
        "quantizer": (blocks, ""),
        "draft_vocab": (SPECULATIVE in methods, "draft_vocab is for speculative"),
        "head_vocab": (bool(headed), "head_vocab is for heads"),
        "devices": (form in DEVICE_FORMATS, f"devices run {listed(DEVICE_FORMATS, 'and')} alone"),
        "attention": (operators != "stock", "attention needs native operators"),
    }
    return {name: why for name, (goes, why) in rules.items() if not goes}


Amount = Annotated[str, AfterValidator(_amount)]
Method = Annotated[str, AfterValidator(_method)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceClass(_Part):
    """Models and devices of a recipe."""

    name: str
    memory: Amount  # of the whole device, as ``4GiB``
    budget: Amount  # share of one process
    threads: int = Field(gt=0)
    assumptions: list[str] = Field(min_length=1)  # what `edgespec calibrate` on the device replaces


class Models(_Part):
    """The models that a recipe was made for; others are allowed."""

    architectures: list[str] = Field(min_length=1)  # as in config.json
    parameters: tuple[int, int]  # the fewest and the most
    examples: list[str]  # well-known ones


class ExportPart(_Part):
    """Options of ``edgespec export``; ``draft`` describes a suitable draft model."""

    format: Format
    head_format: Format | None = None
    quantizer: Literal["rtn", "mse", "awq", "gptq"] | None = None
    methods: list[Method]
    draft: str | None = None
    draft_vocab: int | None = Field(default=None, ge=2)
    head_vocab: int | None = Field(default=None, ge=2)
    context: int = Field(ge=2)
    attention: list[Attention] = Field(default_factory=list)
    devices: list[DeviceName] = Field(default_factory=list)
    operators: Literal["auto", "native", "stock"] = "auto"


class RunPart(_Part):
    """How the bundle is meant to be run; ``gamma`` None = the method's best."""

    method: Method
    context: int = Field(ge=2)
    operators: Operators = "native"
    attention: Attention | None = None
    gamma: int | None = Field(default=None, gt=0)
    batch: int = Field(default=1, gt=0)


class Recipe(_Part):
    """A recipe, named as its file is; ``reason``: why these choices, with figures of docs/dev/measurements.md."""

    name: str
    summary: str
    goal: Goal
    device: DeviceClass
    models: Models
    export: ExportPart
    run: RunPart
    reason: str = Field(min_length=20)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        export, run = self.export, self.run
        prepared = (*needing("text"), *export.methods)
        rules = {
            f"run.method {run.method} is not among export.methods": run.method in prepared,
            "run.context is beyond export.context": run.context <= export.context,
            "run.attention is not among export.attention": run.attention in (None, "f16", *export.attention),
            "the budget is beyond the device's memory": self.budget <= parse_bytes(self.device.memory),
            "head_format is for formats in blocks": export.head_format in (None, *BLOCK_FORMATS),
            "speculative needs draft: which model suits": SPECULATIVE not in prepared or bool(export.draft),
            "parameters are fewest and most": 0 < self.models.parameters[0] <= self.models.parameters[1],
        }
        misfits = _incompatible_options(export.format, prepared, export.operators)
        rules |= {why: not getattr(export, name) for name, why in misfits.items() if why}
        if broken := [rule for rule, kept in rules.items() if not kept]:
            raise ValueError(broken[0])
        return self

    @property
    def budget(self) -> int:
        """Bytes that a process may take."""
        return parse_bytes(self.device.budget)

    def run_command(self, bundle: str, manifest: Manifest, ask: str) -> str:
        """Write the command that runs its bundle, as far as it was exported so; ``ask``: options that ask something."""
        run = self.run
        if run.batch > 1:  # sequences together are the library's
            return f"edgespec bench {bundle} --batch {run.batch}"
        words = ["edgespec", "run", bundle, "--context", str(min(run.context, manifest.target.facts.context))]
        words += ["--method", run.method] if run.method in manifest.methods else []
        words += ["--attention", run.attention] if run.attention else []
        words += ["--num-draft-tokens", str(run.gamma)] if run.gamma else []
        return " ".join([*words, ask])


def recipes() -> tuple[str, ...]:
    """Names of all recipes that come with edgespec."""
    return tuple(sorted(item.name.removesuffix(".json") for item in CONFIGS.iterdir() if item.name.endswith(".json")))


def read_recipe(name: str | Path) -> Recipe:
    """Read a recipe that comes with edgespec, or one of a JSON file.

    Raises:
        InvalidRequest: neither, or a file that is not a recipe; the message names the known ones.
    """
    where, known = str(name), f"recipes: {', '.join(recipes())}; or give a JSON file (docs/recipes.md)"
    file = CONFIGS / f"{name}.json" if where in recipes() else Path(name)
    if where not in recipes() and not where.endswith(".json") and not Path(name).is_file():
        raise InvalidRequest(f"there is no recipe {where!r}", known)
    try:
        data = parse_json(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where}: cannot read a recipe: {error}", known) from error
    except ValueError as error:
        raise InvalidRequest(f"{where}: not readable as JSON: {error}", "see docs/recipes.md") from error
    return validated(Recipe, data, where, InvalidRequest, "see docs/recipes.md")


def recipe_table() -> list[dict[str, str]]:
    """All recipes, one readable row each."""
    return [
        {
            "recipe": recipe.name,
            "budget": show_bytes(recipe.budget),
            "models": " to ".join(f"{count / 1e9:g}B" for count in recipe.models.parameters),
            "goal": recipe.goal,
            "weights": recipe.export.format,
            "methods": ", ".join(recipe.export.methods) or NGRAM,
            "summary": recipe.summary,
        }
        for recipe in map(read_recipe, recipes())
    ]


def apply_recipe(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an export: those given, and the recipe's for the rest.

    Given ones are named as in ``ExportOptions`` and always win: conflicting parts of the recipe are dropped.
    """
    export = recipe.export.model_dump(exclude={"draft"}, exclude_none=True)
    found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in export.items()}
    found |= given
    drop = _incompatible_options(found["format"], found["methods"], found["operators"])
    return {name: value for name, value in found.items() if name in given or name not in drop}


def check_parts(recipe: Recipe, methods: Collection[str], draft: bool, heads: bool) -> None:
    """Refuse an export with these methods where neither draft nor heads were given, or came with the model.

    Raises:
        ExportError: a draft or heads are missing; the message names a suitable draft, and how to make it.
    """
    lacking = {
        name: f"trained heads: `edgespec train {name} MODEL -o {name}-heads`, then --heads {name}-heads"
        for name in (() if heads else needing("heads"))
    }
    if not draft:
        suits = recipe.export.draft or "a small model, best with the same tokenizer"
        train = "or train one: `edgespec train draft MODEL -o draft`"
        lacking[SPECULATIVE] = f"a draft model, --draft MODEL2: {suits}; {train}"
    for method in filter(lacking.__contains__, methods):
        raise ExportError(
            f"recipe {recipe.name}: method {method} needs {lacking[method]}",
            "or choose other methods: --method ngram prepares only plain and n-gram decoding",
        )


def plan_defaults(name: str | Path) -> dict[str, Any]:
    """Turn a recipe into options of ``edgespec plan``.

    Raises:
        InvalidRequest: no such recipe.
    """
    recipe = read_recipe(name)
    run, export = recipe.run, recipe.export
    found: dict[str, Any] = {
        "budget": recipe.device.budget,
        "context": run.context,
        "goal": recipe.goal,
        "formats": (export.format,),
        "methods": tuple(dict.fromkeys((*needing("text"), *export.methods))),
        "threads": recipe.device.threads,
        "attention": run.attention,
        "batch": run.batch if run.batch > 1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}
