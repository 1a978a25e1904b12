"""edgespec as a backend of transformers.exporters: exported, saved, loaded and run as transformers' own are."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import BundleError, ExportError, InvalidRequest
from tests.support import hf

torch = pytest.importorskip("torch", reason="needs edgespec[transformers]")
exporters = pytest.importorskip("transformers.exporters", reason="needs transformers 5.23 or newer")
NAME = "llama_tied_gqa"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load a small model with its tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = hf.write_reference_checkpoint(tmp_path_factory.mktemp("source") / "model", NAME)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def config(**options: Any) -> dict[str, Any]:
    return {"export_format": "edgespec", "options": {"format": "fp32", "threads": 1, **options}}


def exporter() -> Any:
    importlib.import_module("edgespec.exporter")  # registers it
    return exporters.AutoHfExporter.from_config(config())


def test_an_export_is_saved_and_computes_the_model_s_logits(model: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 9, 33, 7, 41, 5]])
    exported = exporter().export(model, {"input_ids": ids}, config(methods=["ngram"]))
    assert (str(exported.export_format), list(exported.components)) == ("edgespec", ["model"])
    exported.save_pretrained(tmp_path / "exported")
    again = exporters.ExportedModel.from_pretrained(tmp_path / "exported", threads=1)
    expected = model(ids).logits
    for one in (exported, again):
        torch.testing.assert_close(
            one(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, expected, atol=1e-3, rtol=0
        )
    with edgespec.load(str(exported.program), threads=1) as engine:
        assert "ngram" in engine.methods
        text = engine.generate(ids[0].tolist(), max_new_tokens=8, ignore_eos=True, temperature=0.0).tokens
    found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, ids.shape[1] :]
    assert text == found.tolist()


def test_for_generation_it_is_one_component(model: Any) -> None:
    exported = exporter().export_for_generation(model, {"input_ids": torch.tensor([[5, 9]])}, config())
    assert list(exported.components) == ["model"]


def test_what_cannot_be_followed_is_refused_by_name(model: Any, tmp_path: Path) -> None:
    inputs = {"input_ids": torch.tensor([[5, 9]])}
    with pytest.raises(InvalidRequest, match="'formt'"):
        exporter().export(model, inputs, config(formt="int4"))
    with pytest.raises(ExportError, match="nowhere"):
        exporter().export(model, inputs, config() | {"tokenizer": str(tmp_path / "nowhere")})
    exported = exporter().export(model, inputs, config())
    with pytest.raises(InvalidRequest, match="device cuda"):
        exported.to("cuda")
    (tmp_path / "model.edgespec").write_bytes(b"no zip")
    with pytest.raises(BundleError, match="not a saved bundle"):
        type(exporter()).load_program(tmp_path / "model.edgespec")
