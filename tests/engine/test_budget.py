"""A budget is held whatever runs at once: batches count as all else does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.settings import Grammar, Settings
from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BudgetError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import RunOptions
from tests.conftest import write_large
from tests.support import hf

SHAPE: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
         "max_position_embeddings": 4096}  # fmt: skip
LONG, SHORT, NEW = 1800, 200, 8  # tokens
MIXED = """
import json, sys
import edgespec
from edgespec.decoding.settings import Settings
from edgespec.engine.batch import RunningBatch
from edgespec.errors import BudgetError
from edgespec.runtimes.process import one_arena, peak_bytes
bundle, budget, lengths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
one_arena()
engine = edgespec.load(bundle, threads=1, operators="native", budget=budget, check=False)
batch, waiting, together, written = RunningBatch(engine, 4), list(lengths), 0, 0
settings = Settings(method="ar", max_new_tokens=8, ignore_eos=True)
while waiting or batch.requests:
    while waiting and batch.room:
        try:
            batch.join([5 + len(waiting)] * waiting[0], settings)
        except BudgetError:
            if not batch.requests:
                raise
            break
        waiting.pop(0)
    together = max(together, len(batch.requests))
    for stream, got in batch.round():
        if isinstance(got, Exception):
            raise got
        written += stream.ended
print(json.dumps({"peak": peak_bytes(), "together": together, "written": written, "kv": engine.kv_bytes()}))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small model with a large KV cache: 32 KiB a token in float32."""
    folder = tmp_path_factory.mktemp("budget")
    write_large(folder / "model", SHAPE)
    hf.write_tokenizer(folder / "model", SHAPE)
    export_model(ExportOptions(str(folder / "model"), folder / "bundle", [], "fp32", threads=1), golden=False)
    return folder / "bundle"


def peak(bundle: Path, context: int, batch: int) -> int:
    """Return the peak bytes that are planned for ``batch`` sequences of ``context`` tokens at once."""
    return memory_of(read_manifest(bundle), RunOptions("ar", "native", context, threads=1, batch=batch)).peak


@pytest.fixture
def within(bundle: Path, native: None) -> Callable[[int], Engine]:
    made: list[Engine] = []

    def opened(budget: int) -> Engine:
        made.append(load(bundle, threads=1, operators="native", budget=budget, check=False))
        return made[-1]

    return opened


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read where Linux tells it")
def test_requests_of_a_batch_stay_within_the_budget_together(bundle: Path, native: None) -> None:
    """Long and short ones, again and again: fewer run at once, all are answered, and the peak is within the budget."""
    one, two = (peak(bundle, LONG + NEW, batch) for batch in (1, 2))
    lengths = [SHORT, LONG, LONG, LONG, SHORT, LONG, LONG, SHORT, LONG]
    budget = two + (two - one) // 3
    command = [sys.executable, "-c", MIXED, str(bundle), str(budget), json.dumps(lengths)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["written"] == len(lengths)
    assert 2 <= found["together"] <= 3
    assert found["peak"] <= budget
    assert found["kv"] > (two - one) // 2  # the message counts the memory of the batch's idle sessions


def test_what_a_batch_holds_counts_for_whoever_comes(bundle: Path, within: Callable[[int], Engine]) -> None:
    one, two = (peak(bundle, LONG + NEW, batch) for batch in (1, 2))
    engine = within((one + two) // 2)
    settings = Settings(method="ar", max_new_tokens=NEW, ignore_eos=True)
    batch = RunningBatch(engine, 4)
    batch.join([5] * LONG, settings)
    with pytest.raises(BudgetError, match="and the budget is"):
        engine.generate([6] * LONG, settings)  # as from another thread at the same time
    assert len(engine.reservations.taken) == 1
    while batch.requests:
        list(batch.round())
    assert not engine.reservations.taken
    held = engine.kv_bytes()
    assert held > (two - one) // 2
    engine.generate([6] * LONG, settings)  # the idle text of the batch makes room
    assert engine.kv_bytes() < 2 * held
    batch.join([7] * SHORT, settings)  # and its slots serve again
    while batch.requests:
        list(batch.round())
    batch.close()
    engine.close()


def test_a_common_beginning_counts_once_as_soon_as_it_is_read(bundle: Path, within: Callable[[int], Engine]) -> None:
    """Four run in little more memory than two; each is admitted with room for its whole text."""
    one, two = (peak(bundle, LONG + NEW, batch) for batch in (1, 2))
    engine = within(two + (two - one) // 2)
    batch = RunningBatch(engine, 4)
    for number in range(4):
        stream = batch.join([*[5] * (LONG - 1), 6 + number], Settings(method="ar", max_new_tokens=NEW, ignore_eos=True))
        while stream.reading:
            list(batch.round())
    assert len(batch.requests) == 4
    assert engine.kv_bytes() < 2 * (two - one)
    while batch.requests:
        list(batch.round())
    for number in range(2):
        batch.join([7 + number] * LONG, Settings(method="ar", max_new_tokens=NEW, ignore_eos=True))
    with pytest.raises(BudgetError):
        batch.join([9] * LONG, Settings(method="ar", max_new_tokens=NEW, ignore_eos=True))
    batch.close()
    engine.close()


def test_conversations_keep_what_fits(bundle: Path, within: Callable[[int], Engine]) -> None:
    """With room for two, both continue.  With room for one, the other one's memory is taken, and the budget holds."""
    one, two = (peak(bundle, LONG + NEW, batch) for batch in (1, 2))
    settings = Settings(method="ar", max_new_tokens=NEW, ignore_eos=True)
    for budget, kept in ((two + (two - one) // 2, 2), ((one + two) // 2, 1)):
        engine, reused = within(budget), list[int]()
        texts = [[5 + number] * (LONG - 100) for number in range(2)]
        for _ in range(2):
            for at, text in enumerate(texts):
                result = engine.generate(text, settings)
                reused.append(result.stats.reused_tokens)
                texts[at] = [*text, *result.tokens, 4]
        assert [count > LONG - 200 for count in reused] == [False, False, kept == 2, kept == 2]
        assert engine.kv_bytes() < (kept + 0.5) * (two - one)
        assert len(engine.sessions.sessions) == kept
        engine.close()


def test_compiled_grammars_are_bounded_and_make_room(bundle: Path, within: Callable[[int], Engine]) -> None:
    engine = within(peak(bundle, SHORT, 1) + (64 << 20))
    guidance = engine.guidance
    for number in range(12):
        shape = {"enum": [f"{number} {word}" for word in range(2000)]}
        guidance.require(Grammar.json_schema(shape))
    most = engine.grammar_bytes
    assert 0 < most <= 32 << 20
    kept = guidance.nbytes(Grammar.json_schema(shape))
    assert most < 12 * kept
    tokens = max(tokens for tokens in range(100, 4000, 100) if peak(bundle, tokens, 1) < engine.memory_budget.limit)  # type: ignore[operator]
    engine.generate([5] * (tokens - NEW - 64), method="ar", max_new_tokens=NEW, ignore_eos=True)
    assert engine.grammar_bytes == 0
    engine.close()
