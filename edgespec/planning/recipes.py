"""Recipes: what to export of a kind of model for a kind of device, and how to run it; data in edgespec/configs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from edgespec.drafters.registry import METHODS, NGRAM, SPECULATIVE, needing
from edgespec.errors import InvalidRequest
from edgespec.planning.budget import parse_bytes, show_bytes
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import BLOCK_FORMATS, DEVICE_FORMATS, Attention, Format, listed
from edgespec.runtimes.files.json_file import parse_json, validated
from edgespec.runtimes.files.manifest import Manifest, Operators

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


Amount = Annotated[str, AfterValidator(_amount)]
Method = Annotated[str, AfterValidator(_method)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceClass(_Part):
    """What a recipe was made for.

    Attributes:
        name: of the class.
        memory: of the whole device, as ``4GiB``.
        budget: what one process may take of it.
        threads: of ONNX Runtime.
        assumptions: what is assumed of it; `edgespec calibrate` on the device replaces them.
    """

    name: str
    memory: Amount
    budget: Amount
    threads: int = Field(gt=0)
    assumptions: list[str] = Field(min_length=1)


class Models(_Part):
    """The models a recipe was made for; others are not refused.

    Attributes:
        architectures: as in config.json.
        parameters: fewest and most.
        examples: well-known ones.
    """

    architectures: list[str] = Field(min_length=1)
    parameters: tuple[int, int]
    examples: list[str]


class ExportPart(_Part):
    """Options of ``edgespec export``; ``draft`` says in words which draft model suits."""

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
    """How the bundle is meant to be run; ``gamma`` None = what the method has found best."""

    method: Method
    context: int = Field(ge=2)
    operators: Operators = "native"
    attention: Attention | None = None
    gamma: int | None = Field(default=None, gt=0)
    batch: int = Field(default=1, gt=0)


class Recipe(_Part):
    """A recipe; see the module.

    Attributes:
        name: of the recipe, and of its file.
        summary: a line for people.
        goal: what it is best at.
        reason: why these choices; figures are those of docs/project/measurements.md.
    """

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
            "head_format is for formats in blocks": export.head_format is None
            or {export.format, export.head_format} <= {*BLOCK_FORMATS},
            "draft_vocab is for speculative": export.draft_vocab is None or SPECULATIVE in prepared,
            "speculative needs draft: which model suits": SPECULATIVE not in prepared or bool(export.draft),
            "head_vocab is for heads": export.head_vocab is None or bool(set(needing("heads")) & set(prepared)),
            f"devices run {listed(DEVICE_FORMATS, 'and')} alone": not export.devices or export.format in DEVICE_FORMATS,
            "attention needs native operators": not export.attention or export.operators != "stock",
            "parameters are fewest and most": 0 < self.models.parameters[0] <= self.models.parameters[1],
        }
        for rule, kept in rules.items():
            if not kept:
                raise ValueError(rule)
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
        words += ["--gamma", str(run.gamma)] if run.gamma else []
        return " ".join([*words, ask])


def recipes() -> tuple[str, ...]:
    """Names of all recipes that come with edgespec."""
    folder = resources.files("edgespec") / "configs"
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))


def read_recipe(name: str | Path) -> Recipe:
    """Read a recipe that comes with edgespec, or one of a JSON file.

    Raises:
        InvalidRequest: neither, or a file that is no recipe; the message names what there is.
    """
    path = Path(name)
    if str(name) in recipes():
        text, where = (resources.files("edgespec") / "configs" / f"{name}.json").read_text("utf-8"), str(name)
    elif path.suffix == ".json" or path.is_file():
        where = str(path)
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path}: cannot read a recipe: {error}", _known()) from error
    else:
        raise InvalidRequest(f"there is no recipe {str(name)!r}", _known())
    try:
        data = parse_json(text)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not readable as JSON: {error}", "see docs/recipes.md") from error
    return validated(Recipe, data, where, InvalidRequest, "see docs/recipes.md")


def recipe_table() -> list[dict[str, str]]:
    """All recipes, a row each, for people."""
    rows = []
    for recipe in map(read_recipe, recipes()):
        low, high = (f"{count / 1e9:g}B" for count in recipe.models.parameters)
        rows.append(
            {
                "recipe": recipe.name,
                "budget": show_bytes(recipe.budget),
                "models": f"{low} to {high}",
                "goal": recipe.goal,
                "weights": recipe.export.format,
                "methods": ", ".join(recipe.export.methods) or NGRAM,
                "summary": recipe.summary,
            }
        )
    return rows


def apply_recipe(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an export: those given, and the recipe's for the rest.

    What of the recipe does not go with a given option is left out.

    Args:
        recipe: the recipe.
        given: options that somebody chose, by the names of ``ExportOptions``; they always win.
    """
    export = recipe.export.model_dump(exclude={"draft"}, exclude_none=True)
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in export.items()} | dict(given)
    methods, form = set(found["methods"]), found["format"]
    drop = {
        "head_format": form not in BLOCK_FORMATS,
        "quantizer": form not in BLOCK_FORMATS,
        "draft_vocab": SPECULATIVE not in methods,
        "head_vocab": not methods & set(needing("heads")),
        "attention": found["operators"] == "stock",
        "devices": form not in DEVICE_FORMATS,
    }
    return {name: value for name, value in found.items() if name in given or not drop.get(name)}


def missing_parts(recipe: Recipe, methods: tuple[str, ...], draft: bool, heads: bool) -> dict[str, str]:
    """Say what an export with these methods still needs: in words, by method.

    Args:
        recipe: the recipe, which says what draft suits.
        methods: of the export.
        draft: whether a draft was given.
        heads: whether heads were given, or come with the model.
    """
    found = {}
    if SPECULATIVE in methods and not draft:
        suits = recipe.export.draft or "a small model with the same tokenizer"
        found[SPECULATIVE] = (
            f"a draft model, --draft MODEL2: {suits}; or train one: `edgespec train draft MODEL -o draft`"
        )
    for name in needing("heads"):
        if name in methods and not heads:
            found[name] = f"trained heads: `edgespec train {name} MODEL -o {name}-heads`, then --heads {name}-heads"
    return found


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
    }
    if run.attention is not None:
        found["attention"] = run.attention
    return found | ({"batch": run.batch} if run.batch > 1 else {})


def _known() -> str:
    return f"recipes: {', '.join(recipes())}; or give a JSON file (docs/recipes.md)"
