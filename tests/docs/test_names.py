"""Every path, Python name and key that a page names exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

import edgespec
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.decoding.stats import Stats
from edgespec.drafters.registry import METHODS
from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.export.architectures import ARCHITECTURES
from edgespec.extensions import GROUPS
from edgespec.judge.client import Server
from edgespec.judge.greedy import Comparison
from edgespec.judge.judging import Judgement
from edgespec.planning.recipes import Recipe
from edgespec.reports.advice import Advice
from edgespec.reports.bench import MethodFigures
from edgespec.runtimes.files.manifest import Graph, Manifest, MethodPart, ModelPart
from edgespec.runtimes.options import LoadOptions
from tests.docs.conftest import NAMES, ROOT, blocks, first_column, inline, section, tables, text_of
from tools.docs_pages import models_table

FOLDERS = "benchmarks|configs|docs|edgespec|examples|export|runtimes|tests|tools"
MADE = {"docs/reference/commands.md"}  # by tools/docs_pages.py
OBJECTS = {"engine": Engine, "result": Result, "stream": Stream}


def fields(*classes: type) -> set[str]:
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("page", NAMES)
def test_paths(page: str) -> None:
    for code in inline(page):
        if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]*", code) and not re.search("NAME|MODEL_TYPE", code):
            assert (ROOT / code).exists() or code in MADE, f"{page}: no {code}"
    for module in re.findall(r"python -m ((?:benchmarks|tools)\.\w+)", text_of(page)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page}: no {module}"
    for script in re.findall(r"python (tools/\w+\.py)", text_of(page)):
        assert (ROOT / script).is_file(), f"{page}: no {script}"


def test_the_table_of_folders_has_every_package() -> None:
    named = first_column(section("CONTRIBUTING.md", "Layers and packages"))
    for top in ("edgespec", "edgespec/export", "edgespec/runtimes"):
        for folder in sorted((ROOT / top).iterdir()):
            if (folder / "__init__.py").is_file():
                assert f"{folder.relative_to(ROOT)}/" in named, f"CONTRIBUTING does not say what {folder.name} holds"


@pytest.mark.parametrize("page", NAMES)
def test_python_names(page: str) -> None:
    for dotted in re.findall(r"(?<!/)\bedgespec(?:\.\w+)+", "\n".join([*inline(page), *blocks(page, "python")])):
        if dotted in GROUPS:  # of entry points
            continue
        if not dotted.endswith(".json") and f"{dotted.replace('.', '/')}.py" not in MADE:
            resolve(dotted)
    for code in [*inline(page), *blocks(page, "python")]:
        for name, attribute in re.findall(r"(?<![\w./])(engine|result|stream)\.([a-z]\w*)", code):
            known = OBJECTS[name]
            assert hasattr(known, attribute) or attribute in attributes(known), f"{page}: no {name}.{attribute}"


def attributes(cls: type) -> set[str]:
    """Attributes that a class or its ``__init__`` sets."""
    code = getattr(inspect.getattr_static(cls, "__init__"), "__code__", None)
    return {*getattr(cls, "__annotations__", {}), *(code.co_names if code else ())}


def resolve(dotted: str) -> object:
    """Import the longest module path, then follow attributes."""
    found: object = edgespec
    path = "edgespec"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pytest.mark.parametrize("page", NAMES)
def test_python_blocks_compile(page: str) -> None:
    for block in blocks(page, "python"):
        entry = re.match(r'^"\w', block)  # of a table
        compile(f"{{{block}}}" if entry else block, page, "exec")


def test_a_wrong_name_would_be_seen() -> None:
    with pytest.raises(ModuleNotFoundError):
        resolve("edgespec.decoding.loops")


def test_keys_of_a_result() -> None:
    page = "docs/reference/results.md"
    stats = Stats(source_rows=1, image_rows=1)
    result = Result("", [], "eos", stats, None, "ar", "", True, True, [], device_lost="", draft_attention="f16",
                    logprobs=[], model_sampling={"top_k": 20})  # fmt: skip
    made = result.as_dict()
    assert first_column(section(page, "A result")) == made.keys()
    assert first_column(section(page, "Statistics")) - {"stats"} == made["stats"].keys()
    figures, advice = tables(section(page, "A benchmark"))
    assert first_column(figures) == MethodFigures("ar", [1.0], [1.0], [result]).as_dict().keys()
    assert first_column(advice) == fields(Advice)
    judged = Judgement(Server("http://127.0.0.1:9", "m"), None, {})
    judged.greedy = [Comparison("nothing")]
    assert first_column(section(page, "A judgment")) == judged.as_dict().keys()


def test_settings() -> None:
    page = "docs/reference/settings.md"
    assert first_column(section(page, "Loading options")) == fields(LoadOptions)
    named = first_column(section(page, "Request settings"))
    assert named == fields(Settings, SamplingParams, DraftOptions) - {"sampling", "drafts", "constraint", "prompt"}


def test_keys_of_a_manifest() -> None:
    page = "docs/bundle.md"
    assert first_column(section(page, "The manifest").split("###")[0]) == set(Manifest.model_fields)
    for heading, part in (("A model", ModelPart), ("A method", MethodPart)):
        named = first_column(section(page, heading))
        known = set(part.model_fields) | (set(Graph.model_fields) if part is ModelPart else set())
        assert named - {"target", "draft"} <= known, named - known


def test_keys_of_a_recipe() -> None:
    assert first_column(section("docs/recipes.md", "Your own recipe")) == set(Recipe.model_fields)


def test_the_tables_of_architectures_methods_and_recipes_are_whole() -> None:
    table = tables(text_of("docs/models.md"))[0]
    assert ARCHITECTURES.keys() <= first_column(table)
    assert table == models_table(), "python -m tools.docs_pages --write"
    assert set(METHODS) | {"chain", "auto"} == first_column(section("docs/methods.md", "Methods"))
    named = first_column("".join(tables(text_of("docs/recipes.md"))))
    assert {file.stem for file in (ROOT / "configs").glob("*.json")} <= named
