"""Texts that must follow a grammar: valid, the same by every method, and cheaper for what the grammar forces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.settings import Grammar
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from tests.support.schemas import PERSON, SCHEMAS

PROMPT = "KING RICHARD:\n"
METHODS = "ngram", "speculative", "self-spec", "medusa", "swift", "blockwise", "paradecode"


@pytest.mark.parametrize("number", range(50))
def test_every_schema_is_followed_by_plain_decoding_and_by_drafts(engine: Callable[..., Engine], number: int) -> None:
    own, grammar = engine(), Grammar.json_schema(SCHEMAS[number])
    how: dict[str, Any] = {"temperature": 1.0, "seed": number, "acceptance": "coupled"} if number % 2 else {}
    plain = own.generate(PROMPT, method="ar", grammar=grammar, max_new_tokens=200, **how)
    assert plain.finish == "eos"
    jsonschema.validate(json.loads(plain.text), SCHEMAS[number])
    drafted = own.generate(PROMPT, method=METHODS[number % len(METHODS)], grammar=grammar, max_new_tokens=200, **how)
    assert drafted.lossless
    if drafted.method_used == "medusa":  # stock operators sum a tree's rows in another order: near-ties may differ
        jsonschema.validate(json.loads(drafted.text), SCHEMAS[number])
    else:
        assert drafted.tokens == plain.tokens
        assert drafted.exact
    assert drafted.stats.rounds <= plain.stats.rounds


def test_a_grammar_is_compiled_once(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLMatcher

    own, make = engine(), LLMatcher.grammar_from_regex
    compiled: list[str] = []

    def noted(text: str) -> str:
        compiled.append(text)
        return str(make(text))

    monkeypatch.setattr(LLMatcher, "grammar_from_regex", noted)
    own.guidance.require(Grammar.regex("[a-f]{3,5}once"))
    texts = {own.generate(PROMPT, grammar=Grammar.regex("[a-f]{3,5}once"), method="ar").text for _ in range(3)}
    assert len(compiled) == len(texts) == 1
    assert re.fullmatch("[a-f]{3,5}once", texts.pop())


@pytest.mark.parametrize("method", METHODS)
def test_forced_tokens_are_free_guesses(engine: Callable[..., Engine], method: str) -> None:
    grammar = Grammar.json_schema(PERSON)
    found = engine().generate(PROMPT, method=method, grammar=grammar, max_new_tokens=80)
    assert int(re.findall(r"the grammar guessed in (\d+) rounds", "; ".join(found.details))[0]) >= 2
    assert len(found.tokens) >= found.stats.rounds + 8  # of the names of the two fields, quotes and colons


def test_plain_decoding_stays_plain(engine: Callable[..., Engine]) -> None:
    found = engine().generate(PROMPT, method="ar", grammar=Grammar.json_schema(PERSON), max_new_tokens=80)
    assert found.stats.rounds == len(found.tokens)


def test_drawn_texts_follow_the_masked_distribution(engine: Callable[..., Engine]) -> None:
    """Rejection with drafts, against the model's own probabilities of each of the few texts."""
    own = engine()
    grammar = Grammar.regex("(king|queen|fool|knave)")
    prompt = own.codec.encode(PROMPT)
    params = SamplingParams(temperature=1.5)
    chances = {}
    for word in ("king", "queen", "fool", "knave"):
        chances[word] = sum(_chance(own, prompt, ids, grammar, params) for ids in _spellings(own, word))
    assert sum(chances.values()) == pytest.approx(1, abs=1e-3)
    draws = 400
    texts = [
        own.generate(prompt, method="speculative", fallback=False, grammar=grammar, temperature=1.5, seed=seed).text
        for seed in range(draws)
    ]
    for word, chance in chances.items():
        share = texts.count(word) / draws
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / draws) ** 0.5 + 1e-3, (word, share, chance)


def _spellings(own: Engine, word: str) -> list[list[int]]:
    """Every way to write a word with tokens of the vocabulary."""
    pieces = {own.codec.decode([token]): token for token in range(2, own.codec.vocab_size)}
    found = []
    for cuts in product([False, True], repeat=len(word) - 1):
        parts, start = [], 0
        for at, cut in enumerate((*cuts, True), 1):
            if cut:
                parts.append(word[start:at])
                start = at
        if all(part in pieces for part in parts):
            found.append([pieces[part] for part in parts])
    return found


def _chance(own: Engine, prompt: list[int], ids: list[int], grammar: Grammar, params: SamplingParams) -> float:
    """Probability of a text by plain decoding's rows, masked."""
    masked = replace(params, constraint=own.guidance.constraint(grammar, len(prompt)))
    session = own.sessions.take([])
    try:
        target, chance = session.target, 1.0
        target.follow([])
        target.prefill(prompt[:-1])
        tokens = list(prompt)
        for token in ids:
            row = target.forward(np.array(tokens[-1:], np.int64)).logits[0]
            chance *= distribution(row.copy(), masked, tokens)[token]
            target.keep([0])
            tokens.append(token)
        return float(chance)
    finally:
        own.sessions.give_back(session)


@pytest.mark.parametrize(
    "grammar, pattern",
    [
        (Grammar.regex(r"[a-z]{3,5}(, [a-z]{3,5}){2}\."), r"[a-z]{3,5}(, [a-z]{3,5}){2}\."),
        (Grammar.lark('start: "Act " /[1-5]/ ", scene " /[1-9]/'), r"Act [1-5], scene [1-9]"),
    ],
)
def test_expressions_and_grammars(engine: Callable[..., Engine], grammar: Grammar, pattern: str) -> None:
    for seed in range(5):
        found = engine().generate(PROMPT, grammar=grammar, temperature=1.0, seed=seed, max_new_tokens=60)
        assert re.fullmatch(pattern, found.text)
        assert found.finish == "eos"


def test_several_at_once_each_with_its_own(engine: Callable[..., Engine]) -> None:
    grammar = Grammar.json_schema(PERSON)
    texts = [found.text for found in engine().generate_batch([PROMPT, "ROMEO:\n", PROMPT], grammar=grammar, batch=3)]
    alone = [engine().generate(prompt, grammar=grammar, method="ar").text for prompt in (PROMPT, "ROMEO:\n", PROMPT)]
    assert texts == alone


@pytest.mark.parametrize(
    "grammar",
    [Grammar.regex("("), Grammar.json_schema("{"), Grammar.json_schema({"type": "what"}), Grammar.lark("start: x"),
     Grammar.json_schema('{"$ref": "http://example.com/x"}'), Grammar.regex("a" * (2 << 20))],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(engine: Callable[..., Engine], grammar: Grammar) -> None:
    own = engine()
    with pytest.raises(InvalidRequest):
        own.generate(PROMPT, grammar=grammar)
    assert own.generate(PROMPT, max_new_tokens=3).tokens  # and the engine still works
