"""Calls that a grammar forces: every sampled text is calls of the given tools, in every format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.answer import AnswerReader
from edgespec.runtimes.text.call_formats import FORMATS, AnswerShape, types_of
from edgespec.runtimes.text.call_grammar import after_thoughts, calls_grammar
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.guidance import Guidance
from edgespec.runtimes.text.stream import StreamDecoder
from tests.runtimes.text.test_answer import collected
from tests.support import hf

EOS = 1
TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "maximum": 9},
                "unit": {"enum": ["C", "F"]},
                "where": {"$ref": "#/$defs/place"},
            },
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"on": {"type": "boolean"}},
                    "required": ["on"],
                    "additionalProperties": False,
                }
            },
            "required": ["city", "where"],
            "additionalProperties": False,
        },
    },
    {"name": "noop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Make one that knows every marker as a special token."""
    made = hf.make_tokenizer(400, True)
    markers = sorted({marker for form in FORMATS.values() for marker in form.markers if marker[0] != "`"})
    made.add_special_tokens([AddedToken(one, special=True) for one in markers if one.startswith(("<|", "["))])
    return made


def drawn(tokenizer: Tokenizer, grammar: Grammar, seed: int) -> str | None:
    """Draw a text; None = it was not over after many tokens."""
    vocab, draw = tokenizer.get_vocab_size(), random.Random(seed)
    reader = LLTokenizer(tokenizer.to_str(), n_vocab=vocab, eos_token=EOS)
    matcher = LLMatcher(reader, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.get_error()
    tokens: list[int] = []
    while len(tokens) < 400 and not matcher.is_stopped():
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(packed, count=vocab, bitorder="little").nonzero()[0].tolist()
        if allowed == [EOS] or (EOS in allowed and draw.random() < 0.6):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        others = [token for token in allowed if token != EOS]
        ends = [token for token in others if token >= 400 or set(str(tokenizer.id_to_token(token))) & set('"<>/')]
        tokens.append(draw.choice(ends if ends and draw.random() < 0.5 else others))
        assert matcher.try_consume_tokens(tokens[-1:])
    return str(tokenizer.decode(tokens, skip_special_tokens=False)) if matcher.is_stopped() else None


def special(tokenizer: Tokenizer, shape: AnswerShape) -> dict[str, int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.content in shape.markers}


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_forced_is_calls(tokenizer: Tokenizer, form: str) -> None:
    shape = AnswerShape(form, "gpt-oss" if form == "gpt-oss" else None, tools=types_of(TOOLS))
    grammar = calls_grammar(shape, TOOLS, True, special(tokenizer, shape))
    schemas = {tool["name"]: tool["parameters"] for tool in TOOLS}
    names: set[str] = set()
    ended = 0
    for seed in range(12):
        if (text := drawn(tokenizer, grammar, seed)) is None:
            continue
        ended += 1
        reader = AnswerReader(shape)
        _, said, calls = collected(reader.push(text) + reader.finish())
        assert not said
        assert calls
        for name, arguments, whole in calls:
            assert whole
            jsonschema.validate(json.loads(arguments), schemas[name])
            names.add(name)
    assert ended > 3
    assert names == set(schemas)


def test_one_call_is_one(tokenizer: Tokenizer) -> None:
    shape = AnswerShape("mistral", tools=types_of(TOOLS))
    grammar = calls_grammar(shape, TOOLS[1:], False, special(tokenizer, shape))
    assert {drawn(tokenizer, grammar, seed) for seed in range(4)} == {"[TOOL_CALLS]noop[ARGS]{}"}


@pytest.mark.parametrize(
    "rest", [Grammar.regex("yes/no"), Grammar.json_schema({"const": "yes/no"}), Grammar.lark('start: "yes/no"')]
)
def test_thoughts_come_before_what_is_forced(tokenizer: Tokenizer, rest: Grammar) -> None:
    shape = AnswerShape(None, "think", opened=True)
    grammar = after_thoughts(rest, shape, {})
    if rest.kind == "lark":
        assert grammar is rest
        return
    reader = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=EOS)
    matcher = LLMatcher(reader, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert matcher.try_consume_tokens(tokenizer.encode("so </think", add_special_tokens=False).ids)
    assert not matcher.is_accepting()
    said = "yes/no" if rest.kind == "regex" else '"yes/no"'
    assert matcher.try_consume_tokens(tokenizer.encode(f">\n\n{said}", add_special_tokens=False).ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>so it is<|end|><|start|>assistant"])
def test_channels_come_before_what_is_forced(tokenizer: Tokenizer, thought: str) -> None:
    shape = AnswerShape.of("<|channel|><|message|>", "<|start|>assistant", [])
    assert shape.opened
    assert not AnswerShape.of("<|channel|><|message|>", "<|channel|>final<|message|>It", []).opened
    grammar = after_thoughts(Grammar.json_schema({"const": "yes"}), shape, special(tokenizer, shape))
    reader = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=EOS)
    matcher = LLMatcher(reader, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not matcher.validate_tokens(tokenizer.encode('"yes"', add_special_tokens=False).ids)
    written = f'{thought}<|channel|>final<|message|>"yes"'
    assert matcher.try_consume_tokens(tokenizer.encode(written, add_special_tokens=False).ids)
    assert matcher.is_accepting()


def test_tools_that_cannot_be_written_are_refused() -> None:
    for tools, message in (([], "no tool"), ([{"name": "a b"}], "tool's name"), ([{}], "tool's name")):
        with pytest.raises(InvalidRequest, match=message):
            calls_grammar(AnswerShape("hermes"), tools, True, {})


@pytest.mark.parametrize("calls", [None, "gpt-oss", "json"])
def test_special_tokens_between_channels_are_kept_without_tools(
    tokenizer: Tokenizer, tmp_path: Path, calls: str | None
) -> None:
    """Channels are told apart by special tokens, whether there are tools or not."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec, shape = TextCodec(tmp_path), AnswerShape(calls, "gpt-oss")
    written = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    stream = StreamDecoder(codec, [5], markers=tuple(codec.special_ids(shape.markers)))
    text = stream.push(codec.encode(written)) + stream.finish()
    reader = AnswerReader(shape)
    found = [*reader.push(text), *reader.finish()]
    parts = {kind: "".join(one.text for one in found if one.kind == kind) for kind in ("reasoning", "text")}
    assert parts == {"reasoning": "hm", "text": "yes"}


def test_special_tokens_are_forced_and_kept_in_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A marker that is a special token is one token of the grammar, and the stream writes it; others stay left out."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    shape = AnswerShape("mistral", tools=types_of(TOOLS))
    special = codec.special_ids(shape.markers)
    assert set(special) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    guidance = Guidance(codec, [EOS], codec.vocab_size)
    constraint = guidance.constraint(calls_grammar(shape, TOOLS[1:], False, special), 1)
    tokens = [5]
    while len(tokens) < 40:
        mask = constraint.allowed(tokens)
        assert mask is not None
        token = int(mask.nonzero()[0][0])
        forced = constraint.forced(tokens, 1)
        assert not forced or mask[forced[0]]
        token = forced[0] if forced else token
        if token == EOS:
            break
        tokens.append(token)
    assert tokens[1] == special["[TOOL_CALLS]"]
    other = codec.token_id("<|tool_call>")
    assert other is not None
    for markers, text in ((tuple(special), "[TOOL_CALLS]noop[ARGS]{}"), ((), "noop{}")):
        stream = StreamDecoder(codec, tokens[:1], markers=markers)
        assert stream.push([other, *tokens[1:]]) + stream.finish() == text
