"""The packages of ``examples/``, installed next to edgespec: what they add works wherever edgespec's own does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.drafters.registry import METHODS, complete
from edgespec.engine.loading import load
from edgespec.export.architectures import ARCHITECTURES
from edgespec.runtimes.files.manifest import MethodPart, read_manifest
from tests.cli.conftest import Command, command, demo  # noqa: F401
from tests.conftest import PROMPTS, TARGET
from tests.support.installed import EXAMPLES, importable, install
from tests.support.planning import predicting
from tests.support.toy import hash_logits, hash_target, plain

PAGE = EXAMPLES.parent / "docs" / "dev" / "a-method.md"
BUILTIN = EXAMPLES.parent / "edgespec" / "builtin"
NEW = 48


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Install both examples."""
    folder = tmp_path_factory.mktemp("plugins")
    return {name: install(name, folder) for name in ("drafter_plugin", "architecture_plugin")}


@pytest.fixture
def phrases(installed: dict[str, Path]) -> Iterator[Any]:
    """Give the module of the drafter's package."""
    with importable(installed["drafter_plugin"]):
        assert "phrases" in METHODS
        yield import_module("edgespec_phrases")


def test_pages_show_the_packages() -> None:
    page = PAGE.read_text("utf-8")
    for name in ("edgespec_phrases.py", "pyproject.toml"):
        code = (EXAMPLES / "drafter_plugin" / name).read_text("utf-8")
        shown = [found for found in re.findall(r"```\w+\n(.*?)```", page, re.S) if found in code]
        assert shown, name
    for name in ("drafter_plugin", "architecture_plugin"):
        assert len((EXAMPLES / name / "README.md").read_text("utf-8").splitlines()) <= 20


def test_without_the_package_the_group_is_named(command: Command, demo: Path) -> None:  # noqa: F811
    assert "phrases" not in METHODS
    command("run", demo, "--prompt", "x", "--method", "phrases").refused(1, "phrases", "edgespec.drafters")


def test_it_writes_the_text_of_plain_decoding_whatever_is_in_its_book(phrases: Any) -> None:
    for seed in range(30):
        text = plain(hash_logits(seed, 11), 11, [1, 2], 60)
        rng = np.random.default_rng(seed)
        wrong = [int(token) for token in rng.integers(11, size=6)]
        book = [text[at : at + 5] for at in range(0, 50, 7)] + [[*text[3:5], *wrong], wrong]
        stats = Stats()
        rounds = decode(hash_target(seed), phrases.Phrases(book), [1, 2], DecodeOptions(60, 1 + seed % 6), stats)
        assert [token for made in rounds for token in made.tokens] == text
        assert stats.dropped_reason is None
        assert stats.accepted > 5


@pytest.mark.usefixtures("phrases")
def test_it_runs_with_a_bundle_that_was_exported_before(demo: Path) -> None:  # noqa: F811
    assert "phrases" not in read_manifest(demo).methods
    made = load(demo)
    assert made.methods[-1] == "phrases"
    accepted = 0
    for prompt in PROMPTS[:6]:
        wanted = made.generate(prompt, method="ar", max_new_tokens=NEW)
        ways: list[dict[str, Any]] = [
            {"method": "phrases"},
            {"method": "phrases", "adaptive": False, "fallback": False},
            {"method": "chain", "proposers": ("phrases", "ngram")},
        ]
        for how in ways:
            found = made.generate(prompt, max_new_tokens=NEW, **how)
            assert found.tokens == wanted.tokens
            assert found.exact
            assert found.stats.dropped_reason is None
            accepted += found.stats.accepted
    assert accepted > 0


@pytest.mark.usefixtures("phrases")
def test_auto_chooses_from_it_by_its_prediction(demo: Path) -> None:  # noqa: F811
    made = load(demo)
    manifest = predicting(made.bundle.manifest, {"phrases": 1.5, "ngram": 1.1})
    made.bundle = replace(made.bundle, manifest=manifest)
    assert [(one.name, one.promise) for one in made.choose(None).candidates] == [("phrases", 1.5), ("ngram", 1.1)]
    found = made.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert found.tokens == made.generate(PROMPTS[0], method="ar", max_new_tokens=NEW, ignore_eos=True).tokens
    assert any(line.startswith("estimated speeds: phrases ") for line in found.details)  # who wins is the clock's


@pytest.mark.usefixtures("phrases")
def test_commands_know_it(command: Command, demo: Path) -> None:  # noqa: F811
    run = command("run", demo, "--prompt", "My lord,", "--method", "phrases", "--max-new-tokens", 16, "--json").json
    assert run["method_used"] == "phrases"
    proof = command("verify", demo, "--method", "phrases", "--max-prompts", 2, "--max-new-tokens", 24, "--json").json
    assert [(one["method"], one["exact"]) for one in proof["methods"]] == [("phrases", True)]
    quick = ("--max-prompts", 1, "--repeats", 2, "--max-new-tokens", 16)
    rows = command("bench", demo, "--method", "phrases", *quick, "--json").json
    assert "phrases" in str(rows)
    planned = command("plan", demo, "--method", "phrases", "--budget", "1GiB", "--json").json
    assert "phrases" in str(planned)
    refused = command("run", demo, "--prompt", "x", "--method", "telepathy")
    assert "phrases" in refused.err


@pytest.mark.usefixtures("phrases")
def test_an_unknown_method_of_a_bundle_is_left_out(demo: Path) -> None:  # noqa: F811
    """A bundle may have methods of packages that are not installed here."""
    manifest = read_manifest(demo)
    newer = manifest.model_copy(update={"methods": {**manifest.methods, "telepathy": MethodPart()}})
    assert list(complete(newer).methods) == [*manifest.methods, "phrases"]


@pytest.fixture
def parrot(installed: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """Write the embedded model as a checkpoint of the other package's architecture."""
    with importable(installed["architecture_plugin"]):
        kind, source, folder = ARCHITECTURES["parrot"], BUILTIN / "shakespeare", tmp_path / "parrot"
        shutil.copytree(source, folder)
        names = {f"model.layers.{{}}.{ours}": f"{kind.layers_at}.{{}}.{theirs}"
                 for ours, theirs in kind.layer_names.items()} | dict(kind.outer_names)  # fmt: skip
        renamed = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            module, _, end = name.rpartition(".")
            number = re.search(r"\.(\d+)\.", name)
            plain_name = module.replace(f".{number[1]}.", ".{}.", 1) if number else module
            renamed[names[plain_name].format(number[1] if number else "") + f".{end}"] = tensor
        save_file(renamed, folder / "model.safetensors")
        config = json.loads((source / "config.json").read_text("utf-8")) | {"model_type": "parrot"}
        for ours, theirs in kind.aliases.items():
            config[theirs] = config.pop(ours)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        yield folder


def test_an_architecture_of_another_package_is_exported_and_exact(
    command: Command,  # noqa: F811
    demo: Path,  # noqa: F811
    parrot: Path,
    tmp_path: Path,
) -> None:
    options = ("--format", "int8", "--method", "self-spec", "--trials", 1, "--quick")
    bundles = [tmp_path / "bundle", tmp_path / "plain"]
    for source, bundle in zip((parrot, TARGET), bundles, strict=True):
        assert command("export", source, "-o", bundle, *options).code == 0
    proof = command("verify", bundles[0], "--max-prompts", 2, "--max-new-tokens", 24, "--json").json
    assert proof["methods"]
    assert all(one["exact"] for one in proof["methods"])
    assert read_manifest(bundles[0]).target.facts.architecture == "parrot"
    ours, theirs = (load(bundle).generate(PROMPTS[0], max_new_tokens=NEW).tokens for bundle in bundles)
    assert ours == theirs  # the weights are the same


def test_without_its_package_an_architecture_is_refused(command: Command, parrot: Path, tmp_path: Path) -> None:  # noqa: F811
    text = (parrot / "config.json").read_text("utf-8")
    (parrot / "config.json").write_text(text.replace('"parrot"', '"cockatoo"'), "utf-8")
    refused = command("export", parrot, "-o", tmp_path / "bundle")
    refused.refused(1, "architecture 'cockatoo' is not supported", "parrot", "edgespec.architectures")
