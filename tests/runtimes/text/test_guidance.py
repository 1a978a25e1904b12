"""Masks of grammars over a small vocabulary in SentencePiece's way, where a lone token writes a space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text import guidance as module
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.guidance import Guidance

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NAMES = ["<unk>", "<s>", "</s>", *BYTES, "▁", '"', '▁"', ":", "a", *"0123456789"]
IDS = {name: number for number, name in enumerate(NAMES)}
EOS = IDS["</s>"]


@pytest.fixture
def guidance(tmp_path: Path) -> Guidance:
    tokenizer = Tokenizer(BPE(IDS, [("▁", '"')], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Guidance(TextCodec(tmp_path), [EOS], len(NAMES))


def walk(guidance: Guidance, grammar: str, names: list[str]) -> list[set[str]]:
    """Return the tokens that ``grammar`` allows before each of ``names``, which follow one another."""
    constraint = guidance.constraint(Grammar.regex(grammar), 0)
    found = []
    for at in range(len(names)):
        mask = constraint.allowed([IDS[name] for name in names[:at]])
        assert mask is not None
        found.append({NAMES[token] for token in np.flatnonzero(mask)})
    return found


def test_a_space_that_a_lone_token_writes_is_not_skipped(guidance: Guidance) -> None:
    found = walk(guidance, "a: [1-9]", ["a", ":", "▁", "5", "</s>"])
    assert "▁" in found[2]
    assert found[2] <= {"▁", "<0x20>"}
    assert "5" in found[3]
    assert "0" not in found[3]
    assert found[4] == {"</s>"}


def test_a_token_that_writes_the_space_and_more_may_come(guidance: Guidance) -> None:
    found = walk(guidance, 'a: "[1-9]', ["a", ":", '▁"', "5"])
    assert found[2] <= {"▁", "<0x20>", '▁"'}
    assert "5" in found[3]


def test_a_text_never_goes_on_without_its_grammar(guidance: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = guidance.constraint(Grammar.regex("a: [1-9]"), 0)
    wrong = np.ones(len(NAMES), np.bool_)
    monkeypatch.setattr(guidance, "agreeing", lambda mask, forced: wrong)
    assert constraint.allowed([IDS["a"], IDS[":"]]) is wrong
    with pytest.raises(InvalidRequest, match="allowed, and then refused"):
        constraint.allowed([IDS["a"], IDS[":"], IDS["5"]])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"$ref": "#"}),
        Grammar.json_schema({"$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"],
                                             "type": "object"}}, "$ref": "#/$defs/a"}),
        Grammar.lark('start: "a" start'),
        Grammar.lark('start: "a" X\nX: /b/ & /c/'),
        Grammar.lark('start: A | ":" B "a"\nA: /a+/\nB: /b/ & /c/'),
        Grammar.json_schema("[1"),
        Grammar.json_schema("3"),
        Grammar.regex("("),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_to_an_end_is_refused_before_it_begins(guidance: Guidance, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as raised:
        guidance.try_out(grammar)
    assert "<state>" not in str(raised.value)
    assert "verbose" not in str(raised.value)


def test_trying_refuses_nothing_that_can_be_followed(guidance: Guidance) -> None:
    for grammar in (Grammar.regex("a: [1-9]*"), Grammar.json_schema({"type": "object"}), Grammar.regex("(a|:){9}")):
        guidance.try_out(grammar)
        assert not guidance.is_large(grammar)


WIDE = Grammar.regex("(.*a.{9}[0-9].*|.*:.{8}a.*)[0-9]")  # whose lexer has thousands of states


def test_a_text_whose_states_grow_goes_on_and_is_not_kept(guidance: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [IDS[name] for name in "aa:a0:1a:aa:19a0a:a:91aaa::0a1"]
    whole = guidance.constraint(WIDE, 0)
    masks = [whole.allowed(text[:at]) for at in range(len(text))]
    assert guidance.nbytes(WIDE) < 3 << 20
    monkeypatch.setattr(module, "FEW_STATES", 24)
    monkeypatch.setattr(module, "MANY_STATES", 400)
    guidance.forget()
    small = guidance.constraint(WIDE, 0)
    claimed = guidance.nbytes(WIDE)
    for at, mask in enumerate(masks):
        assert mask is not None
        np.testing.assert_array_equal(small.allowed(text[:at]), mask)
    assert guidance.is_large(WIDE)
    assert guidance.nbytes(WIDE) > claimed
    assert guidance.kept_bytes == 0


def test_a_grammar_that_is_too_complex_says_so_in_words(guidance: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_STATES", 24)
    monkeypatch.setattr(module, "MANY_STATES", 26)
    with pytest.raises(InvalidRequest, match="too many states") as raised:
        guidance.try_out(WIDE)
    assert "state>" not in str(raised.value)
