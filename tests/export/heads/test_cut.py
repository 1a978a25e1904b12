"""A cut LM head scores its tokens as the whole one does, with the biases that phi has there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.head_choice import HeadChoice, cut_draft, write_tokens
from edgespec.export.drafters.heads import HeadsFile, TrainedHeads
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.derived import Held
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import Layout
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model

TOKENS = np.array([0, 1, 5, 17, 40, 41, 99, 149])
TEXT = np.array([3, 90, 14, 77, 2, 51])


@pytest.mark.parametrize("layout", ["stock", "native"])
@pytest.mark.parametrize("name", ["phi_half", "phi_gqa", "llama_tied_gqa"])
def test_a_cut_head_has_the_rows_and_the_biases(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, layout: Layout, request: pytest.FixtureRequest
) -> None:
    if layout == "native":
        request.getfixturevalue("native")
    whole = open_model(checkpoint(name), None)
    expected = reference_logits(whole, TEXT.tolist(), list(range(len(TEXT))))[:, TOKENS]
    assert (whole.head.bias is not None) == name.startswith("phi")
    if whole.head.bias is not None:
        assert np.abs(whole.source.read(whole.head.bias)[TOKENS]).max() > 0.01  # else this would show nothing

    draft = open_model(checkpoint(name), None)
    plan, vocab = cut_draft(draft, TOKENS), write_tokens(tmp_path, "", TOKENS)
    part = write_model(tmp_path, draft, "fp32", draft=True, layout=layout, plan=plan, head_vocab=vocab).part
    graph = "plain" if layout == "stock" else "native"
    slot = open_slot(Model(tmp_path, part, graph, 1, ATTENTION["f32"]))
    np.testing.assert_allclose(slot.forward(TEXT).logits, expected, rtol=0, atol=2e-4)

    target, last = open_model(checkpoint(name), None), whole.facts.layers
    same = Held(np.eye(target.facts.hidden, dtype=np.float32))  # an exit after all layers that changes nothing
    file = HeadsFile(kind="paradecode", count=1, hidden=target.facts.hidden, vocab=0, exits=[last])
    heads = HeadChoice({"paradecode": TrainedHeads(file, {f"exit.{last}.weight": same})}, TOKENS)
    heads.extend(target)
    part = write_model(tmp_path, target, "fp32", gated=True, layout=layout, plan=heads.plan, head_vocab=vocab).part
    slot = open_slot(Model(tmp_path, part, "gated" if layout == "stock" else "native", 1, ATTENTION["f32"]))
    slot.keep_hidden = True
    hidden = slot.forward(TEXT).hidden
    assert hidden is not None
    got = slot.forward_heads(f"exit.{last}", hidden.copy()).logits
    assert got is not None
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=2e-4)
