"""Under a real limit of the system, what is run within a budget finishes; without one it dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.manifest import Operators, read_manifest
from edgespec.runtimes.options import RunOptions
from tests.conftest import OPERATORS, write_large
from tests.support import hf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of private memory (RLIMIT_DATA) are Linux's")

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
    """A small target with much KV (32 KiB a token in float32), and a draft that is far larger than its target."""
    folder = tmp_path_factory.mktemp("limits")
    for name, config in (("target", SHAPE), ("draft", DRAFT)):
        write_large(folder / name, config)
        hf.write_tokenizer(folder / name, config)
    options = ExportOptions(
        str(folder / "target"), folder / "bundle", ["speculative"], "fp32", draft=str(folder / "draft"), threads=2
    )
    Exporter(options).run()
    return options.output


def limited(limit: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that may have so many bytes of private memory."""
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
