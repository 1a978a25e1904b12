"""Predicted peaks against processes as they run, and within limits of private memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from benchmarks.memory import compare, measure
from benchmarks.shapes import TRANSLATORS, write_shape
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of, process_bytes
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Operators, read_manifest
from edgespec.runtimes.options import RunOptions
from tests.conftest import LARGE, OPERATORS, write_large
from tests.support import hf
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

RUN = """
import sys
from edgespec.engine.engine import Engine
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.process import peak_bytes

folder, method, graph = sys.argv[1:]
operators = "native" if graph == "native" else "stock"
engine = Engine(Bundle.open(folder), LoadOptions(threads=1, operators=operators, budget="off"), graph=graph)
stream = engine.stream(
    list(range(5, 25)), method=method, max_new_tokens=40, ignore_eos=True, adaptive=False, gamma=4
)
for chunk in stream:
    pass
decoded = peak_bytes()
result = stream.result
print(decoded, result.peak_bytes, result.stats.drafted, result.tokens)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model of more than 100 million parameters as an int4 bundle with self-speculation."""
    folder = tmp_path_factory.mktemp("large")
    assert write_large(folder / "model", LARGE) > 100_000_000
    hf.write_tokenizer(folder / "model", LARGE)
    skip = folder / "skip.json"
    skip.write_text(json.dumps({"attention": [3, 5, 7], "mlp": [2, 6]}), "utf-8")
    options = ExportOptions(
        str(folder / "model"),
        folder / "bundle",
        ["self-spec"],
        "int4",
        context=128,
        skip_set=skip,
        threads=2,
        quantizer="rtn",
    )
    export_model(options, golden=False)
    return options.output


def run(bundle: Path, method: str, graph: str) -> tuple[int, int, int, str]:
    """Peak resident bytes of a fresh process after decoding and with its result, its guesses, and its tokens."""
    command = [sys.executable, "-c", RUN, str(bundle), method, graph]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    decoded, peak, drafted, tokens = ran.stdout.split(" ", 3)
    return int(decoded), int(peak), int(drafted), tokens


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """Peak resident bytes of plain decoding by kind of operators, as the tests find them."""
    return {}


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_self_speculation_needs_no_memory_of_its_own(large: Path, operators: Operators, peaks: dict[str, int]) -> None:
    weights = Bundle.open(large).manifest.files["model.data"].size
    main = "native" if operators == "native" else "gated"
    if operators == "stock":
        run(large, "ar", main)  # converts the weights, which takes additional memory
    plain, _, none, expected = run(large, "ar", main)
    fastest = plain if operators == "native" else run(large, "ar", "plain")[0]
    drafting, peak, drafted, tokens = run(large, "self-spec", main)
    peaks[operators] = plain
    assert none == 0
    assert drafted > 10
    assert tokens == expected
    assert plain > weights  # the model was in memory, so the comparison says something
    assert drafting < 1.02 * plain
    assert drafting < 1.02 * fastest
    # once per process, the result's `exact` is probed: logits of nine rows, which are much for so small a model
    assert peak < 1.04 * plain


@pytest.mark.usefixtures("native")
def test_native_operators_need_less_memory_than_stock_ones(large: Path, peaks: dict[str, int]) -> None:
    """Weights are used in the mapped file, once; ONNX Runtime packs its own copy in memory."""
    weights = Bundle.open(large).manifest.files["model.data"].size
    for operators, graph in (("stock", "plain"), ("native", "native")):
        if operators not in peaks:
            run(large, "ar", graph)  # a conversion is not what is compared
            peaks[operators] = run(large, "ar", graph)[0]
    assert peaks["native"] < peaks["stock"] - weights // 4


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name, draft", [("opus-mt", None), ("flan-t5-base", "t5-small"), ("whisper-small", None)])
def test_encoder_decoders_take_what_is_planned(tmp_path: Path, name: str, draft: str | None) -> None:
    """Within 5 % of the peak, in the shapes of published models."""
    write_shape(TRANSLATORS[name], tmp_path / "made", "int8", 448, TRANSLATORS[draft] if draft else None)
    use = RunOptions("speculative" if draft else "ngram", "native", 448, gamma=4, threads=2)
    predicted = memory_of(read_manifest(tmp_path / "made"), use, process_bytes())
    assert abs(compare(predicted, measure(tmp_path / "made", use))["peak"]["error"]) < 0.05


CLOSE = """
import gc, sys
import edgespec
from edgespec.planning.footprint import resident_now

gc.disable()
folder, operators = sys.argv[1:]
how = {"threads": 1, "operators": operators, "budget": "off"}
with edgespec.load(folder, **how) as engine:  # what the libraries keep for good is there afterwards
    engine.generate([5, 6], method="self-spec", max_new_tokens=4)
before = resident_now()[0]
engine = edgespec.load(folder, **how)
engine.generate(list(range(5, 25)), method="self-spec", max_new_tokens=40)
held = resident_now()[0]
engine.close()
print(before, held, resident_now()[0])
"""


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_closing_gives_the_memory_back(large: Path, operators: Operators) -> None:
    command = [sys.executable, "-c", CLOSE, str(large), operators]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    before, held, after = map(int, ran.stdout.split())
    packed = 40 << 20  # of 100 million weights ONNX Runtime packs this much at least; native ones stay in the file
    assert held - before > (packed if operators == "stock" else 1 << 20)
    assert after - before < 6 << 20


RESERVED = 90 << 20  # what a process and its libraries reserve and never touch, which such a limit counts as well
SHAPE: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
         "max_position_embeddings": 4096}  # fmt: skip
DRAFT = SHAPE | {"hidden_size": 1024, "intermediate_size": 4096}
PROMPT, NEW = 1200, 8  # tokens
LIMIT = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""
COMMAND = (
    LIMIT
    + """
from edgespec.__main__ import main
main()
"""
)
BATCH = (
    LIMIT
    + """
import edgespec
bundle, operators, length, new, budget = sys.argv[1:]
engine = edgespec.load(bundle, threads=1, operators=operators, budget=budget, check=False)
prompts = [[5 + at] * int(length) for at in range(6)]
results = engine.generate_batch(prompts, batch=6, method="ar", max_new_tokens=int(new), ignore_eos=True)
print([len(result.tokens) for result in results])
"""
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small target with much KV (32 KiB a token in float32), and a draft that is far larger than its target."""
    folder = tmp_path_factory.mktemp("limits")
    for name, config in (("target", SHAPE), ("draft", DRAFT)):
        write_large(folder / name, config)
        hf.write_tokenizer(folder / name, config)
    options = ExportOptions(
        str(folder / "target"), folder / "bundle", ["speculative"], "fp32", draft=str(folder / "draft"), threads=2
    )
    export_model(options, golden=False)
    return options.output


def limited(limit: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process with ``limit`` bytes of private memory."""
    command = [sys.executable, "-c", code, str(limit), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[3])


def peak(bundle: Path, method: str, operators: Operators, context: int, batch: int = 1) -> int:
    use = RunOptions(method, operators, context, threads=1, batch=batch)
    return memory_of(read_manifest(bundle), use).peak


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_run_within_the_limit_takes_a_cheaper_method_and_finishes(bundle: Path, operators: Operators) -> None:
    fits, too_much = peak(bundle, "ngram", operators, 128), peak(bundle, "speculative", operators, 128)
    limit = fits + RESERVED
    assert limit < too_much
    words = ["run", str(bundle), "--prompt", "the cat sat", "--method", "speculative", "--max-new-tokens", "20",
             "--threads", "1", "--operators", operators, "--no-check", "--json"]  # fmt: skip
    ran = limited(limit, COMMAND, *words, "--budget", str(limit))
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["method_requested"], result["method_used"]) == ("speculative", "ngram")
    assert "speculative needs" in result["reason"]
    assert result["stats"]["peak_bytes"] <= limit
    unplanned = limited(limit, COMMAND, *words, "--budget", "off")
    assert unplanned.returncode != 0
    assert "Traceback" not in unplanned.stderr


@pytest.mark.parametrize("operators", OPERATORS, indirect=True)
def test_a_batch_within_the_limit_is_decoded_by_fewer_at_a_time(bundle: Path, operators: Operators) -> None:
    two, three, six = (peak(bundle, "ar", operators, PROMPT + NEW, batch) for batch in (2, 3, 6))
    limit, budget = two + RESERVED, (two + three) // 2
    assert limit < six
    words = [str(bundle), operators, str(PROMPT), str(NEW)]
    ran = limited(limit, BATCH, *words, str(budget))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{[NEW] * 6}\n"
    unplanned = limited(limit, BATCH, *words, "off")
    assert unplanned.returncode != 0
    assert "MemoryError" in unplanned.stderr


FILE = """
import re, sys
from pathlib import Path
import edgespec, edgespec.engine.engine
from edgespec.runtimes.process import peak_bytes

def resident():
    # bytes of mapped weights, and of private memory
    mapped, private, name = 0, 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.rpartition("/")[2]
        elif line.startswith("Rss:") and name == "model.data":
            mapped += int(line.split()[1]) * 1024
        elif line.startswith("Anonymous:"):
            private += int(line.split()[1]) * 1024
    return mapped, private

before = resident()[1]
with edgespec.load(sys.argv[1], threads=1, context=128, budget="off") as engine:
    engine.generate(list(range(5, 25)), method="ar", max_new_tokens=4, ignore_eos=True)
    mapped, private = resident()
    print(mapped, private - before, peak_bytes())
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("native")
def test_weights_of_a_file_take_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are mapped and never copied: resident within 5 % of the file, and the peak is at most one tensor more."""
    monkeypatch.setitem(hf.CONFIGS, "llama_tied_gqa", LARGE)
    file = tmp_path / "model.gguf"
    tensors = write_gguf(file, "llama_tied_gqa", kind=GGMLQuantizationType.Q8_0)
    export_model(ExportOptions(str(file), tmp_path / "bundle", ["ar"], "file", context=128, quick=True))
    command = [sys.executable, "-c", FILE, str(tmp_path / "bundle")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    mapped, private, peak = map(int, ran.stdout.split())
    size, largest = file.stat().st_size, max(value.size for value in tensors.values()) * 34 // 32
    looked_up = LARGE["vocab_size"] * LARGE["hidden_size"] * 34 // 32  # few rows of the embedding are read
    assert 0.95 * (size - looked_up) < mapped < 1.05 * size
    assert private < largest
    assert peak < process_bytes() + mapped + largest
