"""Encoder-decoders equal transformers: what encoders give, logits, and greedy texts, from what transformers saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.descriptions import traits
from edgespec.export.architectures.seq2seq import EncoderDecoder
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.layers import Array
from edgespec.export.quantization.reference import reference_logits, reference_rows
from edgespec.runtimes.audio.features import encoder_rows
from tests.support import seq2seq

Opened = tuple[EncoderDecoder, Array]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Open a case, and compute what its encoder gives of its source."""

    def opener(name: str) -> Opened:
        arch = open_model(seq2seq.write_case(tmp_path_factory.mktemp(name), name), None)
        assert isinstance(arch, EncoderDecoder)
        assert arch.encoder is not None
        source = seq2seq.reference(name)["source"]
        given = source.tolist() if arch.sound is None else encoder_rows(source, arch.sound)
        return arch, reference_rows(arch.encoder, given)

    return opener


@pytest.mark.parametrize("name", seq2seq.CASES)
def test_numpy_equals_transformers(opened: Callable[[str], Opened], name: str) -> None:
    (arch, encoded), known = opened(name), seq2seq.reference(name)
    np.testing.assert_allclose(encoded[0], known["encoded"], atol=1e-4, rtol=0)
    logits = reference_logits(arch, known["tokens"].tolist(), known["rows"].tolist(), floats=encoded)
    np.testing.assert_allclose(logits, known["logits"], atol=1e-4, rtol=0)
    tokens = [*known["tokens"][:1].tolist(), *known["greedy"].tolist()]
    rows = np.arange(len(tokens) - 1)
    found = reference_logits(arch, tokens, rows.tolist(), floats=encoded)
    assert (found[rows, tokens[1:]] >= found.max(-1) - 1e-4).all()


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    found = seq2seq.saved("marian")
    shapes = {name: shape for name, shape in found["tensors"].items() if "encoder.layers.1.fc1" not in name}
    with pytest.raises(ExportError, match="fc1"):
        open_model(seq2seq.write_checkpoint(tmp_path, found["config"], shapes), None)


def test_a_context_is_that_of_both_only_where_positions_are_relative(tmp_path: Path) -> None:
    def contexts(name: str) -> tuple[int, int]:
        arch: Architecture = open_model(seq2seq.write_case(tmp_path / name, name), 300)
        assert arch.encoder is not None
        return arch.facts.context, arch.encoder.facts.context

    assert contexts("t5") == (300, 300)
    assert contexts("bart") == (300, 400)


@pytest.mark.parametrize(
    "name, said",
    [("marian", "sinusoids as positions"), ("t5", "biases by distance, up to 50"), ("bart", "learned positions"),
     ("whisper", "encoder of 2 layers with 4 heads, which reads up to 50 rows of sound")],
)  # fmt: skip
def test_what_sets_it_apart_is_said(tmp_path: Path, name: str, said: str) -> None:
    assert said in traits(open_model(seq2seq.write_case(tmp_path, name), None))
