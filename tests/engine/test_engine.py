"""The front door: every way to ask, every way to end, and what a result says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import BATCH, Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.methods import choose_method
from edgespec.engine.result import Chunk, Result
from edgespec.engine.sessions import MOST_IDLE
from edgespec.errors import InvalidRequest
from edgespec.export.bundle.model import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.source import resolve
from edgespec.formulas.cost import WORTH
from edgespec.runtimes.files.manifest import Manifest, Operators
from tests.conftest import OPERATORS, PROMPTS, TARGET, use_operators
from tests.support import hf

METHODS = ("ar", "ngram", "self-spec", "speculative")
PROMPT = PROMPTS[0]
NEW = 48

Get = Callable[..., Engine]


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Everything here holds for both kinds."""
    return use_operators(request)


@pytest.fixture
def fresh(bundle: Callable[..., Path], operators: Operators) -> Callable[..., Engine]:
    """An engine that has seen nothing."""

    def get(form: str = "int4", **settings: Any) -> Engine:
        return load(bundle(form), threads=1, check=False, **{"operators": operators, **settings})

    return get


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    source = hf.write_checkpoint(folder / "model", hf.CONFIGS["llama_tied_gqa"], 3, chat_template=hf.CHAT_TEMPLATE)
    Exporter(ExportOptions(str(source), folder / "bundle", threads=1)).run()
    return folder / "bundle"


def ask(engine: Engine, prompt: Any = PROMPT, **settings: Any) -> Result:
    """A request whose length does not depend on what the model was trained to end with."""
    return engine.generate(prompt, **{"max_new_tokens": NEW, "ignore_eos": True, "method": "ar", **settings})


# -- ways to ask -------------------------------------------------------------------------------------------------------


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


# -- what stays from request to request --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_recomputes_nothing(fresh: Get, method: str) -> None:
    made = fresh()
    prompt = made.codec.encode(PROMPT)
    first = ask(made, prompt, method=method)
    assert first.stats.reused_tokens == 0
    turn = [*prompt, *first.tokens, *made.codec.encode("\n\nQUEEN:\n")]
    second = ask(made, turn, method=method)
    assert second.stats.prompt_tokens == len(turn)
    assert second.stats.reused_tokens == len(prompt) + len(first.tokens) - 1
    alone = ask(fresh(), turn, method=method)
    assert alone.stats.reused_tokens == 0
    assert second.tokens == alone.tokens
    again = ask(made, prompt, method="ar")  # back to the first turn: the longer cache is cropped
    assert again.stats.reused_tokens == len(prompt) - 1
    assert again.tokens == first.tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_closed_stream_leaves_a_sound_engine(fresh: Get, method: str) -> None:
    made = fresh()
    expected = ask(made, method="ar").tokens
    for rounds in range(4):
        stream = made.stream(PROMPT, method=method, max_new_tokens=NEW, ignore_eos=True, fallback=False)
        for _ in range(rounds):
            next(stream)
        stream.close()
        written = stream.result
        assert written.finish == "cancelled"
        assert written.tokens == expected[: len(written.tokens)]
        assert len(written.tokens) >= rounds
        assert not made.sessions._busy
        assert ask(made, method=method).tokens == expected
        assert ask(made, PROMPTS[3], method=method).tokens == ask(fresh(), PROMPTS[3]).tokens


def test_an_unread_stream_can_be_closed(fresh: Get) -> None:
    made = fresh()
    stream = made.stream(PROMPT)
    assert len(made.sessions._busy) == 1
    stream.close()
    assert stream.result.tokens == []
    assert not made.sessions._busy


def test_idle_conversations_are_kept_but_not_for_ever(fresh: Get) -> None:
    made = fresh()
    streams = [
        made.stream(prompt, max_new_tokens=4, method="ar", ignore_eos=True) for prompt in PROMPTS[: MOST_IDLE + 2]
    ]
    before = made.kv_bytes()
    assert before > 0
    for stream in streams:
        list(stream)
    kept = made.kv_bytes()
    assert len(made.sessions._idle) == MOST_IDLE
    assert kept == sum(session.kv_bytes for session in made.sessions._idle)
    last = PROMPTS[MOST_IDLE + 1]
    assert ask(made, last).stats.reused_tokens == len(made.codec.encode(last)) - 1
    made.close()
    assert made.kv_bytes() == 0
    assert ask(made, last).stats.reused_tokens == 0


def test_two_threads_at_once(fresh: Get) -> None:
    made = fresh()
    jobs = [(prompt, method) for prompt in PROMPTS[:4] for method in METHODS]
    expected = {prompt: ask(made, prompt).tokens for prompt in PROMPTS[:4]}
    got: dict[tuple[str, str], list[int]] = {}
    failures: list[BaseException] = []

    def work(mine: list[tuple[str, str]]) -> None:
        try:
            for prompt, method in mine:
                got[prompt, method] = ask(made, prompt, method=method, fallback=False).tokens
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(jobs[at::2],)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert got == {(prompt, method): expected[prompt] for prompt, method in jobs}


# -- ways to end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_new_tokens_is_kept_exactly(engine: Get, method: str, count: int) -> None:
    made = engine()
    result = ask(made, method=method, max_new_tokens=count, fallback=False)
    assert result.finish == "length"
    assert result.tokens == ask(made).tokens[:count]
    assert result.stats.tokens == count


@pytest.mark.parametrize("method", METHODS)
def test_eos_ends_the_text_even_inside_an_accepted_draft(fresh: Get, method: str) -> None:
    made = fresh()
    plain = ask(made).tokens
    for token in dict.fromkeys(plain[3:30:4]):
        made.eos = frozenset({token})
        result = ask(made, method=method, ignore_eos=False, fallback=False)
        assert result.finish == "eos"
        assert result.tokens == plain[: plain.index(token) + 1]
        assert ask(made, method=method, ignore_eos=True).tokens == plain
        assert (
            ask(made, [*made.codec.encode(PROMPT), *result.tokens], method=method, max_new_tokens=5).tokens
            == (plain[len(result.tokens) : len(result.tokens) + 5])
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(engine: Get, method: str) -> None:
    made = engine()
    plain = ask(made)
    for start, length in ((4, 3), (20, 7), (31, 1)):
        stop = plain.text[start : start + length]
        assert len(stop) == length
        result = ask(made, method=method, stop=stop, fallback=False)
        assert result.finish == "stop"
        assert result.text == plain.text[: plain.text.index(stop)]
        assert result.tokens == plain.tokens[: len(result.tokens)]
        assert stop in made.codec.decode(made.codec.encode(PROMPT) + result.tokens)
    both = ask(made, method=method, stop=("never to be found", plain.text[20:27], plain.text[10:14]))
    assert both.text == plain.text[: min(plain.text.index(plain.text[20:27]), plain.text.index(plain.text[10:14]))]
    assert ask(made, method=method, stop=("never to be found",)).text == plain.text


@pytest.mark.parametrize("method", METHODS)
def test_the_context_ends_the_text(fresh: Get, method: str) -> None:
    made = fresh(context=70)
    prompt = made.codec.encode(PROMPTS[18])[:50]
    assert len(prompt) == 50
    result = ask(made, prompt, method=method, max_new_tokens=500, fallback=False)
    assert result.finish == "context"
    assert len(result.tokens) == 20
    assert result.tokens == ask(fresh(), prompt, max_new_tokens=20).tokens


@pytest.mark.parametrize("method", METHODS)
def test_the_models_own_limit_ends_the_text(engine: Get, method: str) -> None:
    made = engine()
    limit = made.bundle.manifest.target.facts.context
    prompt = (made.codec.encode(PROMPTS[18]) * 40)[: limit - 5]
    assert len(prompt) == limit - 5
    result = ask(made, prompt, method=method, max_new_tokens=500, fallback=False)
    assert (result.finish, len(result.tokens)) == ("context", 5)
    assert result.tokens == ask(made, prompt, max_new_tokens=5).tokens


def test_cancel_ends_after_the_round_at_hand(engine: Get) -> None:
    made, event = engine(), threading.Event()
    expected = ask(made).tokens
    seen: list[Chunk] = []

    def hear(chunk: Chunk) -> None:
        seen.append(chunk)
        if len(seen) == 3:
            event.set()

    result = made.generate(PROMPT, method="ar", max_new_tokens=NEW, ignore_eos=True, on_chunk=hear, cancel=event)
    assert result.finish == "cancelled"
    assert result.tokens == expected[:3]
    assert "".join(chunk.text for chunk in seen) == result.text
    before = made.generate(PROMPT, cancel=event)
    assert (before.tokens, before.text, before.finish) == ([], "", "cancelled")
    stream = made.stream(PROMPT, method="speculative", max_new_tokens=NEW, ignore_eos=True)
    next(stream)
    stream.cancel()
    assert all(chunk.round is None for chunk in stream)  # nothing but text that was held back
    assert stream.result.finish == "cancelled"
    assert stream.result.tokens == expected[: len(stream.result.tokens)]


def test_a_draft_with_less_context_than_its_target(tmp_path: Path) -> None:
    """It drafts as far as it reaches; then the target goes on alone."""
    config = hf.CONFIGS["llama_tied_gqa"]
    target = hf.write_checkpoint(tmp_path / "target", config, 3)
    draft = hf.write_checkpoint(tmp_path / "draft", {**config, "max_position_embeddings": 64}, 3)
    Exporter(ExportOptions(str(target), tmp_path / "b", ["speculative"], "fp32", draft=str(draft), threads=1)).run()
    made = load(tmp_path / "b", threads=1)
    result = ask(made, [5, 6, 7], method="speculative", adaptive=False, max_new_tokens=120)
    assert result.tokens == ask(made, [5, 6, 7], max_new_tokens=120).tokens
    assert result.stats.dropped_reason is None
    assert 0 < result.stats.accepted < 64


# -- what is refused ---------------------------------------------------------------------------------------------------


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


# -- what a result says ------------------------------------------------------------------------------------------------


def test_the_keys_of_a_result_are_stable(engine: Get) -> None:
    made = engine()
    keys = ["text", "tokens", "finish", "method_requested", "method_used", "reason", "lossless", "exact",
            "approximations", "operators", "device", "stats"]  # fmt: skip
    found = ask(made, method="speculative", max_new_tokens=5).as_dict()
    assert list(found) == keys
    assert list(ask(made, logprobs=True, max_new_tokens=5).as_dict()) == [*keys, "logprobs"]
    assert list(found["stats"]) == [
        "prompt_tokens", "reused_tokens", "tokens", "rounds", "drafted", "accepted", "acceptance_rate",
        "tokens_per_round", "histogram", "offered", "accepted_at", "prefill_ms", "draft_ms", "verify_ms", "other_ms",
        "tokens_per_second", "dropped_reason", "recent", "predicted_speedup", "measured_speedup", "work_per_token",
        "plain_rounds", "drafted_rounds", "probes", "fallbacks", "recoveries", "drops", "switches", "shadow",
        "peak_bytes", "predicted_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_statistics_add_up(engine: Get, method: str) -> None:
    result = ask(engine(), method=method, fallback=False)
    stats = result.stats
    assert stats.tokens == len(result.tokens) == NEW
    assert stats.tokens == stats.rounds + stats.accepted
    assert sum(stats.histogram) == stats.rounds
    assert sum(at * count for at, count in enumerate(stats.histogram)) == stats.accepted == sum(stats.accepted_at)
    assert stats.accepted <= sum(stats.offered) <= stats.drafted
    assert all(ms >= 0 for ms in (stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.other_ms))
    assert (stats.drafted > 0) == (method != "ar")
    assert result.peak_bytes > 1 << 20


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_the_source_model(engine: Get, method: str) -> None:
    made = engine("fp32")
    prompt = made.codec.encode(PROMPT)
    for settings in ({}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        result = ask(made, method=method, logprobs=True, fallback=False, **settings)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.tokens)
        text = [*prompt, *result.tokens]
        arch = open_model(resolve(TARGET), None)
        logits = reference_logits(arch, text, list(range(len(prompt) - 1, len(text) - 1))).astype(np.float64)
        log_softmax = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_softmax -= logits.max(-1, keepdims=True)
        expected = log_softmax[np.arange(NEW), result.tokens]
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=2e-4)
    assert ask(made, method=method).logprobs is None


def test_exact_is_claimed_only_where_it_holds(engine: Get, fresh: Get) -> None:
    made, loose = engine("int4"), fresh("int4", strict=False)
    assert ask(made, method="speculative").exact
    assert ask(made, method="ngram", temperature=1.0, max_new_tokens=4).exact
    assert ask(made, method="speculative", temperature=1.0, acceptance="coupled", max_new_tokens=4).exact
    assert not ask(made, method="speculative", temperature=1.0, max_new_tokens=4).exact
    assert not ask(loose, method="ar", max_new_tokens=4).exact
    assert not ask(loose, method="speculative", max_new_tokens=4).exact
    assert ask(loose, method="speculative", max_new_tokens=4).lossless


def test_exact_is_not_claimed_where_the_probe_fails(fresh: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.engine.engine.rows_exact", lambda slot: False)
    made = fresh("int4")
    assert not ask(made, method="ngram", max_new_tokens=4).exact
    assert ask(made, method="ar", max_new_tokens=4).exact


def test_approximations_are_named(engine: Get, operators: Operators) -> None:
    cache = ["float16 keys", "float16 values"] if operators == "native" else []
    assert engine("fp32").approximations == []
    for form in ("int4", "int8", "w8a8"):
        result = ask(engine(form), max_new_tokens=2)
        assert result.approximations == [f"{form} weights", "8-bit activations", *cache]


# -- which method ------------------------------------------------------------------------------------------------------


def predicted(manifest: Manifest, **speedups: float | None) -> Manifest:
    methods = {
        name: part.model_copy(update={"predicted_speedup": speedups.get(name.replace("-", "_"))})
        for name, part in manifest.methods.items()
    }
    return manifest.model_copy(update={"methods": methods})


def test_the_default_method_is_the_one_predicted_fastest(engine: Get) -> None:
    manifest = engine().bundle.manifest
    best = choose_method(predicted(manifest, speculative=1.4, self_spec=1.2), None)
    assert (best.name, "1.40x" in best.reason) == ("speculative", True)
    assert choose_method(predicted(manifest, speculative=1.1, self_spec=1.2), None).name == "self-spec"
    slow = choose_method(predicted(manifest, speculative=WORTH - 0.01, self_spec=0.7), None)
    assert (slow.name, "default" in slow.reason) == ("ngram", True)
    assert choose_method(predicted(manifest), None).name == "ngram"
    asked = choose_method(predicted(manifest, speculative=1.4), "self-spec")
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

    monkeypatch.setattr("edgespec.drafters.speculative.DraftModel.propose", fail)
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
    made.close()
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
