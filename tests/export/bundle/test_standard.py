"""The graph for other programs: what it computes, and that they open it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.engine.loading import load
from edgespec.export.bundle.writer import genai_config
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import SamplingPart, TokenizerFacts
from edgespec.runtimes.slots.shared import Bound
from tests.conftest import PROMPTS, THREADS, Reference, Written
from tests.support import elsewhere, hf

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "open.md"
ALL = {config["model_type"]: name for name, config in reversed(hf.CONFIGS.items())}
CASES = sorted(set(ALL.values()) - hf.NATIVE_ONLY)
RANDOM = "llama_tied_gqa", *(ALL[kind] for kind in ("gpt2", "gemma3_text", "gpt_neox"))
# optimum takes hidden size over heads for the size of a head where it does not know an architecture, such as Gemma 2
OPENED = [*(("onnxruntime-genai", name) for name in (*FORMATS, *RANDOM, ALL["gemma2"])),
          *(("optimum", name) for name in ("int4", "w8a8", *RANDOM))]  # fmt: skip
LENGTH = 24
ATOL = 1e-4

Floats = NDArray[np.float32]


def passes(tokens: NDArray[np.int64], sizes: list[int]) -> Iterator[tuple[int, dict[str, NDArray[np.int64]]]]:
    """Cut ``tokens`` into passes of ``sizes`` rows, the last repeated; yield the tokens before each, and its inputs."""
    past = 0
    while past < len(tokens):
        n = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - past)
        yield (
            past,
            {
                "input_ids": tokens[past : past + n][None],
                "attention_mask": np.ones((1, past + n), np.int64),
                "position_ids": np.arange(past, past + n)[None],
            },
        )
        past += n


def caches(session: Any, size: int) -> dict[str, Floats]:
    ports = [port for port in session.get_inputs() if port.name.startswith("past_key_values.")]
    return {port.name: np.zeros((1, port.shape[1], size, port.shape[3]), np.float32) for port in ports}


def grown(session: Any, tokens: NDArray[np.int64], sizes: list[int]) -> Floats:
    """Logits [n, vocab] where every present is a new tensor."""
    cache, names, found = caches(session, 0), [port.name for port in session.get_outputs()], []
    assert names[0] == "logits"
    for _, given in passes(tokens, sizes):
        made = dict(zip(names, session.run(None, given | cache), strict=True))
        cache = {name: made[name.replace("past_key_values", "present")] for name in cache}
        found.append(made["logits"][0])
    return np.concatenate(found)


def in_place(session: Any, tokens: NDArray[np.int64], sizes: list[int]) -> Floats:
    """Run passes with past and present in one buffer, as onnxruntime-genai binds them; return logits [n, vocab]."""
    cache = {name: Bound(array) for name, array in caches(session, len(tokens) + 9).items()}
    found = []
    for _, given in passes(tokens, sizes):
        binding = session.io_binding()
        for name, array in given.items():
            binding.bind_cpu_input(name, array)
        for name, bound in cache.items():
            binding.bind_ortvalue_input(name, bound.value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), bound.value)
        binding.bind_output("logits", "cpu")
        session.run_with_iobinding(binding)
        found.append(binding.get_outputs()[-1].numpy()[0])
    return np.concatenate(found)


@pytest.mark.parametrize("name", CASES)
def test_architectures_equal_transformers(
    writer: Callable[..., Written], reference: Callable[[str], Reference], name: str
) -> None:
    """By pieces into new tensors, and row by row in place."""
    known, session = reference(name), writer("stock", name).model("standard").session
    for logits in (grown(session, known.tokens, [7, 40]), in_place(session, known.tokens, [7, 1])):
        np.testing.assert_allclose(logits[known.rows], known.logits, atol=ATOL)


def test_one_sequence_a_pass(writer: Callable[..., Written]) -> None:
    """Two would need masks with holes, which attention does not read: they are refused."""
    session = writer("stock", "llama_tied_gqa").model("standard").session
    (_, given), cache = next(passes(np.arange(2, 9), [7])), caches(session, 0)
    both = {name: np.repeat(array, 2, 0) for name, array in (given | cache).items()}
    with pytest.raises(Exception, match="Expected: 1"):
        session.run(None, both)


def test_what_a_bundle_of_native_operators_has(writer: Callable[..., Written]) -> None:
    made = writer("native", "llama_tied_gqa")
    assert "standard" not in made.part.graphs
    assert not (made.folder / "model.onnx").exists()


# -- other programs --------------------------------------------------------------------------------------------------


def expected(bundle: Path, prompt: str) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and what edgespec writes after them by plain decoding."""
    with load(bundle, threads=THREADS, operators="stock") as engine:
        result = engine.generate(prompt, method="ar", max_new_tokens=LENGTH, ignore_eos=True)
        return [int(token) for token in engine.codec.encode(prompt)], result.tokens


def programs(page: Path) -> list[str]:
    """Return the Python blocks of ``page``."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


ALONE = """
import json, runpy, sys
sys.modules["edgespec"] = None  # importing it fails
found = runpy.run_path(sys.argv.pop(1))
print(json.dumps(found["tokens"]))
"""


@pytest.mark.parametrize("form", FORMATS)
def test_the_program_of_the_page_writes_what_edgespec_writes(
    bundles: Callable[..., Path], tmp_path: Path, form: Format
) -> None:
    program = programs(PAGE)[0]
    assert "edgespec" not in program
    assert len(program.strip().splitlines()) <= 30
    (tmp_path / "program.py").write_text(program, "utf-8")
    bundle = bundles("stock", form)
    for prompt in PROMPTS[:3]:
        given, written = expected(bundle, prompt)
        command = [sys.executable, "-c", ALONE, str(tmp_path / "program.py"), str(bundle), prompt, str(LENGTH)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1]) == given + written


@pytest.fixture(scope="module")
def random_bundles(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Name of a configuration -> a bundle of it, in fp32: texts of random models have near-ties."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "bundle"
            source = str(checkpoint(name))
            export_model(
                ExportOptions(source, made[name], [], "fp32", operators="stock", threads=THREADS), golden=False
            )
        return made[name]

    return get


@pytest.mark.nightly
@pytest.mark.parametrize("package, name", OPENED)
def test_another_program_writes_what_edgespec_writes(
    bundles: Callable[..., Path], random_bundles: Callable[[str], Path], package: str, name: str
) -> None:
    elsewhere.python_with(package)
    trained = name in FORMATS
    bundle = bundles("stock", name) if trained else random_bundles(name)
    prompt = PROMPTS[1] if trained else "There was nothing left to do but wait. She had"
    given, written = expected(bundle, prompt)
    assert elsewhere.generate(package, bundle, given, LENGTH) == written


def test_what_genai_is_told(bundles: Callable[..., Path]) -> None:
    bundle = bundles("stock", "int4")
    manifest, told = Bundle.open(bundle).manifest, json.loads((bundle / "genai_config.json").read_text("utf-8"))
    decoder = told["model"]["decoder"]
    session = ort.InferenceSession(str(bundle / decoder["filename"]), providers=["CPUExecutionProvider"])
    layers = manifest.target.facts.layers
    for ports, named in ((session.get_inputs(), decoder["inputs"]), (session.get_outputs(), decoder["outputs"])):
        wanted = {name % layer for name in named.values() for layer in range(layers) if "%d" in name}
        assert wanted | {name for name in named.values() if "%d" not in name} == {port.name for port in ports}
    assert told["model"]["eos_token_id"] == manifest.tokenizer.eos
    assert told["search"]["max_length"] == manifest.target.facts.context
    assert told["search"]["do_sample"] is False
    assert "genai_config.json" in manifest.files


def test_genai_is_told_how_a_model_asks_to_be_sampled(bundles: Callable[..., Path]) -> None:
    target = Bundle.open(bundles("stock", "int4")).manifest.target
    asks = SamplingPart(temperature=0.7, top_k=10**6, top_p=0.8)
    text = genai_config(target, TokenizerFacts(), asks)
    assert text is not None
    told, vocab = json.loads(text), target.facts.vocab
    settings = {"do_sample": True, "temperature": 0.7, "top_k": vocab, "top_p": 0.8, "repetition_penalty": 1.0}
    assert settings.items() <= told["search"].items()
    assert told["model"]["eos_token_id"] == [vocab - 1]  # there must be one
    assert genai_config(Bundle.open(bundles("native", "int4")).manifest.target, TokenizerFacts(), asks) is None
