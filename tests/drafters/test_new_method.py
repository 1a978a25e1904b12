"""A method added as docs/dev/a-method.md says, with the code of that page, works wherever methods do."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.drafters import registry
from edgespec.drafters.registry import METHODS, Method, complete
from edgespec.engine.loading import load
from edgespec.runtimes.files.manifest import MethodPart, read_manifest
from tests.cli.conftest import Command, command, demo  # noqa: F401
from tests.conftest import PROMPTS
from tests.support.planning import predicting
from tests.support.toy import hash_logits, hash_target, plain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dev" / "a-method.md"
NEW = 48


def code(begins: str) -> str:
    """Return the page's one Python block that begins with ``begins``."""
    (block,) = [found for found in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
                if found.startswith(begins)]  # fmt: skip
    return str(block)


@pytest.fixture(autouse=True)
def phrases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the page's module and its entry in the registry; return the module."""
    module = ModuleType("edgespec.drafters.phrases")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code('"""'), module.__dict__)
    entry: dict[str, Method] = eval("{" + code('"phrases"') + "}", vars(registry))
    monkeypatch.setitem(METHODS, "phrases", entry["phrases"])
    return module


def test_it_writes_the_text_of_plain_decoding_whatever_is_in_its_book(phrases: ModuleType) -> None:
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


def test_it_runs_with_a_bundle_that_was_exported_before(demo: Path, phrases: ModuleType) -> None:  # noqa: F811
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


def test_auto_chooses_from_it_by_its_prediction(demo: Path) -> None:  # noqa: F811
    made = load(demo)
    manifest = predicting(made.bundle.manifest, {"phrases": 1.5, "ngram": 1.1})
    made.bundle = replace(made.bundle, manifest=manifest)
    assert [(one.name, one.promise) for one in made.choose(None).candidates] == [("phrases", 1.5), ("ngram", 1.1)]
    found = made.generate(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
    assert found.tokens == made.generate(PROMPTS[0], method="ar", max_new_tokens=NEW, ignore_eos=True).tokens
    assert any(line.startswith("estimated speeds: phrases ") for line in found.details)  # who wins is the clock's


def test_commands_know_it(command: Command, demo: Path) -> None:  # noqa: F811
    run = command("run", demo, "--prompt", "My lord,", "--method", "phrases", "--max-new-tokens", 16, "--json").json
    assert run["method_used"] == "phrases"
    proof = command("verify", demo, "--method", "phrases", "--limit", 2, "--max-new-tokens", 24, "--json").json
    assert [(one["method"], one["exact"]) for one in proof["methods"]] == [("phrases", True)]
    quick = ("--limit", 1, "--repeats", 2, "--max-new-tokens", 16)
    rows = command("bench", demo, "--method", "phrases", *quick, "--json").json
    assert "phrases" in str(rows)
    planned = command("plan", demo, "--method", "phrases", "--budget", "1GiB", "--json").json
    assert "phrases" in str(planned)
    refused = command("run", demo, "--prompt", "x", "--method", "telepathy")
    assert "phrases" in refused.err


def test_an_unknown_method_of_a_bundle_is_left_out(demo: Path) -> None:  # noqa: F811
    """A bundle of a newer version may have methods that this one does not know."""
    manifest = read_manifest(demo)
    newer = manifest.model_copy(update={"methods": {**manifest.methods, "telepathy": MethodPart()}})
    assert list(complete(newer).methods) == [*manifest.methods, "phrases"]


def test_importing_one_drafter_imports_no_other() -> None:
    listed = "import sys, edgespec.drafters.registry, edgespec.drafters.{}; print(*sys.modules)"
    drafters = {method.builder.partition(":")[0] for name, method in METHODS.items() if name != "phrases"}
    for name in ("plain", "ngram", "speculative"):
        ran = subprocess.run([sys.executable, "-c", listed.format(name)], capture_output=True, text=True, check=True)
        assert drafters & set(ran.stdout.split()) == {f"edgespec.drafters.{name}"}
