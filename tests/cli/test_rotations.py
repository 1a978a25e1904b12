"""Rotations that transformers changes with the length of a text, and an export chooses once: it says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.engine.loading import load
from edgespec.export.architectures.words import as_used_for
from edgespec.export.bundle.model import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.files.manifest import read_manifest
from tests.cli.conftest import Command
from tests.support import saved

SHORT = 96
"""Tokens that `phi3_short_partial` was first trained on; it goes to 512."""


def test_the_export_warns_and_says_what_it_is(
    command: Command, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Parity is low where short texts are rotated as long ones: it is measured against what transformers does."""
    text = tmp_path / "text.txt"
    text.write_text("The harbour lights came on one after another. " * 3, "utf-8")
    options = ("--format", "fp32", "--threads", 1, "--calibration", text)
    source, found = checkpoint("phi3_short_partial"), {}
    for name, more in (("long", ()), ("short", ("--context", SHORT))):
        made = command("export", source, "-o", tmp_path / name, *options, *more)
        assert made.code == 0, made.err
        warned = f"warning: texts of up to {SHORT} tokens" in made.err and f"--context {SHORT}" in made.err
        with load(tmp_path / name, threads=1) as engine:
            said = [one for one in engine.generate("The", max_new_tokens=3).approximations if "rotation" in one]
        found[name] = warned, bool(said), read_manifest(tmp_path / name).parity
    assert [one[:2] for one in found.values()] == [(True, True), (False, False)]
    assert found["short"][2]["logit_max_error"] < 1e-3
    assert read_manifest(tmp_path / "long").cost["depth"] <= SHORT  # tokens of the text that was measured
    assert found["long"][2]["logit_max_error"] > 0.05
    assert "differs the rotation" in " ".join(command("info", tmp_path / "long").out.split())
    assert "differs" not in command("info", tmp_path / "short").out


@pytest.mark.parametrize("context", [SHORT, None])
def test_within_the_trained_length_nothing_differs(checkpoint: Callable[[str], Path], context: int | None) -> None:
    """The source as it is used for a text has the short factors for short ones, whatever the export's context."""
    arch, tokens = open_model(checkpoint("phi3_short_partial"), context), list(range(2, 42))
    short = reference_logits(open_model(checkpoint("phi3_short_partial"), SHORT), tokens)
    np.testing.assert_array_equal(reference_logits(as_used_for(arch, len(tokens)), tokens), short)
    assert np.abs(reference_logits(arch, tokens) - short).max() > 0.05 or context == SHORT
    assert as_used_for(arch, SHORT + 1) is arch


@pytest.mark.parametrize("length", [40, 120])
def test_the_source_is_used_as_transformers_does(checkpoint: Callable[[str], Path], length: int) -> None:
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    import torch
    from transformers import AutoModelForCausalLM

    folder = checkpoint("phi3_short_partial")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens = np.random.default_rng(3).integers(2, saved.saved("phi3_short_partial")["config"]["vocab_size"], length)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    arch = as_used_for(open_model(folder, None), length)
    np.testing.assert_allclose(reference_logits(arch, tokens.tolist()), expected, rtol=0, atol=2e-4)
