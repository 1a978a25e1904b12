"""What an engine may take: requests let in, given a cheaper method, or refused; bytes are scripted here."""

from __future__ import annotations

import pytest

from edgespec.errors import BudgetError, InvalidRequest
from edgespec.planning import allowance as module
from edgespec.planning.allowance import CHUNKS, Allowance
from edgespec.planning.budget import Available
from edgespec.planning.footprint import Memory, MemoryPart
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from tests.support.planning import manifest

MIB = 1 << 20
WEIGHTS, PRIVATE, TOKEN = 300 * MIB, 50 * MIB, 100_000
EXTRA = {"speculative": 120 * MIB, "self-spec": 0}
METHODS = ("ar", "ngram", "self-spec", "speculative")


def private(method: str, tokens: int, chunk: int, batch: int = 1) -> int:
    return PRIVATE + EXTRA.get(method, 0) + TOKEN * batch * -(-tokens // 64) * 64 + chunk * 10_000


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(found: Manifest, use: RunOptions, process: int | None = None) -> Memory:
        return Memory((MemoryPart("all", private(use.method, use.context, use.chunk, use.batch), WEIGHTS),))

    monkeypatch.setattr(module, "memory_of", memory)
    monkeypatch.setattr(Memory, "peak", property(lambda self: self.private + self.file))
    monkeypatch.setattr(module, "available_memory", lambda: Available(8 << 30, 1 << 30, "the machine"))
    monkeypatch.setattr(module, "resident_now", lambda: (0, 0))


def allow(budget: str | int | None) -> Allowance:
    return Allowance(manifest("int4", METHODS), RunOptions(context=8192), budget)


def admit(found: Allowance, method: str = "speculative", tokens: int = 640, **more: int) -> module.Admission:
    return found.admit(method, tokens, gamma=4, greedy=True, methods=METHODS, **more)


def total(method: str, tokens: int, chunk: int) -> int:
    return WEIGHTS + private(method, tokens, chunk)


def test_what_fits_is_let_in_as_it_is() -> None:
    found = admit(allow(total("speculative", 640, 128)))
    assert (found.method, found.chunk, found.reason) == ("speculative", 128, "")
    assert found.predicted == total("speculative", 640, 128)


def test_first_the_prefill_is_cut_in_smaller_chunks() -> None:
    found = admit(allow(total("speculative", 640, 128) - 1))
    assert (found.method, found.chunk) == ("speculative", 64)
    assert admit(allow(total("speculative", 640, 16))).chunk == 16


def test_then_a_cheaper_method_is_taken_and_the_reason_said() -> None:
    found = admit(allow(total("speculative", 640, 16) - 1))
    assert found.method == "ngram"
    assert "speculative needs" in found.reason
    assert "ngram instead" in found.reason


def test_then_the_request_is_refused_with_what_would_fit() -> None:
    found = allow(total("ar", 640, 16) - 1)
    with pytest.raises(BudgetError, match="640 tokens of prompt and answer need") as caught:
        admit(found)
    assert caught.value.hint is not None
    fits = int(caught.value.hint.split()[0])
    assert 0 < fits < 640
    assert admit(found, tokens=fits).method


def test_other_requests_count_and_idle_ones_go_first() -> None:
    limit = total("ar", 640, 128)
    assert admit(allow(limit), "ar", idle=1).crowded
    assert not admit(allow(limit), "ar", idle=0).crowded
    assert admit(allow(limit), "ar", busy=1).chunk == CHUNKS[1]
    with pytest.raises(BudgetError):
        admit(allow(limit), "ar", busy=10 * MIB)


def test_what_is_free_counts_private_memory_alone() -> None:
    """Mapped files can be read again: they keep nobody out who did not ask for a budget."""
    found = allow(None)
    assert found.limit == 1 << 30
    tokens = 9000
    assert private("ar", tokens, 128) < (1 << 30) < total("ar", tokens, 128)
    assert admit(found, "ar", tokens=tokens).method == "ar"


def test_off_counts_nothing() -> None:
    found = allow("off")
    assert found.limit is None
    assert admit(found, tokens=10**9).predicted == 0
    found.admit_bundle(10**9)
    assert found.width(8, 10**9, "ar", True) == 8
    assert found.together(METHODS, 10**9) == list(METHODS)


def test_a_bundle_that_cannot_fit_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(BudgetError, match="needs at least"):
        allow(WEIGHTS).admit_bundle(None)
    allow(total("ar", 64, 16)).admit_bundle(None)
    with pytest.raises(BudgetError, match="a context of 4096 tokens needs"):
        allow(total("ar", 1024, 16)).admit_bundle(4096)


def test_batches_shrink() -> None:
    found = allow(WEIGHTS + private("ar", 640, 128, 3))
    assert found.width(8, 640, "ar", True) == 3
    assert allow(total("ar", 64, 16)).width(8, 640, "ar", True) == 1


def test_methods_that_fit_at_the_same_time() -> None:
    found = allow(total("ar", 640, 16))
    assert found.together(METHODS, 640) == ["ar", "ngram", "self-spec"]
    two = ("speculative", "self-spec", "ngram")
    assert allow(total("speculative", 640, 16)).together(two, 640) == list(two)
    EXTRA["self-spec"] = 1
    try:
        assert allow(total("speculative", 640, 16)).together(two, 640) == ["speculative", "ngram"]
        assert allow("1GiB").extra(two, 640) == EXTRA["speculative"] + 1
    finally:
        EXTRA["self-spec"] = 0
    assert allow("off").extra(two, 640) == 0


@pytest.mark.parametrize("budget", ["0", "-1", "1 potato", "", 0, -5, "9GiB"])
def test_nonsense_is_refused(budget: str | int) -> None:
    with pytest.raises(InvalidRequest):
        allow(budget)
