"""Masks of grammars over a small vocabulary in SentencePiece's way, where a lone token writes a space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
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
