"""A model larger than its budget: weights are read when passes need them, and the text is the resident one's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import edgespec
from edgespec.cli.app import cli
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import complete
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BudgetError, BundleError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.planning.memory_budget import MemoryBudget, MemoryBusyError
from edgespec.planning.plan import Option, PlannedRun, PlanRequest, make_plan
from edgespec.planning.streaming import SeenReads, Streaming, cache_for, least_cache, seen_reads, streaming_of
from edgespec.planning.weights import all_expert_bytes, streamed_bytes
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Manifest, read_manifest
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.slots.expert_store import READS, ExpertStore
from tests.support.c_sessions import Bundle as CBundle
from tests.support.c_sessions import Refused, settings_of

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(sys.platform == "win32", reason="experts are mapped on Windows"),
]

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128,
    "moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "norm_topk_prob": True, "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 1024,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
# a model without experts, each layer of which is larger than what a plan does not know to the byte
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 1024,
}  # fmt: skip
LARGE = SHAPE | {"hidden_size": 384, "moe_intermediate_size": 384}
TOKENIZER = Path(edgespec.__file__).parent / "builtin" / "shakespeare"
PROMPTS = [[5, 9, 11, 300, 7, 5, 9, 11], list(range(40, 140))]
CONTEXT = 256


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a random checkpoint of a mixture, or of a dense model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    hidden, head, experts = config["hidden_size"], config["head_dim"], config.get("num_experts")
    rows, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        own = {"q_proj": (rows, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, rows),
               "q_norm": (head,), "k_norm": (head,)}  # fmt: skip
        shapes |= {f"layers.{layer}.self_attn.{name}": shape for name, shape in own.items()}
        shapes |= {f"layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        mlps = [f"layers.{layer}.mlp"]
        inner = config["intermediate_size"]
        if experts:
            shapes[f"layers.{layer}.mlp.gate"] = experts, hidden
            mlps = [f"layers.{layer}.mlp.experts.{expert}" for expert in range(experts)]
            inner = config["moe_intermediate_size"]
        for at in mlps:
            shapes |= {f"{at}.gate_proj": (inner, hidden), f"{at}.up_proj": (inner, hidden)}
            shapes[f"{at}.down_proj"] = hidden, inner
    draw = np.random.default_rng(0)
    tensors = {
        f"model.{name}.weight": (draw.standard_normal(shape, np.float32) * 0.05 + (len(shape) == 1)).astype(np.float16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def exported(folder: Path, shape: dict[str, Any], form: Any, methods: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    write_model(folder / "model", shape)
    draft = str(folder / "model") if "speculative" in methods else None
    options = ExportOptions(
        str(folder / "model"), folder / "bundle", methods, form, draft=draft, quick=True, threads=1, context=512
    )
    export_model(options, golden=False)
    return Path(options.output)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Format -> a bundle of a small mixture with every kind of draft; "dense " before it: of a dense model."""
    found: dict[str, Path] = {}

    def get(form: str) -> Path:
        if form not in found:
            kind, shape = form.split()[-1], DENSE if form.startswith("dense") else SHAPE
            methods = ["ngram", "speculative", *(["self-spec"] if kind == "int8" else [])]
            found[form] = exported(tmp_path_factory.mktemp(form.replace(" ", "-")), shape, kind, methods)
        return found[form]

    return get


def budget_of(manifest: Manifest, share: float) -> int:
    """Bytes with which this share of the experts, or of the layers, is in the cache."""
    use = RunOptions(context=CONTEXT, threads=2, chunk=16)
    rest = memory_of(manifest, replace(use, expert_cache=0)).peak
    return rest + int(share * streamed_bytes(manifest.target, manifest.files))


def streamed(bundle: Path, share: float, **options: Any) -> Engine:
    engine = load(bundle, threads=2, context=CONTEXT, budget=budget_of(read_manifest(bundle), share), **options)
    store_of(engine)
    return engine


def store_of(engine: Engine) -> ExpertStore:
    store = engine.model.experts
    assert isinstance(store, ExpertStore)
    return store


def command(*words: object) -> Result:
    """Run a command of the command line."""
    ran = CliRunner().invoke(cli, [*map(str, words)])
    assert ran.exit_code == 0, ran.output
    return ran


def texts(engine: Engine, method: str) -> list[list[int]]:
    settings = Settings(method=method, max_new_tokens=24, ignore_eos=True, adaptive=False)
    return [engine.generate(prompt, settings).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("form", ["int4", "int8", "fp32", "dense int4", "dense int8", "dense fp32"])
def test_the_text_is_the_resident_one_with_every_method(bundles: Callable[[str], Path], form: str) -> None:
    bundle = bundles(form)
    with load(bundle, threads=2, context=CONTEXT) as resident, streamed(bundle, 0.5) as engine:
        assert resident.model.experts is None
        expected = texts(resident, "ar")
        for method in read_manifest(bundle).methods:
            assert texts(engine, method) == expected, method
        counts = store_of(engine).counts()
        assert 0 < counts.hit_rate < 1
        assert counts.bytes > 0


def test_an_unread_expert_is_an_error_and_later_texts_are_right(
    bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundles("int4")
    data = bundle / read_manifest(bundle).target.weights
    whole = data.read_bytes()
    with streamed(bundle, 0.2) as engine:
        expected = texts(engine, "ar")
        places = range(len(whole) // 8, len(whole), 997)  # some byte of every expert
        spoilt = bytearray(whole)
        for at in places:
            spoilt[at] ^= 32
        with data.open("r+b") as file:
            file.write(spoilt)
        with pytest.raises(BundleError, match=r"expert \d+ of mixture \d+: its bytes") as caught:
            texts(engine, "ar")
        assert "check the disk" in str(caught.value)
        with data.open("r+b") as file:
            file.write(whole)
        assert texts(engine, "ar") == expected


def test_layers_that_fit_stay_and_the_others_are_read_once_in_a_pass(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("dense int4")
    manifest = read_manifest(bundle)
    with streamed(bundle, 0.8) as engine:
        store, prompt = store_of(engine), PROMPTS[0]
        assert store.layers
        layers = manifest.target.facts.layers
        assert store.experts == layers  # alike: each piece is one
        engine.generate(prompt, Settings(method="ar", max_new_tokens=4, ignore_eos=True))
        before = store.counts()
        engine.generate(prompt, Settings(method="ar", max_new_tokens=20, ignore_eos=True))
        counts = store.counts()
        passes = (counts.passes - before.passes) / layers
        planned = streaming_of(manifest, engine.memory_budget.use)
        assert planned is not None
        assert 0 < planned.hits < 1
        assert (counts.bytes - before.bytes) / passes == pytest.approx(planned.bytes_per_token, rel=0.15)


@pytest.mark.parametrize("form", ["int4", "dense int4"])
def test_sessions_of_the_c_interface_stream_too(bundles: Callable[[str], Path], form: str) -> None:
    bundle, settings = bundles(form), settings_of(method="speculative", tokens=24)
    least = least_cache(read_manifest(bundle))
    with CBundle(bundle, 2) as whole, CBundle(bundle, 2, cache=2 * least) as streams:
        for prompt in PROMPTS:
            with whole.session() as resident, streams.session() as streamed:
                assert streamed.generate(prompt, settings) == resident.generate(prompt, settings)
    for cache in (0, 1000):
        with pytest.raises(Refused, match="cache of"):
            CBundle(bundle, 2, cache=cache)


def test_requests_that_share_passes_share_layers(bundles: Callable[[str], Path]) -> None:
    bundle, settings = bundles("dense int4"), Settings(method="ar", max_new_tokens=12, ignore_eos=True)
    with load(bundle, threads=2, context=CONTEXT) as resident, streamed(bundle, 0.5) as engine:
        expected = [resident.generate(prompt, settings).tokens for prompt in PROMPTS]
        assert [result.tokens for result in engine.generate_batch(PROMPTS, settings)] == expected


def test_drafts_by_streamed_layers_are_priced_by_what_they_read(bundles: Callable[[str], Path]) -> None:
    """A draft step of self-spec reads as much as a pass, so it is neither timed nor probed often."""
    bundle, read = bundles("dense int8"), dict[str, int]()
    sampling = SamplingParams(temperature=1.0, seed=3)
    budget = budget_of(read_manifest(bundle), 0.5) + (1 << 19)  # for the longer text
    for method in ("ar", "auto", "self-spec"):
        with load(bundle, threads=2, context=2 * CONTEXT, budget=budget) as engine:
            settings = Settings(method=method, max_new_tokens=200, ignore_eos=True, sampling=sampling)
            engine.generate(PROMPTS[0], settings)
            read[method] = store_of(engine).counts().bytes
    assert all(found < 1.1 * read["ar"] for found in read.values()), read


def test_a_changed_byte_that_its_times_do_not_show_is_found(
    bundles: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first streamed load reads the disk itself: cached pages, or a remembered digest, may hide what it holds."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles("int4"), bundle)
    manifest = read_manifest(bundle)
    opened, weights = Bundle.open(bundle), bundle / manifest.target.weights
    opened.checked.digest(weights)
    data = bytearray(weights.read_bytes())
    data[-5000] ^= 1
    weights.write_bytes(data)
    graph = bundle / manifest.target.graphs["native"].file
    store = ExpertStore(graph, weights, 1 << 22)  # not checked: nothing to compare with
    with pytest.raises(BundleError, match="altered, though its times"):
        ExpertStore(graph, weights, store.slots * store.slot_bytes, opened.checked)


def test_a_file_that_is_removed_is_read_to_the_end(bundles: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles("int4"), bundle)
    weights = bundle / read_manifest(bundle).target.weights
    with streamed(bundle, 0.2) as engine:
        expected = texts(engine, "ar")
        weights.unlink()
        assert texts(engine, "ar") == expected


KILLED = """
import resource, sys
import edgespec
from edgespec.decoding.settings import Settings
if len(sys.argv) > 3:  # no file can be written, as on a full disk
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print("begins", flush=True)
engine = edgespec.load(sys.argv[1], threads=2, context=256, budget=int(sys.argv[2]))
print("loaded", flush=True)
stream = engine.stream(list(range(40, 140)), Settings(method="ar", max_new_tokens=24, ignore_eos=True))
tokens = []
for piece in stream:
    if piece.round is not None:
        tokens += piece.round.tokens
        print("round", flush=True)
assert engine.experts is not None and engine.experts.counts().bytes
print(tokens, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits and signals of Linux")
@pytest.mark.parametrize("form", ["int4", "dense int4"])
def test_a_process_that_was_killed_or_has_a_full_disk_leaves_the_text_as_it_is(
    bundles: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    bundle = bundles(form)
    command = [sys.executable, "-c", KILLED, str(bundle), str(budget_of(read_manifest(bundle), 0.5))]
    environment = os.environ | {"EDGESPEC_CACHE": str(tmp_path / "cache")}
    for last in ("begins", "loaded", "round"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip() == last:
                    child.kill()
                    break
        assert child.returncode == -signal.SIGKILL
    with load(bundle, threads=2, context=CONTEXT) as resident:
        expected = resident.generate(PROMPTS[1], Settings(method="ar", max_new_tokens=24, ignore_eos=True)).tokens
    for extra, cache in ([], tmp_path / "cache"), (["full"], tmp_path / "none"):
        environment["EDGESPEC_CACHE"] = str(cache)
        done = subprocess.run([*command, *extra], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_budget_that_holds_all_experts_maps_them(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("int4")
    with load(bundle, threads=2, context=CONTEXT, budget=2 * budget_of(read_manifest(bundle), 1.2)) as engine:
        assert engine.model.experts is None


@pytest.mark.parametrize("form", ["int4", "dense int4"])
def test_what_fits_without_the_other_models_waits_for_their_memory(bundles: Callable[[str], Path], form: str) -> None:
    manifest = read_manifest(bundles(form))
    use = RunOptions(context=CONTEXT, threads=2)
    budget = MemoryBudget(manifest, use, memory_of(manifest, use).peak + (1 << 20))
    budget.others = lambda: 2 << 20
    budget.choose_expert_cache(CONTEXT)
    assert budget.expert_cache is None
    with pytest.raises(MemoryBusyError):
        budget.admit_bundle(CONTEXT)
    budget.others = lambda: 0
    budget.admit_bundle(CONTEXT)


def test_a_budget_below_the_least_is_refused(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("int4")
    manifest = read_manifest(bundle)
    with pytest.raises(BudgetError, match="needs at least"):
        load(bundle, threads=2, context=CONTEXT, budget=budget_of(manifest, 0) - (1 << 20))


def test_the_cache_takes_what_the_budget_leaves(bundles: Callable[[str], Path]) -> None:
    manifest = read_manifest(bundles("int4"))
    use = RunOptions(context=CONTEXT, threads=2)
    whole = memory_of(manifest, use).peak
    assert cache_for(manifest, use, whole) is None
    small, large = (cache_for(manifest, use, whole - less) for less in (1 << 20, 1 << 18))
    assert small is not None
    assert large is not None
    assert least_cache(manifest) <= small < large
    assert memory_of(manifest, replace(use, expert_cache=large)).peak <= whole


@pytest.mark.parametrize("form", ["int4", "dense int4"])
def test_commands_say_what_is_streamed(bundles: Callable[[str], Path], form: str) -> None:
    bundle, kind = bundles(form), "layers" if form.startswith("dense") else "experts"
    manifest = read_manifest(bundle)
    budget = budget_of(manifest, 0.6)
    found = json.loads(command("info", bundle, "--budget", budget, "--json").stdout)["within"]
    assert (found["fits"], found["streaming"]["kind"]) == (True, kind)
    assert found["streaming"]["bytes_per_token"] > 0
    assert found["tokens_per_second"] > 0
    said = " ".join(command("info", bundle, "--budget", budget).stdout.split())
    assert f"of {kind} in memory, the others are read from the disk" in said
    assert "all weights in memory" in " ".join(command("info", bundle, "--budget", "1GiB").stdout.split())
    assert "are not enough" in " ".join(command("info", bundle, "--budget", "1MiB").stdout.split())
    planned = command("plan", bundle, "--budget", budget, "--context", CONTEXT)
    assert f"of {kind} in memory, the others are read from the disk" in " ".join(planned.stdout.split())
    ran = command("run", bundle, "--prompt", "hello", "--budget", budget, "--context", CONTEXT, "--max-new-tokens", 2)
    assert ("slow: " in ran.stderr) == (kind == "layers")


def test_a_plan_streams_what_does_not_fit_and_uses_what_runs_showed(bundles: Callable[[str], Path]) -> None:
    bundle = bundles("fp32")
    manifest = complete(read_manifest(bundle))
    budget = budget_of(manifest, 0.5)
    request = PlanRequest(budget, load=LoadOptions(context=CONTEXT, operators="native"), bandwidth=1e10, disk=1e9)

    def planned(hits: SeenReads | None) -> tuple[PlannedRun, Streaming]:
        pick = make_plan([Option(manifest, str(bundle), hits=hits)], request).pick
        assert pick is not None
        assert pick.streaming is not None
        assert pick.memory.peak <= budget
        return pick, pick.streaming

    pick, before = planned(None)
    share = before.cache / before.experts
    assert before.hits == pytest.approx(share, rel=0.2)  # evenly chosen; a cached expert has whole pages
    rate = pick.speed.plain_tokens_per_second
    assert rate is not None
    assert 1 / rate > before.bytes_per_token / 1e9
    with load(bundle, threads=2, context=CONTEXT, budget=budget) as engine:
        for _ in range(3):
            texts(engine, "ar")
        found, share = store_of(engine).counts(1).hit_rate, store_of(engine).share
    _, after = planned(seen_reads(manifest))
    assert (before.seen, after.seen) == (False, True)
    assert after.hits == pytest.approx(found, abs=0.05)
    seen = SeenReads(share, found)
    assert seen.at(share) == pytest.approx(found)
    assert 0 < seen.at(share / 2) < found < seen.at((1 + share) / 2) < seen.at(1) == 1


CHILD = """
import json, sys
import edgespec
from edgespec.decoding.settings import Settings
from edgespec.runtimes.process import one_arena, peak_bytes
one_arena()
engine = edgespec.load(sys.argv[1], threads=2, context=256, budget=int(sys.argv[2]) or None, check=False)
settings = Settings(method="ar", max_new_tokens=48, ignore_eos=True)
result = engine.generate(list(range(40, 160)), settings)
counts = engine.model.experts.counts() if sys.argv[2] != "0" else None
print(json.dumps({"peak": peak_bytes(), "bytes": counts and counts.bytes, "tokens": result.tokens}))
"""


FULL = RunOptions(context=CONTEXT, threads=2)


def test_the_budget_holds_in_resident_memory(tmp_path: Path) -> None:
    bundle = exported(tmp_path, LARGE, "int8", ["ngram"])
    manifest = read_manifest(bundle)
    experts = all_expert_bytes(manifest.target)
    assert experts > 50 << 20
    budget = budget_of(manifest, 0.2)

    def ran(limit: int) -> dict[str, Any]:
        done = subprocess.run([sys.executable, "-c", CHILD, bundle, str(limit)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    found, resident = ran(budget), ran(0)
    assert found["tokens"] == resident["tokens"]
    # what the libraries take was measured on one machine; another may map more of their files, with or without a budget
    assert found["peak"] <= max(budget, resident["peak"] - int(0.75 * experts)), (resident, memory_of(manifest, FULL))
    assert found["bytes"] > experts  # of which most were read more than once


@pytest.mark.parametrize("way", ["threads", "io_uring"] if sys.platform == "linux" else ["threads"])
def test_requests_together_share_the_cache(
    bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv(READS, way)
    bundle = bundles("int4")
    settings = Settings(method="ar", max_new_tokens=12, ignore_eos=True)
    with load(bundle, threads=2, context=CONTEXT) as resident, streamed(bundle, 0.4) as engine:
        expected = [resident.generate(prompt, settings).tokens for prompt in PROMPTS]
        assert [result.tokens for result in engine.generate_batch(PROMPTS, settings)] == expected
