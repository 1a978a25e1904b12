"""Native attention in every format of keys and values, against numpy; and bit for bit in any combination of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS, Attention, KeyFormat, ValueFormat
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.native import NativeSlot
from tests.support.coded import Prepared, decoded, expected_logits, prepare, random_tokens
from tests.support.passes import run_draft, run_hypotheses

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")

KEYS: tuple[KeyFormat, ...] = ("f32", "f16", "int8", "int4", "nomad1", "nomad2")
VALUES: tuple[ValueFormat, ...] = ("f32", "f16", "int8")
WINDOW, SINKS = 21, 3
LENGTH = 600  # crosses blocks of 128 and splits of 256
CODED = {name: kv for name, kv in ATTENTION.items() if name not in ("f32", "f16")}
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    known: dict[str, Prepared] = {}

    def get(name: str) -> Prepared:
        if name not in known:
            known[name] = prepare(tmp_path_factory.mktemp(name), name)
        return known[name]

    return get


def formats() -> Iterator[KvFormat]:
    for keys in KEYS:
        for values in VALUES:
            yield KvFormat(keys, values)
            yield KvFormat(keys, values, window=WINDOW, sinks=SINKS)


def name_of(kv: KvFormat) -> str:
    return f"{kv.keys}-{kv.values}{'-window' if kv.window else ''}"


def ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(tokens, np.int64)


def advance(slot: NativeSlot, tokens: Sequence[int], sizes: Sequence[int]) -> Logits:
    """Logits [n, vocab] of passes of the given sizes in turn, all rows kept."""
    found, at, turn = [], 0, 0
    while at < len(tokens):
        rows = ids(tokens[at : at + sizes[turn % len(sizes)]])
        found.append(slot.forward(rows).logits.copy())
        slot.keep(range(len(rows)))
        at, turn = at + len(rows), turn + 1
    return np.concatenate(found)


# -- against numpy -----------------------------------------------------------------------------------------------------


CASES = [("padded", kv) for kv in formats()] + [("whole", kv) for kv in formats() if kv.values == "int8"]


@pytest.mark.parametrize("name, kv", CASES, ids=lambda case: case if isinstance(case, str) else name_of(case))
def test_equals_numpy(made: Callable[[str], Prepared], name: str, kv: KvFormat) -> None:
    model = made(name)
    tokens = random_tokens(model.part.facts.vocab, LENGTH)
    slot = model.slot(kv, threads=2)
    got = advance(slot, tokens, [1, 128, 3, 17, 64])
    want = expected_logits(model, kv, tokens, slot.snapshot())
    error = np.abs(got - want).max(-1) / want.std()  # [LENGTH]
    # a level, or an exact key's last bit, that numpy rounds the other way moves a row a little; nothing else may
    assert np.median(error) < 5e-5
    assert np.quantile(error, 0.9) < 5e-3
    assert error.max() < 0.08


def test_codes_stand_for_the_keys(made: Callable[[str], Prepared]) -> None:
    model = made("padded")
    tokens = random_tokens(model.part.facts.vocab, 200, 1)
    exact = model.slot(ATTENTION["f32"])
    exact.prefill(tokens)
    errors = {}
    for keys in ("int4", "nomad1", "nomad2"):
        slot = model.slot(KvFormat(keys, "f32"))
        slot.prefill(tokens)
        name = "past_key_values.0.key"  # of the first layer, which no attention has touched
        codes, wanted = slot.snapshot()[name], exact.snapshot()[name]
        back = np.stack([decoded(codes[head], keys, model.tables[keys][0, head]) for head in range(len(codes))])
        errors[keys] = float(np.square(back - wanted).mean() / np.square(wanted).mean())
    assert errors["nomad1"] < errors["int4"] < 0.02
    assert errors["nomad2"] < 0.2


# -- bit for bit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kv", CODED.items(), ids=list(CODED))
def test_rows_of_any_pass_equal_plain_decoding(made: Callable[[str], Prepared], name: str, kv: KvFormat) -> None:
    model = made("padded")
    tokens = random_tokens(model.part.facts.vocab, 400, 2)
    plain = advance(model.slot(kv), tokens, [1])
    for sizes in ([128], [5], [2, 31, 1, 77]):
        np.testing.assert_array_equal(advance(model.slot(kv, threads=2), tokens, sizes), plain)
    slot = model.slot(kv)
    slot.prefill(tokens[:-1])
    np.testing.assert_array_equal(slot.forward(ids(tokens[-1:])).logits[0], plain[-1])


@pytest.mark.parametrize("name, kv", CODED.items(), ids=list(CODED))
def test_rollback(made: Callable[[str], Prepared], name: str, kv: KvFormat) -> None:
    model = made("padded")
    text, other = (random_tokens(model.part.facts.vocab, 450, seed) for seed in (6, 7))
    slot = model.slot(kv)
    slot.prefill(text)
    for back in (1, 60, LONGEST_PASS - 30, 300):
        kept = len(text) - back
        branch = [*text[:kept], *other[: back // 2 + 1]]
        same = slot.follow(branch[:-1])
        assert same in (0, kept)  # exact recent keys that are missing are computed again
        assert same == kept or (kv.ring and back > LONGEST_PASS - 100)
        slot.prefill(branch[same:-1])
        got = slot.forward(ids(branch[-1:])).logits[0].copy()
        fresh = model.slot(kv)
        fresh.prefill(branch[:-1])
        np.testing.assert_array_equal(got, fresh.forward(ids(branch[-1:])).logits[0])
        slot.keep([0])
        text = branch


@pytest.mark.parametrize("name, kv", CODED.items(), ids=list(CODED))
def test_rows_that_were_not_kept_leave_nothing(made: Callable[[str], Prepared], name: str, kv: KvFormat) -> None:
    model = made("padded")
    text, other = (random_tokens(model.part.facts.vocab, 420, seed) for seed in (8, 9))
    slot, fresh = model.slot(kv), model.slot(kv)
    slot.prefill(text)
    slot.forward(ids(other[:100]))  # rejected draft tokens
    run_draft(slot, ids(other[:3]), 0, SkipSet((0,), (1,)))
    for kept in (420, 380, 300):
        same = slot.follow(text[:kept])
        slot.prefill(text[same:kept])
        fresh.follow([])
        fresh.prefill(text[:kept])
        following = ids(other[200:204])
        np.testing.assert_array_equal(slot.forward(following).logits, fresh.forward(following).logits)


@pytest.mark.parametrize("keys", ["f16", "int8", "int4"])
def test_drafts_that_read_codes_change_no_other_row(made: Callable[[str], Prepared], keys: Attention) -> None:
    model = made("padded")
    text = random_tokens(model.part.facts.vocab, 500, 10)
    base = ATTENTION[keys]
    both = KvFormat(base.keys, base.values, "nomad1", base.window, 4, draft_window=64)
    plain = advance(model.slot(base), text, [1])
    slot, same = model.slot(both), model.slot(base)
    found, differ = [], 0
    for at in range(0, len(text), 5):
        rough = run_draft(slot, ids(text[at : at + 2])).logits.copy()
        exact = run_draft(same, ids(text[at : at + 2])).logits
        differ += not np.array_equal(rough, exact)
        found.append(slot.forward(ids(text[at : at + 5])).logits.copy())
        slot.keep(range(5))
        same.prefill(text[at : at + 5])
    np.testing.assert_array_equal(np.concatenate(found), plain)
    assert differ > 50, "drafts do not read the codes"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_hypotheses_beyond_the_ring(made: Callable[[str], Prepared]) -> None:
    model = made("padded")
    slot = model.slot(ATTENTION["nomad"])
    slot.prefill(random_tokens(model.part.facts.vocab, 400))
    with pytest.raises(InvalidRequest, match="exact recent keys"):
        run_hypotheses(slot, ids([5]), ids([100]), ids([-1]))


def test_tables_that_do_not_fit(made: Callable[[str], Prepared], tmp_path: Path) -> None:
    model = made("padded")
    part = model.part.model_copy(update={"attention": None})
    with pytest.raises(BundleError, match="need tables"):
        Prepared(model.folder, model.arch, part, {}).slot(ATTENTION["int4"])
    facts = model.part.facts.model_copy(update={"kv_heads": 1})
    with pytest.raises(BundleError, match=r"expected float32 \[2, 1, 2, 32\], got float32 \[2, 2, 2, 32\]"):
        Prepared(model.folder, model.arch, model.part.model_copy(update={"facts": facts}), {}).slot(ATTENTION["int4"])
