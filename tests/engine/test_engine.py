"""The front door: every way to ask, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.control.auto import TRIED
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import BATCH, Settings
from edgespec.engine.loading import load
from edgespec.engine.methods import choose_method
from edgespec.engine.result import Chunk
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from tests.conftest import PROMPTS
from tests.support import hf
from tests.support.planning import predicting
from tests.support.requests import METHODS, NEW, PROMPT, Get, ask


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a bundle with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    source = hf.write_checkpoint(folder / "model", hf.CONFIGS["llama_tied_gqa"], 3, chat_template=hf.CHAT_TEMPLATE)
    Exporter(ExportOptions(str(source), folder / "bundle", threads=1)).run()
    return folder / "bundle"


def test_the_package_offers_the_front_door(bundle: Callable[..., Path]) -> None:
    result = edgespec.load(bundle("int4"), threads=1).generate(PROMPT, max_new_tokens=4)
    assert isinstance(result, edgespec.Result)
    assert len(result.tokens) == 4 or result.finish == "eos"


def test_text_and_ids_are_the_same_prompt(engine: Get) -> None:
    made = engine()
    tokens = made.codec.encode(PROMPT)
    by_text, by_ids, by_array = ask(made), ask(made, tokens), ask(made, np.array(tokens))
    assert by_text.tokens == by_ids.tokens == by_array.tokens
    assert by_text.text == made.codec.decode([*tokens, *by_text.tokens])[len(made.codec.decode(tokens)) :]


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_gives_the_text_piece_by_piece(engine: Get, method: str) -> None:
    made = engine()
    whole = ask(made, method=method)
    stream = made.stream(PROMPT, Settings(method=method, max_new_tokens=NEW, ignore_eos=True))
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
    rounds = [chunk.round for chunk in chunks if chunk.round is not None]
    assert [token for item in rounds for token in item.tokens] == stream.result.tokens == whole.tokens
    assert len(rounds) == stream.result.stats.rounds
    assert rounds[-1].finish == "length"
    heard: list[Chunk] = []
    made.generate(PROMPT, method=method, max_new_tokens=NEW, ignore_eos=True, on_chunk=heard.append)
    assert "".join(chunk.text for chunk in heard) == whole.text


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_equals_its_parts(engine: Get, method: str) -> None:
    made = engine()
    prompts: list[Any] = [*PROMPTS[: BATCH + 2], made.codec.encode(PROMPTS[7])]
    settings = Settings(method=method, max_new_tokens=30, ignore_eos=True)
    results = made.generate_batch(prompts, settings, gamma=3)
    assert [result.tokens for result in results] == [ask(made, p, max_new_tokens=30).tokens for p in prompts]
    assert made.generate_batch([]) == []


def test_a_bad_prompt_of_a_batch_ends_it_cleanly(engine: Get) -> None:
    made = engine()
    with pytest.raises(InvalidRequest):
        made.generate_batch([PROMPT, [10**9], PROMPT], max_new_tokens=4)
    assert not made.sessions._busy
    assert len(made.generate_batch([PROMPT, PROMPT], max_new_tokens=4, ignore_eos=True)) == 2


def test_chat_renders_the_models_template(chatty: Path) -> None:
    made = load(chatty, threads=1)
    messages = [{"role": "user", "content": "how long will it be?"}]
    result = made.chat(messages, max_new_tokens=12, ignore_eos=True, method="ar")
    prompt = made.codec.encode("user: how long will it be?\nassistant:", special=False)
    assert result.tokens == ask(made, prompt, max_new_tokens=12).tokens
    assert result.stats.prompt_tokens == len(prompt)


def test_a_second_turn_of_a_chat_reuses_the_first(chatty: Path) -> None:
    made = load(chatty, threads=1)
    prompt = made.codec.encode("user: one\nassistant:", special=False)
    first = ask(made, prompt, max_new_tokens=10)
    turn = [*prompt, *first.tokens, *made.codec.encode("\nuser: two\nassistant:", special=False)]
    second = ask(made, turn, max_new_tokens=10)
    assert second.stats.reused_tokens == len(prompt) + len(first.tokens) - 1
    assert second.tokens == ask(load(chatty, threads=1), turn, max_new_tokens=10).tokens


def test_chat_without_a_template_says_so(engine: Get) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        engine().chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ("", {}, "empty"),
        ("  \n", {}, "empty"),
        ([], {}, "at least one token"),
        ([-1], {}, "outside the vocabulary"),
        ([10**9], {}, "outside the vocabulary"),
        ([5] * 5000, {}, "no room"),
        (PROMPT, {"method": "eagle"}, "'eagle' is not in this bundle; it has: ar, ngram, speculative, self-spec"),
        (PROMPT, {"gamma": 0}, "gamma 0"),
        (PROMPT, {"gamma": -3}, "gamma -3"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens"),
        (PROMPT, {"temprature": 1.0}, "unknown setting 'temprature'"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"top_p": 0.0}, "top_p"),
        (PROMPT, {"acceptance": "perhaps"}, "acceptance"),
        (PROMPT, {"logit_bias": {10**9: 1.0}}, "logit_bias"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_breaks_nothing(
    engine: Get, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    made = engine()
    with pytest.raises(InvalidRequest) as caught:
        made.generate(prompt, **settings)
    assert message in str(caught.value)
    assert not made.sessions._busy
    assert len(ask(made, max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize("context", [0, 1, -5, 10**6])
def test_a_context_the_bundle_does_not_have_is_refused(fresh: Get, context: int) -> None:
    with pytest.raises(InvalidRequest, match=f"context {context}: expected 2 to"):
        fresh(context=context)


def test_the_default_method_is_the_one_predicted_fastest(engine: Get) -> None:
    manifest = engine().bundle.manifest
    best = choose_method(predicting(manifest, {"speculative": 1.4, "self-spec": 1.2}), None)
    assert (best.name, "1.40x" in best.reason) == ("speculative", True)
    assert choose_method(predicting(manifest, {"speculative": 1.1, "self-spec": 1.2}), None).name == "self-spec"
    slow = choose_method(predicting(manifest, {"speculative": TRIED - 0.01, "self-spec": 0.7}), None)
    assert (slow.name, "default" in slow.reason) == ("ngram", True)
    assert choose_method(predicting(manifest, {}), None).name == "ngram"
    asked = choose_method(predicting(manifest, {"speculative": 1.4}), "self-spec")
    assert (asked.name, asked.reason) == ("self-spec", "asked for")


def test_a_result_says_which_method_and_why(engine: Get) -> None:
    made = engine()
    chosen = made.choose(None)
    result = made.generate(PROMPT, max_new_tokens=4)
    assert result.method_requested is None
    assert result.method_used in made.methods
    assert result.reason.startswith(chosen.reason)
    assert made.generate(PROMPT, method="auto", max_new_tokens=4).method_requested == "auto"
    asked = ask(made, method="speculative")
    assert (asked.method_requested, asked.method_used) == ("speculative", "speculative")
    assert asked.reason.startswith("asked for; draft")
    assert made.methods[:4] == ["ar", "ngram", "speculative", "self-spec"]


def test_a_failing_drafter_costs_its_speed_and_not_the_text(fresh: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fresh()
    expected = ask(made).tokens

    def fail(*_: object) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr("edgespec.drafters.speculative.Speculative.propose", fail)
    result = ask(made, method="speculative", fallback=False)
    assert result.tokens == expected
    assert "out of ideas" in result.reason
    assert result.stats.dropped_reason is not None


def test_settings_may_be_given_once_and_changed_by_name(engine: Get) -> None:
    made = engine()
    settings = Settings(method="ar", max_new_tokens=9, ignore_eos=True, sampling=SamplingParams(1.0, seed=4))
    base = made.generate(PROMPT, settings)
    assert len(base.tokens) == 9
    assert made.generate(PROMPT, settings, max_new_tokens=4).tokens == base.tokens[:4]
    other = made.generate(PROMPT, settings, top_k=1)
    assert other.tokens == ask(made, max_new_tokens=9).tokens  # the other sampling settings stayed, top_k is on top
    assert made.generate(PROMPT, replace(settings, sampling=SamplingParams()), seed=4).tokens == other.tokens


def test_a_stream_is_closed_by_its_with_block(engine: Get) -> None:
    made = engine()
    whole = ask(made, max_new_tokens=20).tokens
    with made.stream(PROMPT, method="ar", max_new_tokens=20, ignore_eos=True) as stream:
        next(stream)
    assert stream.result.finish == "cancelled"
    assert stream.result.tokens == whole[: len(stream.result.tokens)]
    assert list(stream) == []


def test_wrong_types_are_named(engine: Get) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens is '5'"):
        engine().generate(PROMPT, max_new_tokens="5")
    with pytest.raises(InvalidRequest, match=r"gamma is 2\.5"):
        engine().generate(PROMPT, gamma=2.5)
    with pytest.raises(InvalidRequest, match="expected a list of prompts"):
        engine().generate_batch("ROMEO")


def test_costs_are_measured_once_for_all_sessions(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive control starts from this machine, not from the exporting one."""
    import edgespec.engine.sessions

    made = engine()
    made._times.clear()
    made.sessions.clear()
    calls: list[tuple[int, ...]] = []
    from edgespec.formulas.cost import measure as real

    def counted(run: Callable[[int], None], sizes: tuple[int, ...], repeats: int) -> dict[int, float]:
        calls.append(sizes)
        return real(run, sizes, repeats)

    monkeypatch.setattr(edgespec.engine.sessions, "measure", counted)
    made.generate_batch([PROMPT, "The"], method="ngram", max_new_tokens=4)
    assert calls == [edgespec.engine.sessions.VERIFY_SIZES]
    made.generate(PROMPT, method="self-spec", max_new_tokens=4)
    assert calls == [edgespec.engine.sessions.VERIFY_SIZES, (1,)]
