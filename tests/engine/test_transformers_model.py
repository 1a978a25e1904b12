"""A bundle as a model of transformers: ``generate`` with its arguments, streamers, criteria, and pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.errors import InvalidRequest

torch = pytest.importorskip("torch", reason="needs edgespec[train]")
transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers 5")

MODEL = "builtin:shakespeare"
PROMPT = "ROMEO:\nBut soft"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """Load an embedded model by the class."""
    from edgespec.transformers import EdgespecForCausalLM

    found = EdgespecForCausalLM.from_pretrained(MODEL, threads=1)
    yield found
    found.close()


@pytest.fixture(scope="module")
def ids(model: Any) -> Any:
    return torch.tensor([model.engine.codec.encode(PROMPT)])


def written(model: Any, ids: Any, count: int = 24) -> list[int]:
    tokens: list[int] = model.engine.generate(
        ids[0].tolist(), max_new_tokens=count, ignore_eos=True, temperature=0.0
    ).tokens
    return tokens


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_generate_gives_the_prompt_and_the_same_text(model: Any, ids: Any, method: str) -> None:
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, method=method)
    assert found.dtype == ids.dtype
    assert found[0, : ids.shape[1]].tolist() == ids[0].tolist()
    assert found[0, ids.shape[1] :].tolist() == written(model, ids)


def test_a_padded_batch_gives_each_text(model: Any, ids: Any) -> None:
    short = ids[:, -4:]
    width = ids.shape[1]
    both = torch.cat([ids, torch.cat([torch.zeros((1, width - 4), dtype=ids.dtype), short], 1)])
    mask = torch.ones_like(both)
    mask[1, : width - 4] = 0
    found = model.generate(both, attention_mask=mask, max_new_tokens=9)
    assert found[:, width:].tolist() == [written(model, ids, 9), written(model, short, 9)]


def test_lengths_ends_and_configurations(model: Any, ids: Any) -> None:
    whole, width = written(model, ids), ids.shape[1]
    assert model.generate(ids, max_length=width + 5)[0, width:].tolist() == whole[:5]
    config = transformers.GenerationConfig(max_new_tokens=7)
    assert model.generate(ids, generation_config=config)[0, width:].tolist() == whole[:7]
    assert model.generate(ids, generation_config=config, max_new_tokens=3)[0, width:].tolist() == whole[:3]
    end = whole[6]
    stopped = model.generate(ids, max_new_tokens=24, eos_token_id=[end, 1])[0, width:].tolist()
    assert stopped == whole[: whole.index(end) + 1]


def test_samples_follow_torch_s_seed(model: Any, ids: Any) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=16, do_sample=True, temperature=1.2, top_k=0).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_streamers_and_criteria_see_every_token(model: Any, ids: Any) -> None:
    seen: list[list[int]] = []

    class Streamer:
        def put(self, value: Any) -> None:
            seen.append(value.reshape(-1).tolist())

        def end(self) -> None:
            seen.append([-1])

    found = model.generate(
        ids,
        max_new_tokens=24,
        method="ngram",
        streamer=Streamer(),
        stopping_criteria=[lambda text, scores: torch.tensor([text.shape[1] >= ids.shape[1] + 5])],
    )
    new = written(model, ids)[:5]
    assert found[0, ids.shape[1] :].tolist() == new
    assert seen == [ids[0].tolist(), *([token] for token in new), [-1]]


def test_criteria_of_a_batch_see_all_its_texts(model: Any, ids: Any) -> None:
    """They are given every text after every token, as in transformers, and stop each of them."""
    width, count = ids.shape[1], 9
    both, shapes = torch.cat([ids, ids.flip(1)]), []
    whole = [model.generate(one[None], max_new_tokens=count)[0, width:].tolist() for one in both]

    def third(texts: Any, scores: Any) -> Any:
        shapes.append(tuple(texts.shape))
        return torch.tensor([texts.shape[1] >= width + 3, False])

    found = model.generate(both, max_new_tokens=count, stopping_criteria=[third], pad_token_id=0)[:, width:].tolist()
    assert found[1] == whole[1]
    assert found[0] == whole[0][:3] + [0] * (count - 3)
    assert shapes == [(2, width + at) for at in range(1, count + 1)]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_beams": 4}, "num_beams"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"output_scores": True}, "output_scores"),
        ({"max_new_token": 3}, "max_new_tokens"),
        ({"max_length": 2}, "max_length"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(model: Any, ids: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model.generate(ids, **changes)
    assert named in str(caught.value)


def test_logits_are_those_of_the_passes(model: Any, ids: Any) -> None:
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], model.config.vocab_size)
    assert int(logits[0, -1].argmax()) == written(model, ids, 1)[0]


def test_a_pipeline(model: Any, ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(model.engine.bundle.path / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    found = pipe(PROMPT, max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert found == tokenizer.decode(written(model, ids, 12), skip_special_tokens=True)
    assert "not supported" not in caplog.text
