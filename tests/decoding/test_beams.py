"""Beam search compared with transformers', on a model that gives both the same rows."""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.beams import BeamOptions, BeamSearch
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.seq2seq_format import WritingRules
from edgespec.runtimes.text.rules import RuledText

PAD, END, VOCAB = 39, 0, 40
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"no_repeat_ngram_size": 2},
    {"min_length": 8},
    {"bad_words_ids": [[PAD], [3, 4]], "forced_bos_token_id": 7},
)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_texts_are_those_of_transformers() -> None:
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64,
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD, forced_eos_token_id=END, init_std=0.6,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    chance, lengths = np.random.default_rng(0), set()
    for beams, penalty, early, rules in product((2, 5), (1.0, -0.5), (True, False, "never"), RULES):
        source = torch.tensor(chance.integers(1, PAD - 1, (1, int(chance.integers(3, 12)))))
        longest = int(chance.choice([8, 24]))
        how: Any = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early, "max_length": longest}
        with torch.no_grad():
            wanted = model.generate(source, do_sample=False, **how, **rules)[0].tolist()
            encoded = model.get_encoder()(source)[0]
        begin = [PAD, *([rules["forced_bos_token_id"]] if "forced_bos_token_id" in rules else [])]
        written = WritingRules(
            bad_words_ids=rules.get("bad_words_ids", []), no_repeat_ngram_size=rules.get("no_repeat_ngram_size", 0),
            min_length=rules.get("min_length", 0), forced_eos_token_id=END,
        )  # fmt: skip
        constraint = RuledText(written, VOCAB, (END,), len(begin), longest)
        search = BeamSearch(
            begin, BeamOptions(beams, penalty, early), SamplingParams(constraint=constraint), (END,), longest
        )
        while not search.over:
            texts = torch.tensor([beam.tokens for beam in search.going])
            with torch.no_grad():
                found = model(encoder_outputs=(encoded.expand(len(texts), -1, -1),), decoder_input_ids=texts).logits
            search.step(found[:, -1].numpy())
        assert list(search.best.tokens) == wanted, (how, rules)
        lengths.add(len(wanted))
    assert len(lengths) > 3


def test_what_is_refused() -> None:
    for wrong in ({"beams": 0}, {"length_penalty": 1e9}, {"early_stopping": "maybe"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            BeamOptions(**wrong)
    with pytest.raises(InvalidRequest, match="expected more"):
        BeamSearch([1], BeamOptions(), SamplingParams(), (), 1)
    with pytest.raises(EdgespecError, match="finite logits"), np.errstate(all="ignore"):
        BeamSearch([1], BeamOptions(), SamplingParams(), (), 9).step(np.full((1, 4), np.nan, np.float32))
