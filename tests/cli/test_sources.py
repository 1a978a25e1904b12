"""Checkpoints of every kind, from export over run to verify."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from edgespec.export.source.source import Checkpoint
from tests.cli.conftest import Command
from tests.support import hf, packed
from tests.support.checkpoints import write_adapter
from tests.support.gguf_files import write_gguf

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]
QUICK = ("--threads", 2, "--context", 128, "--format", "int4")
KINDS = ("gptq4_act_asym", "compressed_fp8_rows")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder, with temporary files below it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def works(command: Command, bundle: str, said: str | None = None) -> dict[str, object]:
    """Run and verify a bundle; its manifest says what was special about the source. Returns the provenance."""
    result = command("run", bundle, "--prompt", "The harbour", "--max-new-tokens", 12, "--json")
    assert result.json["usage"]["completion_tokens"] > 0 if "usage" in result.json else result.code == 0
    proof = command("verify", bundle, "--max-prompts", 2, "--max-new-tokens", 16, "--json").json
    assert proof["passed"] is True
    provenance = json.loads((Path(bundle) / "edgespec.json").read_text("utf-8"))["provenance"]
    notes = provenance.get("notes", [])
    assert (said is None) == (not notes)
    assert said is None or any(said in note for note in notes)
    return dict(provenance)


def same_weights(command: Command, bundle: str, truth: dict[str, np.ndarray], elsewhere: Path) -> None:
    """Return the bundle has the very weights of an export of the float checkpoint that the source means."""
    folder = hf.write_checkpoint(elsewhere / "plain", CONFIG, 3)
    save_file(truth, folder / "model.safetensors")
    assert command("export", folder, *QUICK, "-o", "expected").code == 0
    assert (Path(bundle) / "model.data").read_bytes() == Path("expected/model.data").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_checkpoints(command: Command, elsewhere: Path, kind: str) -> None:
    hf.write_checkpoint(elsewhere / "model", CONFIG, 3)
    truth = packed.pack_checkpoint(elsewhere / "model", *packed.KINDS[kind])
    method = packed.KINDS[kind][1]["quant_method"]
    plan = command("export", "model", "--dry-run", "--json").json
    assert method in plan["notes"][0]
    assert f"note: the checkpoint is quantized ({method}" in command("export", "model", "--dry-run").out
    result = command("export", "model", *QUICK, "-o", "bundle")
    assert result.code == 0, result.err
    assert f"note: the checkpoint is quantized ({method}" in result.out
    works(command, "bundle", method)
    same_weights(command, "bundle", truth, elsewhere)


def test_a_gguf_file(command: Command, elsewhere: Path) -> None:
    truth = write_gguf(elsewhere / "tiny-Q8_0.gguf", NAME, kind=GGMLQuantizationType.Q8_0)
    assert command("export", "tiny-Q8_0.gguf", "--dry-run", "--json").json["model"] == "tiny-Q8_0.gguf"
    result = command("export", "tiny-Q8_0.gguf", *QUICK)
    assert result.code == 0, result.err
    assert result.out.startswith("tiny-Q8_0-edge: ")
    provenance = works(command, "tiny-Q8_0-edge", "the file is quantized (Q8_0)")
    assert provenance["model"] == "tiny-Q8_0.gguf"
    same_weights(command, "tiny-Q8_0-edge", truth, elsewhere)


@pytest.mark.parametrize("named", [True, False])
def test_an_adapter(command: Command, elsewhere: Path, named: bool) -> None:
    """``export BASE --adapter DIR``, and ``export DIR`` where it names its base."""
    folder = hf.write_checkpoint(elsewhere / "base", CONFIG, 3)
    write_adapter(elsewhere / "lora", CONFIG, base=folder)
    arguments = ("lora",) if named else ("base", "--adapter", "lora")
    assert command("export", *arguments, *QUICK, "-o", "bundle").code == 0
    provenance = works(command, "bundle", "the adapter lora is merged")
    assert provenance.get("adapter") == (None if named else "lora")
    checkpoint = Checkpoint.open(folder, elsewhere / "lora")
    same_weights(command, "bundle", {name: checkpoint.read(name) for name in checkpoint.index}, elsewhere)
    assert command("export", "base", *QUICK, "-o", "without").code == 0
    assert Path("without/model.data").read_bytes() != Path("bundle/model.data").read_bytes()


def test_fp32_and_a_gguf_draft(command: Command, elsewhere: Path) -> None:
    write_gguf(elsewhere / "model.gguf", NAME)
    hf.write_checkpoint(elsewhere / "model", CONFIG, 3)
    drafting = ("--method", "speculative", "--draft", "model.gguf", "--format", "fp32")
    assert command("export", "model", *QUICK, *drafting, "-o", "bundle").code == 0
    works(command, "bundle")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("bitsandbytes", ["already quantized (bitsandbytes)", "unquantized checkpoint"]),
        ("gguf", ["architecture 'mamba' is not supported; supported: llama"]),
        ("two", ["holds 2 GGUF files"]),
        ("dora", ["use_dora", "merge_and_unload"]),
        ("far", ["is not a local folder", "--adapter"]),
        ("none", ["has no adapter_config.json"]),
    ],
)
def test_what_is_refused_leaves_nothing(command: Command, elsewhere: Path, kind: str, words: list[str]) -> None:
    arguments: tuple[str, ...] = ("model",)
    folder = hf.write_checkpoint(elsewhere / "model", CONFIG, 3)
    if kind == "bitsandbytes":
        packed.pack_checkpoint(folder, packed.KINDS["gptq4"][0], {"quant_method": kind})
    elif kind == "gguf":
        write_gguf(elsewhere / "model.gguf", NAME, architecture="mamba")
        arguments = ("model.gguf",)
    elif kind == "two":
        (folder / "model.safetensors").unlink()
        for name in ("a", "b"):
            write_gguf(folder / f"{name}.gguf", NAME)
    elif kind in ("dora", "far"):
        write_adapter(elsewhere / "lora", CONFIG, use_dora=kind == "dora", base="someone/model")
        arguments = ("model", "--adapter", "lora") if kind == "dora" else ("lora",)
    else:
        arguments = ("model", "--adapter", "model")
    before = sorted(elsewhere.rglob("*"))
    for more in ((), ("--dry-run",)):
        command("export", *arguments, "-o", "out", *more).refused(1, *words)
        assert sorted(elsewhere.rglob("*")) == before
    assert not list((elsewhere.parent / "temporary").iterdir())
