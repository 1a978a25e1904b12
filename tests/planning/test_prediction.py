"""Predicted speeds: of profiles, of exports, of nothing; and what draft steps read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from benchmarks.shapes import SHAPES
from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.registry import METHODS
from edgespec.errors import InvalidRequest
from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.drafter import Drafter, cut_drafter
from edgespec.export.drafters.mtp import read_mtp
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import Checkpoint
from edgespec.planning.costs import CONTROL, STRICT, Costs, curve_of, line
from edgespec.planning.prediction import DraftProfile, Speed, best_gain, speed_of
from edgespec.planning.profiles import Profile
from edgespec.planning.traffic import kv_token_bytes, layer_weights, read_bytes
from edgespec.runtimes.files.formats import FORMATS, SPECS, Format
from edgespec.runtimes.files.manifest import HeadGroup, Manifest, MethodPart, ModelPart
from edgespec.runtimes.options import RunOptions
from tests.support import hf
from tests.support.assistant import write_assistant, write_target
from tests.support.dflash import write_dflash
from tests.support.eagle import write_random
from tests.support.mtp import write_mtp
from tests.support.planned import plan_of
from tests.support.planning import FACTS, manifest, part, passes, profile, trial

pytestmark = pytest.mark.usefixtures("native")
SPECULATIVE = ("ar", "ngram", "speculative")
ALL = tuple(METHODS)
K = CONTROL / 10  # what control adds to a round, in passes of ``passes()``


def changed(found: Manifest, **changes: Any) -> Manifest:
    return found.model_copy(update=changes)


def unmeasured(*methods: str, form: Any = "int4", heads: bool = True) -> Manifest:
    """Make a planned bundle: nothing was measured of any method."""
    groups = [
        HeadGroup(name="medusa", kind="medusa", count=4),
        HeadGroup(name="blockwise", kind="blockwise", count=4, inner=FACTS.hidden),
        HeadGroup(name="exit.12", kind="exit", count=1, layer=12),
    ]
    names = {"medusa": ["medusa"], "blockwise": ["blockwise"], "paradecode": ["exit.12"]}
    target = part(form, "model.data").model_copy(update={"heads": groups if heads else []})
    draft = part(form, "draft/model.data", FACTS.model_copy(update={"layers": 2, "parameters": 160_000_000}))
    parts = {name: MethodPart(heads=names.get(name, []) if heads else []) for name in methods}
    return changed(manifest(form), target=target, draft=draft, methods=parts)


# -- calibrated --------------------------------------------------------------------------------------------------------


def of(found: Manifest, method: str, known: Profile | None = None, **changes: Any) -> Speed:
    depth = changes.pop("depth", None)
    return speed_of(found, RunOptions(method, **changes), known, depth=depth)


def test_plain_decoding_takes_its_pass() -> None:
    found = manifest()
    assert asdict(of(found, "ar", profile(found), depth=0)) == {
        "speedup": 1.0,
        "tokens_per_second": 100.0,
        "plain_tokens_per_second": 100.0,
        "prefill_tokens_per_second": 500.0,
        "gamma": 0,
        "tokens_per_round": 1.0,
        "acceptance": None,
        "basis": "calibrated",
        "assumed": (),
    }
    halfway = of(found, "ar", profile(found), context=2000)  # at depth 1000
    assert halfway.tokens_per_second == pytest.approx(1000 / 11)
    assert halfway.prefill_tokens_per_second == pytest.approx(250)
    assert of(found, "ar", profile(found), depth=500).prefill_tokens_per_second == pytest.approx(1000 / 3)


def test_acceptance_of_the_manifest_with_measured_costs() -> None:
    found = manifest(methods=SPECULATIVE)
    known = profile(found, drafts={"speculative": {0: 1.0}})
    speed = of(found, "speculative", known, depth=0)
    # E(3) = 1 + .8 + .56 + .392 over 3 drafts of .1 and a pass of 4 rows, 1.3
    assert speed.speedup == pytest.approx(2.752 / (1.6 + K))
    assert (speed.gamma, speed.acceptance, speed.basis, speed.assumed) == (3, 0.8, "calibrated", ())
    assert speed.tokens_per_round == pytest.approx(2.752)
    assert speed.tokens_per_second == pytest.approx(100 * 2.752 / (1.6 + K))
    deep = of(found, "speculative", known, depth=1000)
    gains = [e / (g / 11 + (10 + g + g + 1 + CONTROL) / 11) for g, e in ((1, 1.8), (2, 2.36), (3, 2.752), (4, 3.0264))]
    assert deep.speedup == pytest.approx(max(gains))
    assert of(found, "speculative", known, depth=0, gamma=1).speedup == pytest.approx(1.8 / (1.2 + K))


def test_a_rounds_first_step_counts_for_itself() -> None:
    """As calibrated, as exported, and of a profile that knows one cost alone."""
    found = manifest(methods=SPECULATIVE)
    known = found.methods["speculative"].model_copy(update={"first_cost": 0.3})
    both = changed(found, methods={**found.methods, "speculative": known})

    def time(known: Profile, bundle: Manifest = found) -> float:
        return 2.752 / of(bundle, "speculative", known, depth=0, gamma=3).speedup - 1.3 - K

    drafts = {"speculative": {0: 1.0}}
    assert time(profile(found, drafts=drafts, first_drafts={"speculative": {0: 4.0}})) == pytest.approx(0.4 + 2 * 0.1)
    assert time(profile(found, drafts=drafts)) == pytest.approx(3 * 0.1)
    assert time(profile(both), both) == pytest.approx(0.3 + 2 * 0.1)  # the export's 0.1 and 0.3
    assert time(profile(both, drafts=drafts), both) == pytest.approx(3 * 0.1)  # what was measured here, alone


def test_a_trial_is_trusted_most() -> None:
    found = manifest(methods=SPECULATIVE)
    known = profile(found, trials={"speculative": trial()}, drafts={"speculative": {0: 9.0}})
    speed = of(found, "speculative", known, depth=0)
    assert speed.speedup == pytest.approx(1.25)
    assert (speed.tokens_per_round, speed.acceptance, speed.gamma) == (1.5, 0.6, 2)


def test_a_trial_is_moved_to_another_depth() -> None:
    found = manifest(methods=SPECULATIVE)
    known = profile(found, trials={"speculative": trial()})
    # passes: (11 + 15) / 2 instead of (10 + 12) / 2 ms; a plain step 11 instead of 10
    assert of(found, "speculative", known, depth=1000).speedup == pytest.approx(1.5 * 11 / (1 + 13))
    growing = profile(found, trials={"speculative": trial()}, drafts={"speculative": {0: 1.0, 1000: 2.0}})
    assert of(found, "speculative", growing, depth=1000).speedup == pytest.approx(1.5 * 11 / (2 + 13))


def test_where_guessing_no_longer_helps_control_stops() -> None:
    found = manifest(methods=SPECULATIVE)
    wide = trial(rows={1: 50, 17: 50}, verify_ms=18.0, draft_ms=0.0, speedup=1.1)
    known = profile(found, trials={"speculative": wide}, drafts={"speculative": {0: 0.5}})
    speed = of(found, "speculative", known, depth=4000)
    assert speed.speedup == pytest.approx(14 / (14 + CONTROL))  # a plain round of the method
    slow = profile(found, trials={"speculative": trial(speedup=0.8)})
    assert of(found, "speculative", slow, depth=0).speedup == pytest.approx(0.8)  # as measured


def test_depths_far_beyond_what_was_measured_are_said() -> None:
    found = manifest()
    assert not of(found, "ar", profile(found), depth=5000).assumed
    (note,) = of(found, "ar", profile(found), depth=8000).assumed
    assert "4000" in note
    (note,) = of(found, "ar", profile(found), depth=0, threads=4).assumed
    assert "4 threads" in note


def test_other_keys_take_what_their_bytes_do() -> None:
    found = manifest()
    ratio = kv_token_bytes(found.target, "native", "int8") / kv_token_bytes(found.target, "native", "f16")
    speed = of(found, "ar", profile(found), depth=4000, attention="int8")
    assert speed.tokens_per_second == pytest.approx(1000 / (10 + 4 * ratio))
    assert "int8" in speed.assumed[0]


def test_strict_stock_passes_are_held_against_plain_ones() -> None:
    found = manifest()
    known = profile(
        found, operators="stock", attention="f32", plain={depth: times[1] / 1.1 for depth, times in passes().items()}
    )
    assert of(found, "ar", known, depth=0, operators="stock").speedup == pytest.approx(1 / 1.1)
    assert of(found, "ngram", known, depth=0, operators="stock").plain_tokens_per_second == pytest.approx(110)


# -- from elsewhere ----------------------------------------------------------------------------------------------------


def test_a_profile_of_another_bundle_is_scaled_by_bytes() -> None:
    measured, found = manifest("int4"), manifest("int4", SPECULATIVE)
    large = FACTS.model_copy(update={"parameters": 2 * FACTS.parameters, "layers": 48})
    found = changed(found, target=part("int4", "model.data", large))
    speed = of(found, "ar", profile(measured), depth=1000)
    # twice the weights and twice the keys
    assert speed.tokens_per_second == pytest.approx(1000 / 22, rel=1e-3)
    assert speed.basis == "scaled"
    assert "bundle" in speed.assumed[0]
    assert not any("verify curve" in note for note in speed.assumed)
    ratio = layer_weights(FACTS) / layer_weights(large)
    assert speed.prefill_tokens_per_second == pytest.approx(250 * ratio)


def test_another_format_has_the_documented_curve() -> None:
    found = unmeasured("ar", "speculative", form="fp32")
    known = profile(manifest("int4"), passes={0: {1: 10.0, 2: 19.0}}, plain={0: 10.0})
    speed = of(found, "speculative", known, depth=0, gamma=1)
    ratio = read_bytes(found.target, "native") / read_bytes(manifest().target, "native")
    assert speed.plain_tokens_per_second == pytest.approx(100 / ratio)
    assert found.draft is not None
    c = read_bytes(found.draft, "native") / read_bytes(found.target, "native")
    prior = METHODS["speculative"].prior
    assert prior
    a, more, curve = prior.acceptance, CONTROL / (10 * ratio), curve_of("fp32", "native")
    expected = best_gain(DraftProfile([a], 1), c, lambda rows: line(curve, rows) + more)
    assert speed.speedup == pytest.approx(expected.speedup)
    assert 1 < speed.speedup < (1 + a) / (c + dict(curve)[2])
    assert any("verify curve of native fp32" in note for note in speed.assumed)
    assert any("arXiv 2401.07851" in note for note in speed.assumed)


def test_other_operators_than_those_of_the_profile() -> None:
    found = manifest("int4")
    known = profile(manifest("int4"), passes={0: {1: 10.0, 4: 13.0}}, plain={0: 10.0})
    stock = of(found, "ar", known, depth=0, operators="stock")
    # 1.7 times a byte, 20 instead of 18 bytes for 32 weights, and strict
    assert stock.plain_tokens_per_second == pytest.approx(100 / 1.7 * 18 / 20 * STRICT, rel=1e-3)
    assert any("stock operators take 1.7 times a byte what native do" in note for note in stock.assumed)


def test_what_was_accepted_in_another_format_of_the_same_model() -> None:
    known = profile(manifest("int4", SPECULATIVE), trials={"speculative": trial(offered=[100], accepted_at=[90])})
    speed = of(manifest("int8", SPECULATIVE), "speculative", known, depth=0)
    assert speed.acceptance == 0.9
    assert any(note.startswith("guesses are accepted as in") for note in speed.assumed)
    stranger = changed(manifest("int8", SPECULATIVE), target=part("int8", "w", FACTS.model_copy(update={"layers": 8})))
    assert of(stranger, "speculative", known, depth=0).acceptance == 0.8  # its own manifest's


def test_what_the_exporting_machine_measured() -> None:
    cost = {"plain_ms": 10.0, "verify_ms": {"1": 10.0, "2": 11.0, "5": 14.0}, "depth": 512}
    found = changed(manifest(methods=SPECULATIVE), cost=cost)
    speed = of(found, "speculative", depth=512)
    assert speed.basis == "exported"
    assert speed.tokens_per_second is None
    assert speed.assumed == ("this device is like the exporting machine",)
    assert speed.speedup == pytest.approx(2.752 / (0.3 + 1.3 + K))  # c = .1
    deeper, shallower = of(found, "speculative", depth=4096), of(found, "speculative", depth=0)
    assert deeper.speedup < speed.speedup < shallower.speedup  # attention is done for each row
    # other operators than those of the export: its times say nothing
    assert of(found, "speculative", depth=512, operators="stock").basis == "assumed"


def test_padding_at_export() -> None:
    found = manifest(methods=SPECULATIVE)
    target = found.target.model_copy(update={"layout": "stock"})
    cost = {"plain_ms": 10.0, "verify_ms": {"1": 11.0, "2": 12.0, "5": 15.0}, "depth": 64}
    found = changed(found, target=target, cost=cost)
    assert of(found, "ar", depth=64, operators="stock").speedup == pytest.approx(10 / 11)
    assert of(found, "ar", depth=64, operators="stock", strict=False).speedup == 1.0
    assert of(found, "speculative", depth=64, operators="stock").speedup == pytest.approx(2.752 / (0.3 + 1.4 + K))


def test_formulas_alone() -> None:
    speed = of(manifest(methods=SPECULATIVE), "speculative", depth=0)
    assert speed.basis == "assumed"
    assert (speed.tokens_per_second, speed.prefill_tokens_per_second) == (None, None)
    assert any("verify curve" in note for note in speed.assumed)
    assert of(manifest(), "ar", operators="stock", depth=0).speedup == pytest.approx(1 / STRICT)


@pytest.mark.parametrize("method", ALL)
def test_literature_is_named(method: str) -> None:
    speed = of(unmeasured(*ALL), method, depth=256)
    assert speed.basis == "assumed"
    prior = METHODS[method].prior
    if method in ("ar", "paradecode"):
        assert (prior, speed.speedup) == (None, 1.0)
    else:
        assert prior is not None
        assert any(prior.source in note for note in speed.assumed)
    assert of(unmeasured(*ALL, heads=False), method, depth=256).speedup > 0.5


def test_early_exits_have_the_exports_word_alone() -> None:
    found = unmeasured(*ALL)
    told = changed(found, methods={**found.methods, "paradecode": MethodPart(predicted_speedup=1.3)})
    assert of(told, "paradecode").speedup == 1.3
    assert any("exporting machine" in note for note in of(told, "paradecode").assumed)
    assert any("how often it is right" in note for note in of(found, "paradecode").assumed)


# -- as a whole --------------------------------------------------------------------------------------------------------


def test_batches() -> None:
    found = manifest(methods=SPECULATIVE)
    known = profile(found, drafts={"speculative": {0: 1.0}}, trials={"speculative": trial()})
    plain = of(found, "ar", known, depth=0, batch=4)
    assert plain.tokens_per_second == pytest.approx(1000 / 13)  # of one of four that share a pass of 4 rows
    assert plain.speedup == 1.0
    speed = of(found, "speculative", known, depth=0, batch=4)
    expected = best_gain(DraftProfile([0.6, 2 / 3], 4), 0.1, lambda rows: (9 + rows + CONTROL) / 10, width=4)
    assert speed.speedup == pytest.approx(expected.speedup)  # accepted as in the trial
    assert 0.97 < speed.speedup < 1
    assert any("several sequences" in note for note in speed.assumed)
    stock = profile(found, operators="stock", attention="f32")
    turns = of(found, "ar", stock, depth=0, batch=4, operators="stock")
    assert turns.tokens_per_second == pytest.approx(25)  # they take turns


def test_sampling_is_said() -> None:
    found = manifest()
    assert any("greedy" in note for note in of(found, "ngram", profile(found), greedy=False).assumed)


def test_a_method_that_the_bundle_does_not_have() -> None:
    with pytest.raises(InvalidRequest, match=r"'medusa' is not in this bundle; it has: ar, ngram, self-spec"):
        of(manifest(), "medusa")


def test_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    measured = profile(manifest())
    for form in FORMATS:
        for operators in ("native", "stock"):
            for known in (None, measured):
                for method in ALL:
                    found = of(unmeasured(*ALL, form=form), method, known, operators=operators, context=8192)
                    assert 0.3 < found.speedup < 6
                    assert (found.tokens_per_second is None) == (known is None)


KINDS = ("eagle", "mtp", "dflash", "assistant")
BITS = {spec.kind: spec.native_bits for spec in SPECS.values()}  # of a weight, with its share of a scale
HEADS = {name: "p8" if spec.size else spec.kind for name, spec in SPECS.items()}  # of drafters
NORMS = 0.02  # of all weights, which the planner takes for matrices


def made(folder: Path, kind: str, cut: int | None) -> Drafter:
    """Make a drafter of random weights; ``cut``: rows of its LM head, of all tokens' where it is None.

    EAGLE's has 64 rows as it is published, and is given another choice.
    """
    if kind == "mtp":
        model = write_mtp(folder / "model", "qwen3_5_delta")
        arch = open_model(model, None)
        drafter = read_mtp(Checkpoint.open(model), arch)
    elif kind == "assistant":
        arch = open_model(write_target(folder / "model"), None)
        drafter = read_drafter(write_assistant(folder / "drafter", arch), arch)
    else:
        arch = open_model(hf.write_reference_checkpoint(folder / "model", "qwen3_tied"), None)
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        own = write_dflash(folder / "drafter", arch) if kind == "dflash" else write_random(
            folder / "drafter", arch, taps, None if cut is None else range(64)
        )  # fmt: skip
        drafter = read_drafter(own, arch)
    if cut is None:
        return drafter
    if kind != "eagle":
        return cut_drafter(drafter, np.arange(cut))
    return drafter if cut == 64 else with_tokens(drafter, arch, np.arange(cut))


def written(folder: Path, drafter: Drafter, form: Format) -> tuple[ModelPart, dict[str, float]]:
    """Make a drafter's entry, and bytes of each matrix in its weight file, padding apart."""
    (folder / "bundle").mkdir()
    part = write_drafter(folder / "bundle", drafter, WeightChoice.of(form, None, None), "native")
    assert part.index is not None
    stored = json.loads((folder / "bundle" / part.index).read_text("utf-8"))["matrices"]
    return part, {name: each["n"] * each["k"] * BITS[each["kind"]] / 8 for name, each in stored.items()}


@pytest.mark.parametrize("form, cut", [*((form, None) for form in FORMATS), ("int4", 64), ("int8", 96)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_take_the_bytes_of_their_matrices(tmp_path: Path, kind: str, cut: int | None, form: Format) -> None:
    """A first step reads the matrix that fuses what was tapped, and has several rows; a further one has one row."""
    drafter = made(tmp_path, kind, cut)
    part, sizes = written(tmp_path, drafter, form)
    decoder = part.decoder
    assert decoder is not None
    every, fuse = sum(sizes.values()), sizes["fc.weight"]
    head = sum(size for name, size in sizes.items() if "lm_head" in name)
    assert head == (cut or part.facts.vocab) * part.facts.hidden * BITS[HEADS[form]] / 8
    assert read_bytes(part, "native") == pytest.approx(every, rel=NORMS)
    entries = fuse + sum(size for name, size in sizes.items() if "k_proj" in name)
    v = curve_of(form, "native")
    several = line(v, FIRST_ROWS)
    first, further = {
        "eagle": (every * several, every - fuse),
        "mtp": (every * several, every),
        "assistant": (every - sizes.get("post_projection.weight", 0), every),
        "dflash": ((every - fuse) * line(v, decoder.block or 0) + entries * several, every - fuse),
    }[kind]
    found = manifest().model_copy(update={"drafter": part, "methods": {kind: MethodPart()}})
    costs = Costs(found, RunOptions(kind, "native", 1024), None, 0)  # the unit is a byte's time
    assert costs.step_ms(kind, True) == pytest.approx(first, rel=NORMS)
    assert costs.step_ms(kind, False) == pytest.approx(further, rel=NORMS)


def test_an_assistant_reads_keys_and_values_of_the_target(tmp_path: Path) -> None:
    part, _ = written(tmp_path, made(tmp_path, "assistant", None), "int8")
    assert part.decoder is not None
    found = manifest().model_copy(update={"drafter": part, "methods": {"assistant": MethodPart()}})
    use = RunOptions("assistant", "native", 4096)
    near, far = (Costs(found, use, None, depth).step_ms("assistant", False) for depth in (0, 1000))
    share = len(part.decoder.reads) / found.target.facts.layers
    assert far - near == pytest.approx(1000 * share * kv_token_bytes(found.target, "native"))


@pytest.mark.parametrize("rows", [None, 8192])
def test_a_planned_drafter_in_the_shape_of_a_real_model(tmp_path: Path, rows: int | None) -> None:
    """EAGLE-3's layer, with doubled inputs of q, k and v, and the matrix that fuses three taps."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"]), "utf-8")
    hidden, inner, heads, keys, dim = 2048, 8192, 32, 8, 64
    layer = 2 * hidden * dim * (heads + 2 * keys) + hidden * dim * heads + 3 * hidden * inner
    planned = plan_of(tmp_path, methods=["eagle"], draft_vocab=rows).drafter
    assert planned is not None
    head = (rows or planned.facts.vocab) * hidden
    assert layer_weights(planned.facts, head) == pytest.approx(layer + 3 * hidden**2, rel=1e-3)
    assert planned.facts.parameters - layer_weights(planned.facts, head) == head
