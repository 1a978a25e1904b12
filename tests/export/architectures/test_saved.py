"""Checkpoints as transformers saves them can be read, and so can those with the names that models have in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import EdgespecError
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.runtimes.files.json_file import parse_json
from tests.conftest import Reference
from tests.export.architectures.test_architectures import NAMES, PROMPT, assert_close
from tests.support import hf, saved, seq2seq
from tests.support.zoo import WITHOUT_REFERENCE

LENGTH = 12
ROUNDING = 5e-4  # of models with random weights; the reference's own tests define its tolerance


def test_every_architecture_is_kept_as_it_is_saved() -> None:
    kept = *map(saved.saved, hf.CONFIGS), *map(seq2seq.saved, seq2seq.CASES)
    assert {one["config"]["model_type"] for one in kept} == set(ARCHITECTURES) - WITHOUT_REFERENCE


def test_checkpoints_of_the_tests_are_what_is_kept(checkpoint: Callable[[str], Path]) -> None:
    """No test can rely on names that exist only in memory; models whose names differ are listed."""
    other = {hf.CONFIGS[name]["model_type"] for name in NAMES if saved.names_differ(name, hf.shapes(hf.CONFIGS[name]))}
    assert {"lfm3", "olmo_hybrid", "qwen3_moe", "granitemoe", "granitemoehybrid", "lfm2_moe", "olmoe"} <= other
    for name in NAMES:
        assert saved.described(checkpoint(name)) == saved.saved(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_in_memory_and_older_configurations_are_read(
    tmp_path: Path, reference: Callable[[str], Reference], name: str
) -> None:
    """As transformers 4, and programs that save a model's state as it is, write them."""
    arch = open_model(hf.write_reference_checkpoint(tmp_path / name, name, in_memory=True), hf.CONTEXTS.get(name))
    known = reference(name)
    rows = known.rows[known.rows < 2 * PROMPT]
    assert_close(reference_logits(arch, known.tokens[: 2 * PROMPT].tolist(), rows.tolist()), known.logits[: len(rows)])


@pytest.mark.parametrize("text", ['{"a": [0.0, Infinity]}', '{"a": [0.0, {"__float__": "Infinity"}]}'])
def test_infinities_as_either_version_writes_them(text: str) -> None:
    assert parse_json(text, infinite=True) == {"a": [0.0, float("inf")]}
    for wrong in (text.replace("Infinity", "NaN"), text.replace('"a"', '"a": 1, "a"')):
        with pytest.raises(ValueError, match=r"NaN is no number|twice"):
            parse_json(wrong, infinite=True)


@pytest.mark.parametrize("limit", [[0.1, 0.2], [0.0], "x", {"a": 1}, [0.0, {"__float__": 3}], 5])
def test_a_time_step_limit_is_refused_in_words(checkpoint: Callable[[str], Path], tmp_path: Path, limit: Any) -> None:
    source, folder = checkpoint("granite_hybrid_dense"), tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = saved.saved("granite_hybrid_dense")["config"] | {"time_step_limit": limit}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(EdgespecError, match=r"time_step_limit|__float__|no number"):
        open_model(folder, None)


MIXED = {"rope_type": "default", "rope_theta": 1e4, "full_attention": {"rope_type": "default", "rope_theta": 500.0}}


@pytest.mark.parametrize("name", ["llama_tied_gqa", "qwen3_tied", "olmo2_mha", "qwen3_5_delta"])
def test_rotations_for_all_layers_and_by_kind_are_not_mixed(tmp_path: Path, name: str) -> None:
    """It had made a bundle that could not be opened."""
    folder = hf.write_reference_checkpoint(tmp_path / name, name)
    config = saved.saved(name)["config"] | {"rope_parameters": MIXED}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(EdgespecError, match="rope_parameters holds 'full_attention'"):
        open_model(folder, None)


def test_rotations_by_kind_beside_others_are_read(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    """An architecture with a rotation for each kind of layers takes those, as transformers does."""
    folder = hf.write_reference_checkpoint(tmp_path / "model", "gemma3_new")
    config = saved.saved("gemma3_new")["config"]
    config = config | {"rope_parameters": {**config["rope_parameters"], "rope_theta": 3.0, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    mixed, plain = open_model(folder, None), open_model(checkpoint("gemma3_new"), None)
    assert mixed.facts == plain.facts
    tokens = list(range(2, 20))
    np.testing.assert_array_equal(reference_logits(mixed, tokens), reference_logits(plain, tokens))


# -- with transformers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_here_is_read(tmp_path: Path, name: str) -> None:
    """Files of the installed version are read the way that version reads them."""
    pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    import torch
    from transformers import CONFIG_MAPPING

    config = hf.CONFIGS[name]
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {config['model_type']}")
    model = saved.new_model(config, "float32")
    generator = np.random.Generator(np.random.PCG64(1))
    with torch.no_grad():
        for values in model.parameters():  # fresh weights are so small that a wrong one would be missed
            noise = torch.from_numpy(generator.standard_normal(tuple(values.shape)).astype(np.float32))
            values += noise / max(1.0, values.shape[-1]) ** 0.5 if values.dim() > 1 else 0.1 * noise
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(2).integers(2, config["vocab_size"], LENGTH)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].float().numpy()
    got = reference_logits(open_model(tmp_path, hf.CONTEXTS.get(name)), tokens.tolist())
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING * max(1.0, float(expected.std())))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_transformers_saves(name: str) -> None:
    transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers 5")
    if transformers.__version__ != (saved.REFERENCE / "version.txt").read_text("utf-8").strip():
        pytest.skip("another version of transformers than the kept files are of")
    assert saved.save(hf.CONFIGS[name], hf.DTYPES[name]) == saved.saved(name)
