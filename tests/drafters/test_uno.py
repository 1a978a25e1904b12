"""The target drafts for itself with an adapter of mask rows: whatever they guess, the text is plain decoding's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.target import Pass
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BundleError, InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.reports.bench import extra_bytes
from edgespec.runtimes.files.draft_adapter import DESCRIPTION, DraftAdapter
from edgespec.runtimes.files.lora import adapter_bytes
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import LoadOptions
from tests.conftest import PROMPTS
from tests.engine.test_adapters import of_target
from tests.support import hf
from tests.support.checkpoints import write_adapter
from tests.support.requests import caches_of

pytestmark = pytest.mark.usefixtures("native")
Get = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a draft adapter of the embedded model, whose guesses are seldom right."""
    made = of_target(tmp_path_factory.mktemp("draft") / "lora", 0.05, rank=4)
    described = DraftAdapter(block=3, mask=2, rank=4, acceptance=[0.6, 0.3])
    (made / DESCRIPTION).write_text(described.model_dump_json(), "utf-8")
    return made


@pytest.fixture(scope="module")
def drafting(bundles: Callable[..., Path], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Form -> an engine over the embedded model with the draft adapter, and another one for requests."""
    made: dict[str, Engine] = {}
    other = of_target(tmp_path_factory.mktemp("other") / "lora", 0.5, rank=3)

    def get(form: str = "int8") -> Engine:
        if form not in made:
            made[form] = load(bundles("native", form), threads=2, draft_adapter=folder, adapters={"a": other})
        return made[form]

    return get


@pytest.mark.parametrize("how", [{}, {"adaptive": False, "gamma": 1}, {"adaptive": False, "gamma": 8}])
@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_greedy_equals_plain(drafting: Get, form: str, how: dict[str, Any]) -> None:
    engine, drafted, accepted, rounds = drafting(form), 0, 0, 0
    for prompt in PROMPTS[:4]:
        plain = engine.generate(prompt, method="ar", max_new_tokens=60, ignore_eos=True)
        result = engine.generate(prompt, method="uno", max_new_tokens=60, ignore_eos=True, fallback=False, **how)
        assert result.tokens == plain.tokens
        assert result.exact
        assert result.stats.dropped_reason is None
        drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
        rounds += result.stats.rounds
    if how:  # else rounds may be plain, by what a busy machine measures
        assert accepted >= rounds - len(PROMPTS[:4])  # the first guess is the target's own token
        assert (accepted < drafted) == (how["gamma"] != 1)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_sampled_text(drafting: Get, acceptance: str) -> None:
    engine = drafting()
    how: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    how |= {"acceptance": acceptance, "repetition_penalty": 1.1, "logit_bias": {100: 0.5, 3: -1.0}}
    first, second = (engine.generate(PROMPTS[0], method="uno", fallback=False, **how) for _ in range(2))
    assert first.tokens == second.tokens
    assert first.lossless
    assert first.stats.accepted > 0
    if acceptance == "coupled":
        assert first.tokens == engine.generate(PROMPTS[0], method="ar", **how).tokens


def test_batches_mix_adapters_of_requests_with_the_draft(drafting: Get) -> None:
    engine, names = drafting(), [None, "a", "a", None]
    how: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    plain = [
        engine.generate(prompt, method="ar", adapter=name, **how).tokens
        for prompt, name in zip(PROMPTS[:4], names, strict=True)
    ]
    together = engine.generate_batch(
        list(PROMPTS[:4]), method="uno", adapters=names, batch=4, adaptive=False, gamma=3, **how
    )
    assert [result.tokens for result in together] == plain
    assert all(result.stats.accepted for result in together)
    assert plain[1] != engine.generate(PROMPTS[1], method="ar", **how).tokens


def test_the_cache_is_that_of_a_prefill(drafting: Get) -> None:
    engine = drafting("fp32")
    fresh = open_slot(engine.model)
    for prompt, length in zip(PROMPTS[:3], (3, 11, 40), strict=True):
        result = engine.generate(prompt, method="uno", max_new_tokens=length, ignore_eos=True, fallback=False)
        held, expected = caches_of(engine, fresh, engine.codec.encode(prompt) + result.tokens)
        for part, values in held.items():
            np.testing.assert_array_equal(values, expected[part], err_msg=part)


def test_states_of_convolutions_are_not_disturbed(tmp_path: Path) -> None:
    config = hf.CONFIGS["lfm2_conv"]
    base = hf.write_checkpoint(tmp_path / "model", config, 3)
    write_adapter(tmp_path / "lora", config, ("q_proj", "k_proj", "v_proj"))
    export_model(ExportOptions(str(base), tmp_path / "bundle", [], "fp32", threads=1, operators="native"), golden=False)
    with load(tmp_path / "bundle", threads=1, draft_adapter=tmp_path / "lora") as engine:
        how: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
        for prompt in ([5, 9, 17, 3], [40, 41, 42]):
            plain = engine.generate(prompt, method="ar", **how)
            result = engine.generate(prompt, method="uno", fallback=False, **how)
            assert result.tokens == plain.tokens
            assert result.stats.dropped_reason is None
            assert result.stats.accepted > 0


def test_only_mask_rows_read_the_adapter(drafting: Get) -> None:
    slot = drafting("fp32").new_session().target
    tokens = np.array([7, 2, 2])
    plain = slot.forward(tokens).logits.copy()
    mixed = slot.run(Pass(tokens, draft=True, adapters=np.array([0, 2, 2]))).logits
    np.testing.assert_array_equal(mixed[0], plain[0])
    assert np.abs(mixed[1:] - plain[1:]).max() > 0


def test_an_adapter_in_sglangs_layout_reads_random_tokens(
    tmp_path: Path, bundles: Callable[..., Path], drafting: Get
) -> None:
    folder = of_target(tmp_path / "lora", 0.05, rank=4)
    plain = drafting().generate(PROMPTS[0], method="ar", max_new_tokens=40, ignore_eos=True)
    with load(bundles("native", "int8"), threads=1, draft_adapter=folder) as engine:
        result = engine.generate(PROMPTS[0], method="uno", max_new_tokens=40, ignore_eos=True, fallback=False)
        assert result.tokens == plain.tokens
        assert result.stats.accepted > 0
        drafter = engine.new_session().drafter(engine.choose("uno"), engine.defaults.drafts)
        assert len(set(drafter.masks.tolist())) > 1  # type: ignore[attr-defined]


def test_the_choice_of_auto_knows_its_rates(drafting: Get) -> None:
    part = drafting().bundle.manifest.methods["uno"]
    assert part.gamma == 3
    assert part.predicted_speedup == pytest.approx(2.9 / (1.12 + 1.16), abs=0.01)


def test_memory_counts_the_draft_adapter(bundles: Callable[..., Path], folder: Path) -> None:
    manifest = read_manifest(bundles("native", "int8"))
    run = LoadOptions(draft_adapter=folder).resolve(manifest)
    assert memory_of(manifest, run).part("adapters").all == adapter_bytes(folder)


def test_a_benchmark_counts_the_draft_adapter_alone(drafting: Get, folder: Path) -> None:
    engine = drafting()
    store = engine.model.adapters
    assert store is not None
    assert 0 < extra_bytes(engine, "uno") < store.nbytes
    with load(engine.bundle.path, threads=1, draft_adapter=folder) as alone:
        assert extra_bytes(alone, "uno") == extra_bytes(engine, "uno")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_bundle_without_a_draft_adapter_says_how_to_get_one(engines: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequest, match="method 'uno' is not in this bundle") as caught:
        engines("native", "int8").generate(PROMPTS[0], method="uno")
    assert "--draft-adapter" in (caught.value.hint or "")


def test_no_request_names_the_draft_adapter(drafting: Get) -> None:
    with pytest.raises(InvalidRequest, match="adapter"):
        drafting().generate(PROMPTS[0], adapter="")


def test_stock_operators_refuse_it(bundles: Callable[..., Path], folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="row by row on native operators"):
        load(bundles("stock", "int4"), operators="stock", draft_adapter=folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"block": 0}', "block"),
        ('{"block": 99}', "block"),
        ('{"mask": -1}', "mask"),
        ('{"mask": 1000000}', "mask 1000000: expected a token below"),
        ('{"schema_version": 2}', "schema_version"),
        ("[]", "object"),
        ("{", DESCRIPTION),
    ],
)
def test_a_damaged_description_is_refused(
    tmp_path: Path, bundles: Callable[..., Path], content: str, words: str
) -> None:
    folder = of_target(tmp_path / "lora", 0.05, rank=4)
    (folder / DESCRIPTION).write_text(content, "utf-8")
    with pytest.raises(BundleError, match=words), load(bundles("native", "int8"), draft_adapter=folder) as engine:
        engine.generate(PROMPTS[0], method="uno", fallback=False)


@pytest.mark.parametrize("given", [3, ["lora"]])
def test_what_names_no_folder_is_refused(bundles: Callable[..., Path], given: Any) -> None:
    with pytest.raises(InvalidRequest, match="draft_adapter"):
        load(bundles("native", "int8"), draft_adapter=given)


def test_the_description_is_read_as_written(folder: Path) -> None:
    found = DraftAdapter.read(folder)
    assert json.loads((folder / DESCRIPTION).read_text("utf-8"))["acceptance"] == found.acceptance
    assert found.rates == pytest.approx([0.99, 0.6, 0.5])
