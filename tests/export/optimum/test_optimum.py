"""Calling optimum's exporter: in its stead a pretended one, and the real one where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.errors import UnsupportedModel
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.loading import load_source
from edgespec.export.optimum import model as foreign_model
from edgespec.export.optimum.model import OptimumModel
from edgespec.export.optimum.write import optimum_missing
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from tests.export.optimum.test_foreign import CONFIG, NAME, SEED, refused
from tests.support import hf
from tests.support.foreign import MODEL_TYPE, write_export

MISSING = optimum_missing()  # before a pretended one is imported


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an export by optimum, which tests only read; return its folder."""
    return write_export(tmp_path_factory.mktemp("export"), CONFIG, SEED)


@pytest.fixture
def harbour(tmp_path: Path) -> Path:
    """Write a checkpoint whose ``model_type`` is unknown."""
    folder = hf.write_reference_checkpoint(tmp_path / "harbour", NAME)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}), "utf-8")
    return folder


def test_without_optimum_both_ways_are_named(harbour: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_model, "optimum_missing", lambda: "optimum is not installed here")
    message = refused(f"architecture '{MODEL_TYPE}' is not supported", harbour, tmp_path / "bundle", UnsupportedModel)
    for part in (
        *ARCHITECTURES,
        "optimum is not installed here",
        ".[optimum]",
        "optimum-cli export onnx",
        "extra train",
    ):
        assert part in message


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Give a function that puts package optimum with ``main_export`` of ``body`` first, also for child processes."""
    packages = tmp_path / "packages"

    def put(body: str) -> None:
        for name in ("optimum/exporters/onnx", "torch", "transformers"):
            (packages / name).mkdir(parents=True)
            for folder in (packages / name, *(packages / name).parents):
                if folder == packages:
                    break
                (folder / "__init__.py").touch()
        code = f"def main_export(model, output, task, dtype, device, trust_remote_code):\n    {body}\n"
        (packages / "optimum/exporters/onnx/__init__.py").write_text(code, "utf-8")
        for name in [name for name in sys.modules if name.split(".")[0] in ("optimum", "torch", "transformers")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(packages))
        monkeypatch.setenv("PYTHONPATH", str(packages))

    yield put
    for name, module in list(sys.modules.items()):  # or later tests of this process would find it
        if str(getattr(module, "__file__", None) or "").startswith(str(packages)):
            del sys.modules[name]


def test_optimum_is_called_where_it_is_there(
    harbour: Path, source: Path, tmp_path: Path, pretended: Callable[[str], None]
) -> None:
    check = "assert task == 'text-generation-with-past' and dtype == 'fp32' and not trust_remote_code; "
    pretended(f"import shutil; {check}print('noise'); shutil.copy({str(source / 'model.onnx')!r}, output)")
    options = ExportOptions(str(harbour), tmp_path / "bundle", format="int4", threads=1)
    plan = dry_run(options)  # before optimum was called: by the checkpoint's shapes
    assert isinstance(load_source(options).models.target, OptimumModel)
    manifest = export_model(options, golden=False)
    assert manifest.target.origin == "optimum"
    assert plan["weight_bytes"]["target"] == pytest.approx(manifest.memory["weight_bytes"]["target"], rel=0.1)
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert names >= {"edgespec.json", "model.onnx", "model.data", "tokenizer.json"}
    assert ".optimum" not in names
    assert not any(".optimum" in name for name in manifest.files)
    assert load(tmp_path / "bundle").generate("The", max_new_tokens=5, ignore_eos=True).stats.tokens == 5


@pytest.mark.parametrize(
    "body, message",
    [
        ("raise ValueError('harbour is a custom or unsupported architecture')", "harbour is a custom or unsupported"),
        ("raise KeyError('the cause') from None  # and then advice", "KeyError: 'the cause'"),
        ("import sys; print('KeyError: it\\nadvice', file=sys.stderr); sys.exit(1)", "failed: KeyError: it"),
        ("import sys; sys.exit('only advice')", "failed: only advice"),
        ("import os; os._exit(7)", "exit code 7"),
        ("pass", "optimum wrote no model.onnx"),
    ],
)
def test_a_failed_export_of_optimum_leaves_nothing(
    harbour: Path, tmp_path: Path, pretended: Callable[[str], None], body: str, message: str
) -> None:
    pretended(body)
    refused(message, harbour, tmp_path / "bundle")


def test_pickles_are_not_given_to_optimum(harbour: Path, tmp_path: Path, pretended: Callable[[str], None]) -> None:
    pretended("raise AssertionError('called')")
    (harbour / "model.safetensors").rename(harbour / "pytorch_model.bin")
    refused("only as pickle", harbour, tmp_path / "bundle")


MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, BloomConfig, OPTConfig
torch.manual_seed(0)
AutoModelForCausalLM.from_config({}).eval().save_pretrained(sys.argv[1])
"""
GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[int(token) for token in sys.argv[2].split(",")]])
made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False)
print(",".join(str(int(token)) for token in made[0, ids.shape[1]:]))
"""


MODELS = {
    "opt": "OPTConfig(vocab_size=160, hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2, "
    "num_attention_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1, init_std=0.3)",
    "bloom": "BloomConfig(vocab_size=160, hidden_size=64, n_layer=2, n_head=4, seq_length=256, bos_token_id=0, "
    "eos_token_id=1, pad_token_id=1, initializer_range=0.3)",
}
"""Architectures that edgespec does not emit, and optimum does."""


@pytest.fixture
def optimum() -> None:
    """Skip the test where optimum itself is missing; ``.ci/nightly`` makes an environment for it."""
    if MISSING:
        pytest.skip(f"needs edgespec[optimum], as .ci/nightly installs it: {MISSING}")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODELS)
def test_the_real_optimum(optimum: None, tmp_path: Path, kind: str) -> None:
    """By the command line: optimum makes the graph, the bundle writes transformers' text, `verify` proves it."""
    folder, bundle = tmp_path / kind, tmp_path / "bundle"
    subprocess.run([sys.executable, "-c", MAKE.format(MODELS[kind]), str(folder)], check=True)
    hf.write_tokenizer(folder, CONFIG)
    for command in (
        ("export", folder, "-o", bundle, "--format", "fp32", "--threads", 1, "--context", 128),
        ("verify", bundle, "--max-prompts", 3, "--max-new-tokens", 24, "--threads", 1),
        ("export", folder, "-o", tmp_path / "int4", "--threads", 1, "--context", 128),
        ("verify", tmp_path / "int4", "--max-prompts", 3, "--max-new-tokens", 24, "--threads", 1),
    ):
        made = subprocess.run([sys.executable, "-m", "edgespec", *map(str, command)], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
    assert "exported by optimum" in " ".join(
        subprocess.run(
            [sys.executable, "-m", "edgespec", "info", str(bundle)], check=True, capture_output=True, text=True
        ).stdout.split()
    )
    engine = load(bundle, threads=1)
    prompt = engine.codec.encode("The harbour lights")
    listed = ",".join(map(str, prompt))
    run = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), listed], check=True, capture_output=True, text=True
    )
    expected = [int(token) for token in run.stdout.split(",")]
    for method in ("ar", "ngram"):
        assert engine.generate(prompt, method=method, max_new_tokens=30, ignore_eos=True).tokens == expected
