"""Bundles with a draft that has another tokenizer: written, measured, planned, and run as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError, IncompatibleDraft
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.plan_manifest import plan_bundle
from edgespec.runtimes.files.manifest import Manifest, read_manifest
from tests.support import hf
from tests.support.two_tokenizers import byte_level, sentencepiece

NAME = "llama_tied_gqa"
CONFIG = {**hf.CONFIGS[NAME], "vocab_size": 320}
PROMPTS = ("She had been there before. Who would think that", "caf\u00e9 \u6771\u4eac <s> x")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write drafts with other tokenizers: byte-level of other merges and padding, sentencepiece's."""
    folder = tmp_path_factory.mktemp("drafts")
    made = {"byte-level": hf.write_checkpoint(folder / "bytes", {**CONFIG, "vocab_size": 500}, 4)}
    byte_level(made["byte-level"], 490, False)
    other = sentencepiece(folder / "spm", "llama")
    pieces = hf.write_checkpoint(folder / "pieces", {**CONFIG, "vocab_size": other.vocab_size + 7}, 5)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (pieces / file).unlink()
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(folder / "spm" / file, pieces / file)
    return made | {"sentencepiece": pieces}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.write_checkpoint(tmp_path_factory.mktemp("target") / "target", CONFIG, 1)


@pytest.fixture(scope="module")
def bundles(
    tmp_path_factory: pytest.TempPathFactory, target: Path, drafts: dict[str, Path]
) -> dict[str, tuple[Path, Manifest]]:
    made = {}
    for name, draft in drafts.items():
        folder = tmp_path_factory.mktemp("bundles") / name
        options = ExportOptions(str(target), folder, ["speculative"], draft=str(draft), threads=1)
        made[name] = folder, export_model(options, golden=False)
    return made


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_bundle_says_how_its_draft_guesses(bundles: dict[str, tuple[Path, Manifest]], name: str) -> None:
    folder, manifest = bundles[name]
    part = manifest.translation
    assert part is not None
    assert manifest.draft is not None
    assert part == read_manifest(folder).translation
    assert {part.tokens, "draft/tokenizer.json"} <= manifest.files.keys()
    targets = np.fromfile(folder / part.tokens, "<i4")
    assert len(targets) == manifest.draft.facts.vocab
    assert (targets >= 0).sum() == part.shared > 60
    assert part.prefix == ([] if name == "byte-level" else [1])
    (line,) = [note for note in manifest.provenance["notes"] if "another tokenizer" in note]
    assert f"with {part.shared} shared tokens" in line
    assert ("tokenized for the target" in line) is (part.matching == "strings")
    assert manifest.methods["speculative"].measured[0].positions > 0


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("matching", ["strings", "tokens"])
def test_texts_are_plain_texts(
    bundles: dict[str, tuple[Path, Manifest]], tmp_path: Path, name: str, matching: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundles[name][0], folder)
    manifest = json.loads((folder / "edgespec.json").read_text("utf-8"))
    manifest["translation"]["matching"] = matching
    (folder / "edgespec.json").write_text(json.dumps(manifest), "utf-8")
    samplings: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2, "logit_bias": {70: 2.0}},
        {"temperature": 0.9, "top_p": 0.9, "seed": 3, "acceptance": "coupled"},
        {"temperature": 1.0, "seed": 4},
    ]
    drafted = 0
    with load(folder, threads=1) as engine:
        for prompt in PROMPTS:
            for sampling in samplings:
                settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
                plain = engine.generate(prompt, method="ar", **settings)
                result = engine.generate(prompt, method="speculative", fallback=False, **settings)
                assert result.stats.dropped_reason is None
                assert result.lossless
                if sampling.get("acceptance", "coupled") == "coupled" and sampling.get("temperature") != 1.0:
                    assert result.tokens == plain.tokens
                drafted += result.stats.drafted
        whole = engine.generate(PROMPTS[0], method="auto", max_new_tokens=200, ignore_eos=True)
        assert whole.tokens == engine.generate(PROMPTS[0], method="ar", max_new_tokens=200, ignore_eos=True).tokens
        tree = engine.generate(PROMPTS[0], method="speculative", branch=(2,), max_new_tokens=20, fallback=False)
        assert tree.stats.dropped_reason is None
    assert drafted > 100


def test_a_prompt_of_the_draft_is_restored_by_its_own_tokens(
    bundles: dict[str, tuple[Path, Manifest]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from edgespec.engine import prompt_cache

    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_PROMPT_CACHE", "64MiB")
    monkeypatch.setenv("EDGESPEC_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(prompt_cache, "WORTH", 0.0)
    prompt, settings = PROMPTS[0] * 8, {"max_new_tokens": 12, "ignore_eos": True, "fallback": False}
    found, read = [], []
    for _ in range(2):
        with load(bundles["byte-level"][0], threads=1) as engine:
            result = engine.generate(prompt, method="speculative", **settings)  # type: ignore[arg-type]
            found.append(result.tokens)
            read.append(result.stats.reused_tokens)
            engine.prompts.finish()
    assert found[0] == found[1]
    assert read[0] == 0 < read[1]


def test_a_damaged_list_of_tokens_is_refused(bundles: dict[str, tuple[Path, Manifest]], tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundles["byte-level"][0], folder)
    file = folder / "draft" / "target_tokens.bin"
    targets = np.fromfile(file, "<i4")
    for damaged in (targets[:-1], np.full_like(targets, 5), targets + 1_000_000, np.full_like(targets, -7)):
        damaged.tofile(file)
        manifest = json.loads((folder / "edgespec.json").read_text("utf-8"))
        manifest["files"]["draft/target_tokens.bin"] = {"size": damaged.nbytes, "sha256": "0" * 64}
        (folder / "edgespec.json").write_text(json.dumps(manifest), "utf-8")
        with load(folder, threads=1, check=False) as engine, pytest.raises(BundleError, match="different tokens below"):
            engine.generate("x", method="speculative", max_new_tokens=4, fallback=False)


def test_a_plan_counts_the_second_tokenizer(target: Path, drafts: dict[str, Path]) -> None:
    for draft in drafts.values():
        planned = plan_bundle(ExportOptions(str(target), Path("out"), ["speculative"], draft=str(draft)))
        assert planned.translation is not None
        assert planned.files["draft/tokenizer.json"].size > 1000
        assert any("another tokenizer" in line for line in planned.provenance["assumed"])


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    draft = hf.write_checkpoint(tmp_path / "draft", {**CONFIG, "vocab_size": 480}, 3)
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(draft / "tokenizer.json"))
    with pytest.raises(IncompatibleDraft, match="has 480 tokens, the target's 320") as caught:
        export_model(ExportOptions(str(target), tmp_path / "out", ["speculative"], draft=str(draft), threads=1))
    assert "byte-level" in str(caught.value.hint)
