"""Texts that the target generates, each compared with whole passes of the model over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.export.training.windows import Windows
from tests.export.training.conftest import WITHOUT_BOS
from tests.support import hf, seq2seq

pytestmark = pytest.mark.usefixtures("torch")


def likeliest(target: Any, torch: Any, texts: Windows) -> Any:
    """int64 [N, T]: the model's first choice after every token, by one pass over whole texts."""
    with torch.no_grad():
        return target.model(torch.from_numpy(texts.tokens)).logits.argmax(-1).numpy()


def check_ends(target: Any, texts: Windows, begin: int, length: int) -> int:
    """Check that ``texts`` end after the first EOS from ``begin`` on or have ``length`` tokens; count those ended."""
    ended = 0
    for row, count in zip(texts.tokens.tolist(), texts.lengths.tolist(), strict=True):
        ends = [at for at in range(begin, count) if row[at] in target.source.eos]
        assert ends == [count - 1] or (not ends and count == length)
        assert not any(row[count:])
        ended += bool(ends)
    return ended


def test_orders_are_batches_of_one_name_each() -> None:
    from edgespec.export.training.data import TOGETHER, orders

    made = orders("drawn", 2 * TOGETHER + 6, 24, 9)
    assert [order.count for order in made] == [TOGETHER, TOGETHER, 6]
    assert [order.name for order in made] == ["drawn-00000", "drawn-00001", "drawn-00002"]
    assert {(order.length, order.greedy_from) for order in made} == {(24, 9)}
    assert orders("drawn", 0, 24) == []


def test_greedy_texts_are_the_models_first_choices(target: Any, torch: Any) -> None:
    from edgespec.export.training.data import TOGETHER, greedy_texts

    random = np.random.default_rng(1)
    prompts = Windows.of(random.integers(2, 150, (TOGETHER + 9, 7)).tolist(), 7)
    made = greedy_texts(target, prompts, 5, 20)
    assert made.tokens[:, :5].tolist() == prompts.tokens[:, :5].tolist()
    check_ends(target, made, 5, 20)
    choices = likeliest(target, torch, made)
    for row, best, count in zip(made.tokens, choices, made.lengths, strict=True):
        assert row[5:count].tolist() == best[4 : count - 1].tolist()


def test_texts_are_drawn_from_the_models_distribution(target: Any, torch: Any) -> None:
    """The first tokens after BOS: so far from the distribution as that many true draws are."""
    from edgespec.export.training.data import Order, write_texts

    made = write_texts(target, Order("drawn", 4000, 2), 1)
    bos = target.source.codec.encode("")[0]
    assert (made.tokens[:, 0] == bos).all()
    with torch.no_grad():
        p = target.model(torch.tensor([[bos]])).logits[0, -1].double().softmax(-1).numpy()
    counts, expected = np.bincount(made.tokens[:, 1], minlength=len(p)), 4000 * p
    z = ((counts - expected) ** 2 / expected).sum() - len(p)
    assert abs(z) < 8 * np.sqrt(2 * len(p) + (1 / expected).sum())


def test_texts_follow_from_seed_and_name_and_end_after_an_eos(target: Any, torch: Any) -> None:
    from edgespec.export.training.data import Order, write_texts

    order = Order("drawn-1", 64, 40)
    made = write_texts(target, order, 1)
    assert check_ends(target, made, 1, 40) > 0
    assert write_texts(target, order, 1).tokens.tolist() == made.tokens.tolist()
    assert write_texts(target, order, 2).tokens.tolist() != made.tokens.tolist()
    assert write_texts(target, Order("drawn-2", 64, 40), 1).tokens.tolist() != made.tokens.tolist()


def test_from_a_place_on_the_likeliest_is_written(target: Any, torch: Any) -> None:
    from edgespec.export.training.data import Order, write_texts

    made = write_texts(target, Order("drawn", 16, 20, greedy_from=8), 1)
    choices, first = likeliest(target, torch, made), 0
    for row, best, count in zip(made.tokens, choices, made.lengths, strict=True):
        assert row[8:count].tolist() == best[7 : count - 1].tolist()
        first += int((row[1 : min(count, 8)] != best[: min(count, 8) - 1]).sum())
    assert first > 16


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_decoder_writes_about_sources(tmp_path: Path, torch: Any, kind: str) -> None:
    """Sources of different lengths, and a head's bias in one of them, as in transformers."""
    from edgespec.export.training.data import orders, write_texts
    from edgespec.export.training.target import Source, Target

    folder = seq2seq.write_case(tmp_path / "m", kind)
    hf.make_tokenizer(160, False).save(str(folder / "tokenizer.json"))
    target = Target(Source.open(str(folder)), "no", torch.device("cpu"))
    reader = target.source.reader
    assert reader is not None
    read, held = reader.sources(["one", "the tide came in", "and the wind went down"], 2, 1, 1)
    (order,) = orders("greedy", 2, 12, 0, read)
    made = write_texts(target, order, 1)
    assert len(held) == 1
    assert made.read is not None
    ids = torch.from_numpy(made.read)
    assert len(set((ids >= 0).sum(1).tolist())) == 2
    with torch.no_grad():
        exact = target.model(ids.clamp(min=0), (ids >= 0).long(), decoder_input_ids=torch.from_numpy(made.tokens))
    torch.testing.assert_close(target.logits(target.hidden(torch.from_numpy(made.tokens))), exact.logits)
    for row, best, count in zip(made.tokens, exact.logits.argmax(-1).numpy(), made.lengths, strict=True):
        assert row[1:count].tolist() == best[: count - 1].tolist()


def test_without_a_bos_texts_begin_like_the_data(tmp_path: Path, torch: Any) -> None:
    from edgespec.export.training.data import SEED_TOKENS, Order, write_texts
    from edgespec.export.training.target import Source, Target

    made = Target(
        Source.open(str(hf.write_reference_checkpoint(tmp_path / "m", WITHOUT_BOS))), "no", torch.device("cpu")
    )
    texts = ["the tide came in and the wind went down.\n\n \na\n", "nine ships lay before the harbour all that winter"]
    lines = [made.source.codec.encode(line, special=False) for text in texts for line in text.split("\n")]
    places = {tuple(line[at : at + SEED_TOKENS]) for line in lines for at in range(len(line) - SEED_TOKENS + 1)}
    found = write_texts(made, Order("drawn", 200, SEED_TOKENS + 1), 1, texts)
    assert len(found) == 200
    begun = {tuple(row[:SEED_TOKENS]) for row in found.tokens.tolist()}
    assert begun <= places
    assert len(begun) > 10
    other = write_texts(made, Order("drawn", 8, SEED_TOKENS + 1), 1)
    assert not {tuple(row[:SEED_TOKENS]) for row in other.tokens.tolist()} <= places  # of the calibration text
    assert len({tuple(row[:SEED_TOKENS]) for row in other.tokens.tolist()}) > 1


def test_native_operators_write_texts_of_the_model_in_int8(target: Any, torch: Any, tmp_path: Path) -> None:
    """The likeliest tokens are those of whole passes over int8 weights; sampled texts follow from the seed."""
    from edgespec.export.training.data import Order, greedy_texts, write_texts
    from edgespec.export.training.writer import NativeWriter
    from edgespec.runtimes.opening import open_slot

    made = NativeWriter(target.source, tmp_path, 1)
    random = np.random.default_rng(2)
    prompts = Windows.of(random.integers(2, 150, (5, 30)).tolist(), 30)
    texts = greedy_texts(made, prompts, 30, 40)  # type: ignore[arg-type]
    assert texts.tokens[:, :30].tolist() == prompts.tokens.tolist()
    check_ends(made, texts, 30, 40)
    slot = open_slot(made._model)
    for row, count in zip(texts.tokens, texts.lengths, strict=True):
        slot.follow([])
        best = slot.forward(row[: count - 1]).logits.argmax(-1)
        assert row[30:count].tolist() == best[29:].tolist()
    order = Order("drawn-1", 32, 40)
    written = write_texts(made, order, 1)
    assert check_ends(made, written, 1, 40) > 0
    assert write_texts(made, order, 1).tokens.tolist() == written.tokens.tolist()
    assert write_texts(made, order, 2).tokens.tolist() != written.tokens.tolist()
    made.close()
