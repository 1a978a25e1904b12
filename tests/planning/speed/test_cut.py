"""A draft guesses as many tokens as pay, unless somebody says how many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.export.bundle.model import open_described
from edgespec.export.emitted import EmittedModel
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.planned import planned_bundle
from edgespec.formulas.cost import CostModel
from edgespec.planning.cut import TYPICAL, first_ids, paying_size, typical_share
from edgespec.runtimes.files.manifest import DrafterKind, ModelFacts
from tests.conftest import write_large
from tests.support import hf

SHAPE: dict[str, Any] = {"model_type": "llama", "vocab_size": 16384, "hidden_size": 128, "intermediate_size": 256,
         "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
         "max_position_embeddings": 512}  # fmt: skip
DRAFT = SHAPE | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft whose LM head is most of it."""
    folder = tmp_path_factory.mktemp("pair")
    for name, config in (("target", SHAPE), ("draft", DRAFT)):
        write_large(folder / name, config)
        hf.write_tokenizer(folder / name, config)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def facts(pair: tuple[Path, Path]) -> tuple[ModelFacts, ModelFacts]:
    target, draft = (open_described(path, None).facts for path in pair)
    return target, draft


def test_the_size_weighs_what_a_guess_costs_against_what_is_never_guessed(facts: tuple[ModelFacts, ModelFacts]) -> None:
    target, draft = facts
    assert paying_size(target, draft, lambda size: 1.0) == min(TYPICAL)
    assert paying_size(target, draft, lambda size: 0.97 if size >= 8192 else 0.5) == 8192
    assert paying_size(target, draft, lambda size: 0.3) is None
    small = draft.model_copy(update={"vocab": 2 * min(TYPICAL) - 1})
    assert paying_size(target, small, lambda size: 1.0) is None


@pytest.mark.parametrize("kind", ["mtp", "eagle", "assistant"])
def test_a_drafter_has_no_embedding(facts: tuple[ModelFacts, ModelFacts], kind: DrafterKind) -> None:
    """It is cut as a model with as many weights beside an embedding is."""
    target, draft = facts
    outside = draft.vocab * draft.hidden
    for layers in (outside // 4, outside, 4 * outside, 16 * outside):
        drafter = draft.model_copy(update={"tied": False, "parameters": layers + outside})
        model = draft.model_copy(update={"tied": False, "parameters": layers + 2 * outside})
        for share in (0.5, 0.8, 0.95):
            covered = {size: share + (1 - share) * i / len(TYPICAL) for i, size in enumerate(TYPICAL)}.__getitem__
            assert paying_size(target, drafter, covered, kind) == paying_size(target, model, covered)
    small, large = (draft.model_copy(update={"tied": False, "parameters": n * outside}) for n in (2, 100))
    assert paying_size(target, small, lambda size: 0.95, kind) is not None
    assert paying_size(target, large, lambda size: 0.95, kind) is None  # next to such layers no head is large


@pytest.mark.parametrize("layers", [10**6, 10**7, 3 * 10**7])
@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_a_block_reads_its_layers_once_a_round(
    facts: tuple[ModelFacts, ModelFacts], kind: DrafterKind, layers: int
) -> None:
    """A chain reads them for each guess."""
    whole, head = 3 * 10**7, facts[1].vocab * facts[1].hidden
    target = facts[0].model_copy(update={"parameters": whole + facts[0].vocab * facts[0].hidden})
    drafter = facts[1].model_copy(update={"parameters": layers + head})
    v, step = CostModel().v, whole + facts[0].vocab * facts[0].hidden

    def best(rows: int, share: float) -> float:
        """Tokens of a round over its time, at the best number of guesses."""
        a, read = 0.7 * share, (layers + rows * drafter.hidden) / step
        found = []
        for guesses in range(1, 9):
            tokens = sum(a**i for i in range(guesses + 1))
            found.append(tokens / (v(guesses + 1) + read * (v(guesses + 1) if kind == "dflash" else guesses)))
        return max(found)

    gains = {rows: best(rows, 0.9) for rows in TYPICAL if 2 * rows <= drafter.vocab}
    wanted = min(gains) if gains[min(gains)] > 1.05 * best(drafter.vocab, 1.0) else None
    assert paying_size(target, drafter, lambda size: 0.9, kind) == wanted


def test_first_ids_cover_a_text() -> None:
    assert first_ids([1, 5000, 4095, 4096])(4096) == 0.5


def test_a_draft_is_cut_where_it_pays(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, pair)
    options = ExportOptions(target, tmp_path / "cut", ["speculative"], draft=draft, threads=1)
    made = Exporter(options).run()
    assert made.draft is not None
    assert made.draft.head_vocab is not None
    assert made.draft.head_vocab.size in TYPICAL
    assert any("--draft-vocab 0 lets it guess all" in note for note in made.provenance["notes"])
    assert typical_share(made.draft) == TYPICAL[made.draft.head_vocab.size]
    whole = Exporter(replace(options, draft_vocab=0)).draft
    assert isinstance(whole, EmittedModel)
    assert whole.tokens is None


def test_a_plan_cuts_it_too(pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    planned = planned_bundle(target, methods=["speculative"], draft=draft)
    assert planned.draft is not None
    assert planned.draft.head_vocab is not None
    whole = planned_bundle(target, methods=["speculative"], draft=draft, draft_vocab=0)
    assert whole.draft is not None
    assert whole.draft.head_vocab is None
