"""The real WebGPU provider: on a GPU, or on software Vulkan (docs/devices.md has the recipe).

It runs in float32, and with float16 activations if the adapter has shaders for them.  Otherwise (SwiftShader) the error
message is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import DeviceError
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.devices.driver_check import _difference
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.devices.webgpu import device_states, make_device_session, webgpu_state, without_half
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import PRECISIONS, Precision, SkipSetPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import rows_exact
from tests.conftest import Reference, Written
from tests.export.architectures.test_architectures import PARENTS, path_to, run
from tests.lossless.conftest import HEADS
from tests.lossless.test_architectures import LOSSLESS
from tests.support.checkpoints import make_heads

STATE = webgpu_state()
WITHOUT = without_half() if STATE.usable else STATE.reason
pytestmark = pytest.mark.skipif(not STATE.usable, reason=f"needs device webgpu: {STATE.reason}")
HALF = (pytest.mark.skipif(bool(WITHOUT), reason=f"needs float16 shaders: {WITHOUT}"), pytest.mark.nightly)
half = pytest.param("fp16", marks=HALF)
full = pytest.mark.skipif(not WITHOUT, reason="for adapters without float16 shaders")

NAME = "llama_tied_llama3_parameters"  # one shape of attention: in float16 lavapipe takes half a minute to compile it
SLOW = ("speculative",)  # in float16 drafts have passes of one row: half a minute more
ARCHITECTURES = [
    "gemma3_old",
    "gpt2_default",
    "olmo2_gqa_tied",
    "phi3_long",
]  # the others are of the same operators; all run on the CPU's provider in test_slot.py
PROMPTS = ("The harbour lights", "the boat")
METHODS: dict[str, dict[str, Any]] = {
    **{name: LOSSLESS.get(name, {}) for name in ("ngram", "self-spec", "speculative", *HEADS)},
    "medusa tree": {"method": "medusa", "nodes": 6},
    "speculative tree": {"method": "speculative", "branch": (2,), "gamma": 2},
}
TOKENS = 20  # software Vulkan takes a second for a dozen passes


@pytest.fixture(scope="module")
def bundles(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], Path]:
    """Precision -> a float32 bundle, or an int4 one that also has float16 graphs."""
    known: dict[Precision, Path] = {}

    def get(precision: Precision) -> Path:
        if precision not in known:
            folder, source = tmp_path_factory.mktemp("webgpu"), str(checkpoint(NAME))
            skip = folder / "skip.json"
            skip.write_text('{"attention": [1], "mlp": []}', "utf-8")
            options = ExportOptions(
                source,
                folder / "bundle",
                ["speculative", "self-spec", *HEADS],
                "fp32" if precision == "fp32" else "int4",
                heads=[str(make_heads(folder / kind, kind, source)) for kind in HEADS],
                draft=source,
                skip_set=skip,
                threads=1,
                devices=("webgpu",),
                device_precisions=("fp32",) if precision == "fp32" else PRECISIONS,
            )
            export_model(options, golden=False)
            known[precision] = options.output
        return known[precision]

    return get


@pytest.fixture(scope="module", params=["fp32", half])
def precision(request: pytest.FixtureRequest) -> Precision:
    found: Precision = request.param
    return found


@pytest.fixture(scope="module")
def engine(bundles: Callable[[Precision], Path], precision: Precision) -> Engine:
    return load(bundles(precision), device="webgpu", context=128)


@pytest.fixture(scope="module")
def plain(engine: Engine, bundles: Callable[[Precision], Path], precision: Precision) -> list[list[int]]:
    """Plain decoding on the device, which in float32 is also the CPU's."""
    settings: dict[str, Any] = {"method": "ar", "max_new_tokens": TOKENS, "ignore_eos": True}
    found = [engine.generate(prompt, **settings).tokens for prompt in PROMPTS]
    if precision == "fp32":
        cpu = load(bundles(precision), operators="stock", threads=1)
        assert found == [cpu.generate(prompt, **settings).tokens for prompt in PROMPTS]
    return found


@pytest.mark.parametrize(
    "number, name",
    [  # chains, skipped layers, heads and trees for every submission: software Vulkan takes seconds to compile each
        pytest.param(at, name, marks=[] if name in ("ngram", "self-spec", "medusa tree") else [pytest.mark.nightly])
        for at, name in enumerate(METHODS)
    ],
)
def test_every_method_writes_plain_decodings_text(
    engine: Engine, plain: list[list[int]], precision: Precision, number: int, name: str
) -> None:
    """After one of the prompts each."""
    if precision == "fp16" and name.split()[0] in SLOW:
        pytest.skip("software Vulkan takes minutes")
    settings: dict[str, Any] = {"method": name, "max_new_tokens": TOKENS, "ignore_eos": True, "fallback": False}
    settings |= {"adaptive": False, "gamma": 4} | METHODS[name]
    at = number % len(PROMPTS)
    result = engine.generate(PROMPTS[at], **settings)
    assert result.tokens == plain[at]
    assert (result.device, result.device_lost, result.stats.dropped_reason) == ("webgpu", None, None)
    assert ("16-bit activations" in result.approximations) == (precision == "fp16")


def test_rows_have_the_same_bits_in_every_pass(engine: Engine, precision: Precision) -> None:
    assert isinstance(engine.model, DeviceModel)
    assert engine.model.precision == precision
    assert engine.rows_exact()


def test_a_few_kilobytes_cross(engine: Engine) -> None:
    assert isinstance(engine.model, DeviceModel)
    engine.generate(PROMPTS[0], method="ar", max_new_tokens=1)  # the first one sends weights, too
    before = engine.model.crossed.total
    result = engine.generate(PROMPTS[0], method="ar", max_new_tokens=10, ignore_eos=True)
    assert (engine.model.crossed.total - before) / result.stats.rounds < 2048


@pytest.mark.parametrize("name", [NAME, *(pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES)])
def test_architectures_on_webgpu(
    writer: Callable[..., Written], reference: Callable[[str], Reference], name: str
) -> None:
    """Prefill, a past, a tree, its accepted path moved, a rollback; transformers' logits, and a fresh prefill's."""
    written, known = writer("stock", name), reference(name)
    part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", SkipSetPart(attention=[0]))
    model = DeviceModel(written.folder, part, "webgpu")  # passes of few rows: wide ones are for golden_step to judge
    slot, fresh = open_slot(model), open_slot(model)
    tokens = known.tokens[:40]
    at = known.rows[known.rows < len(tokens)]
    logits = run(slot, tokens.tolist(), [13, 1, 5])
    np.testing.assert_allclose(logits[at], known.logits[: len(at)], atol=1e-3)
    slot.follow(tokens[:15].tolist())
    tree, path = tokens[15 : 15 + len(PARENTS)], path_to(8)
    slot.forward(tree, np.array(PARENTS))
    slot.keep(path)
    fresh.prefill(slot.tokens)
    held = fresh.snapshot()
    for key, values in slot.snapshot().items():
        np.testing.assert_allclose(values, held[key], atol=1e-3)
    np.testing.assert_allclose(slot.forward(tokens[:2]).logits, fresh.forward(tokens[:2]).logits, atol=1e-3)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_quantized_models(writer: Callable[..., Written], reference: Callable[[str], Reference], form: str) -> None:
    """Each provider quantizes activations in its own way: close, not equal.  But a pass is as the next."""
    written, known = writer("stock", NAME, form), reference(NAME).tokens[:24]
    part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", None)
    slot = open_slot(DeviceModel(written.folder, part, "webgpu"))
    logits = run(slot, known.tolist(), [12])
    expected = run(written.slot("plain"), known.tolist(), [12])
    assert np.sqrt(np.mean(np.square(logits - expected))) < 0.1 * expected.std()
    assert rows_exact(slot)


def test_no_node_runs_on_the_cpu(writer: Callable[..., Written]) -> None:
    """A graph with an operator that the provider does not have is refused, not run elsewhere."""
    written = writer("stock", NAME, "w8a8")
    with pytest.raises(DeviceError, match="does not take this graph"):
        make_device_session(written.folder / written.part.graphs["plain"].file, "webgpu")


@HALF[0]
@pytest.mark.nightly
def test_float16_passes_are_close_to_transformers(
    writer: Callable[..., Written], reference: Callable[[str], Reference]
) -> None:
    """Prefill, a past, a tree, its accepted path moved, a rollback; transformers' logits, and a fresh prefill's."""
    written, known = writer("stock", NAME, "int8"), reference(NAME)
    skip = SkipSetPart(attention=[0])
    part = add_device_graphs(written.folder, written.arch, written.part, "webgpu", skip, precision="fp16")
    model = DeviceModel(written.folder, part, "webgpu")
    assert model.precision == "fp16"
    slot, fresh = open_slot(model), open_slot(model)
    tokens = known.tokens[:24]
    at = known.rows[known.rows < len(tokens)]
    logits = run(slot, tokens.tolist(), [13])
    assert _difference(logits[at], known.logits[: len(at)]) < 0.1  # int8 weights and activations of random matrices
    slot.follow(tokens[:12].tolist())
    tree, path = tokens[12 : 12 + len(PARENTS)], path_to(8)
    rows = slot.forward(tree, np.array(PARENTS)).logits.copy()
    slot.keep(path)
    fresh.prefill(slot.tokens)
    held = fresh.snapshot()
    for key, values in slot.snapshot().items():
        assert _difference(values.reshape(-1, values.shape[-1]), held[key].reshape(-1, values.shape[-1])) < 0.05
    assert _difference(slot.forward(tokens[:2]).logits, fresh.forward(tokens[:2]).logits) < 0.05
    fresh.follow(tokens[:12].tolist())
    assert _difference(rows[path], fresh.forward(tree[path]).logits) < 0.05


def test_the_device_says_what_it_has() -> None:
    assert device_states()[1].precisions == (("fp32",) if WITHOUT else ("fp32", "fp16"))


@full
def test_an_adapter_without_float16_takes_float32(bundles: Callable[[Precision], Path]) -> None:
    bundle = bundles("fp16")
    assert DeviceModel(bundle, Bundle.open(bundle).manifest.target, "webgpu").precision == "fp32"


@full
def test_an_adapter_without_float16_refuses_it(bundles: Callable[[Precision], Path]) -> None:
    with pytest.raises(DeviceError, match=r"float16 graphs need shaders with float16 \(shader-f16\)") as error:
        load(bundles("fp16"), device="webgpu", device_precision="fp16")
    assert "requires f16" in str(error.value)
    assert error.value.hint == "load with device precision fp32, or use device cpu"
