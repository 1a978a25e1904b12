"""Every architecture in int4, on stock and native operators: the text is plain decoding's.

Each is decoded by a draft model, by skipped layers and by exits, whose passes depend on the architecture, and by one
method more; each kind of state by all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.architectures.seq2seq import EncoderDecoder
from edgespec.reports.proof import prove
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from tests.conftest import OPERATORS
from tests.lossless.conftest import HEADS, engine_of
from tests.lossless.test_matrix import CHAINS, plain_greedy
from tests.support import hf
from tests.support.requests import caches_of
from tests.support.zoo import WITHOUT_REFERENCE

PROMPTS = ("the boat that", "There was nothing left to do but wait. She had")
TOKENS = 40
ALWAYS = ("self-spec", "speculative", "paradecode")
IN_TURN = ("medusa", "ngram", "swift", "blockwise", "chain")
# layers that are all alike, windows, convolutions, delta rules, keys and values that layers share, experts
ALL = {"llama", "gemma3_text", "lfm2", "qwen3_5_text", "gemma4_text", "qwen3_moe", "granitemoehybrid with state spaces"}
# one configuration of each, with windows, caps and the like where it has any; swift needs three layers
CASES = {
    config["model_type"]: name
    for name, config in reversed(hf.CONFIGS.items())
    if (config.get("num_hidden_layers") or config["n_layer"]) > 2
}
CASES["granitemoehybrid with state spaces"] = "granite_hybrid_experts"
CASES["gemma4_text with experts"] = "gemma4_experts"
METHODS = {
    kind: (*ALWAYS, *(IN_TURN if kind in ALL else (IN_TURN[at % len(IN_TURN)],)))
    for at, kind in enumerate(sorted(CASES))
}
LOSSLESS = CHAINS | {"paradecode": {"threshold": 0.05}}  # capped logits are never sure


# stock operators in every run: windows, caps, learnt positions, fused and parallel layers; sub-layers, trees and kept
# paths of the others are compared in tests/export/architectures/test_architectures.py, and their texts nightly
STOCK = {"llama", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "falcon", "phi3", "cohere2"}
EACH = pytest.mark.parametrize(
    "model_type, operators",
    [
        pytest.param(kind, each, marks=[pytest.mark.nightly] if each == "stock" and kind not in STOCK else [])
        for kind in sorted(CASES)
        for each in OPERATORS
        if each == "native" or CASES[kind] not in hf.NATIVE_ONLY
    ],
    indirect=["operators"],
)


@pytest.fixture(scope="module")
def maker(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Operators, str], Engine]:
    """(operators, kind of ``CASES``) -> an engine; the draft is the model itself, so that much is accepted."""
    known: dict[tuple[Operators, str], Engine] = {}

    def get(operators: Operators, model_type: str) -> Engine:
        name = CASES[model_type]
        if (operators, model_type) not in known:
            heads = [kind for kind in HEADS if kind in METHODS[model_type]]
            source, context = str(checkpoint(name)), hf.CONTEXTS.get(name)
            folder = tmp_path_factory.mktemp("bundle")
            known[operators, model_type] = engine_of(folder, source, operators, "int4", heads, context)
        return known[operators, model_type]

    return get


@pytest.fixture
def made(model_type: str, operators: Operators, maker: Callable[[Operators, str], Engine]) -> tuple[str, Engine]:
    """Return the configuration's name for ``model_type``, and its engine."""
    return CASES[model_type], maker(operators, model_type)


def test_every_architecture_is_here() -> None:
    """Encoder-decoders have tests/engine/test_encoder_decoders.py, drawing models tests/images/test_drawing.py."""
    decoders = {name for name, kind in ARCHITECTURES.items() if not issubclass(kind, EncoderDecoder)}
    assert {hf.CONFIGS[name]["model_type"] for name in CASES.values()} == decoders - WITHOUT_REFERENCE


@EACH
def test_architectures_are_lossless_in_int4(made: tuple[str, Engine], model_type: str) -> None:
    _, engine = made
    graph = "native" if engine.operators.kind == "native" else "gated"
    slot = open_slot(Model(engine.bundle.path, engine.bundle.manifest.target, graph, 2))
    expected = [plain_greedy(slot, engine.codec.encode(prompt), TOKENS) for prompt in PROMPTS]
    # where rows of a pass cost more, as with experts, control might never guess
    plain = engine.bundle.manifest.target.facts.experts is None
    settings = Settings(max_new_tokens=TOKENS, ignore_eos=True, fallback=False, adaptive=plain)
    drawn = settings.changed(temperature=0.8, seed=3, acceptance="coupled")
    sampled = [engine.generate(prompt, drawn, method="ar").tokens for prompt in PROMPTS]
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for at, method in enumerate(METHODS[model_type]):
        more: dict[str, Any] = LOSSLESS.get(method, {})
        for wanted, greedy in ((settings.changed(**more), True), (drawn.changed(**more), False)):
            number = (at + greedy) % len(PROMPTS)  # one greedily, the other sampled
            prompt, tokens = PROMPTS[number], (expected if greedy else sampled)[number]
            result = engine.generate(prompt, wanted, method=method)
            assert result.tokens == tokens, f"{method} differs from plain decoding after {prompt!r}"
            assert result.method_used == method
            assert result.lossless
            assert result.exact
            drafted[method] = drafted.get(method, 0) + result.stats.drafted
            accepted[method] = accepted.get(method, 0) + result.stats.accepted
    assert all(drafted.values())
    assert accepted["speculative"] > drafted["speculative"] // 2
    assert sum(accepted.values()) < sum(drafted.values())  # some rows were rolled back


@EACH
def test_architectures_in_trees(made: tuple[str, Engine], model_type: str) -> None:
    """Equal on native operators; on stock ones rows of a tree add up in another order: equal, or a near-tie."""
    _, engine = made
    exact = engine.operators.kind == "native"
    settings = Settings(max_new_tokens=30, ignore_eos=True, fallback=False)
    trees: dict[str, dict[str, Any]] = {"speculative": {"branch": (2,), "gamma": 3}, "medusa": {"nodes": 8}}
    for method, more in trees.items():
        if method not in METHODS[model_type]:
            continue
        (proof,) = prove(engine, PROMPTS, settings.changed(**more), [method])
        assert proof.lossless, (method, proof.differences)
        assert proof.exact or not exact, (method, proof.differences)
        result = engine.generate(PROMPTS[0], settings.changed(**more), method=method)
        assert result.stats.drafted
        assert result.exact == exact


@EACH
def test_architectures_keep_their_cache(made: tuple[str, Engine], model_type: str) -> None:
    """The cache after a method equals that of a fresh prefill of its text, in every row."""
    _, engine = made
    fresh = open_slot(engine.model)
    for method in METHODS[model_type]:
        if method in ("speculative", "ngram", "chain"):  # guesses of these come from elsewhere
            continue
        result = engine.generate(PROMPTS[0], method=method, max_new_tokens=40, ignore_eos=True, fallback=False)
        tokens = engine.codec.encode(PROMPTS[0]) + result.tokens
        held, written = caches_of(engine, fresh, tokens)
        for key, expected in written.items():  # [kv_heads, tokens, head_dim]
            wrong = np.linalg.norm(held[key] - expected, axis=(0, 2)) / np.linalg.norm(expected, axis=(0, 2))
            assert wrong.max() < 0.05, f"{method}: row {wrong.argmax()} of {key} differs by {wrong.max():.1%}"
