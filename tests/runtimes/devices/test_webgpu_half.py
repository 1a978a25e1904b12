"""Float16 activations on the real WebGPU provider: the same methods as in float32, fewer prompts and models.

Where the adapter has no float16 shaders (SwiftShader), what is said of that.
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
from edgespec.export.emit.device_graphs import add_device_graphs
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.devices.trust import _difference
from edgespec.runtimes.devices.webgpu import device_states, webgpu_state, without_half
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import PRECISIONS, SkipSetPart
from edgespec.runtimes.opening import open_slot
from tests.conftest import Reference, Written
from tests.export.architectures.test_architectures import PARENTS, path_to, run
from tests.lossless.test_architectures import HEADS
from tests.runtimes.devices.test_webgpu import METHODS, PROMPTS
from tests.support.heads import make_heads

STATE = webgpu_state()
WITHOUT = without_half() if STATE.usable else STATE.reason
pytestmark = pytest.mark.skipif(not STATE.usable, reason=f"needs device webgpu: {STATE.reason}")
half = pytest.mark.skipif(bool(WITHOUT), reason=f"needs float16 shaders: {WITHOUT}")
full = pytest.mark.skipif(not WITHOUT, reason="for adapters without float16 shaders")

NAME = "llama_tied_llama3_parameters"  # one shape of attention: in float16 lavapipe takes half a minute to compile it
SLOW = ("speculative",)  # drafts have passes of one row: half a minute more
ALWAYS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "fallback": False}


@pytest.fixture(scope="module")
def bundle(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("half"), str(checkpoint(NAME))
    skip = folder / "skip.json"
    skip.write_text('{"attention": [1], "mlp": []}', "utf-8")
    options = ExportOptions(
        source,
        folder / "bundle",
        ["speculative", "self-spec", *HEADS],
        "int4",
        heads=[str(make_heads(folder / kind, kind, source)) for kind in HEADS],
        draft=source,
        skip_set=skip,
        threads=1,
        devices=("webgpu",),
        device_precisions=PRECISIONS,
    )
    Exporter(options).run()
    return options.output


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle, device="webgpu", context=128)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, list[int]]:
    """Plain decoding on the device, by prompt."""
    return {prompt: engine.generate(prompt, method="ar", **ALWAYS).tokens for prompt in PROMPTS[:2]}


@half
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in METHODS if name.split()[0] not in SLOW])
def test_every_method_writes_plain_decodings_text(engine: Engine, plain: dict[str, list[int]], name: str) -> None:
    for prompt, tokens in plain.items():
        settings: dict[str, Any] = {"method": name, "adaptive": False, "gamma": 4} | ALWAYS | METHODS[name]
        result = engine.generate(prompt, **settings)
        assert result.tokens == tokens
        assert (result.device, result.device_lost, result.stats.dropped_reason) == ("webgpu", None, None)
        assert "16-bit activations" in result.approximations


@half
@pytest.mark.nightly
def test_rows_have_the_same_bits_in_every_pass(engine: Engine) -> None:
    assert isinstance(engine.model, DeviceModel)
    assert engine.model.precision == "fp16"
    assert engine.rows_exact()


@half
@pytest.mark.nightly
def test_passes_equal_transformers(writer: Callable[..., Written], reference: Callable[[str], Reference]) -> None:
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
def test_an_adapter_without_float16_takes_float32(bundle: Path) -> None:
    assert DeviceModel(bundle, Bundle.open(bundle).manifest.target, "webgpu").precision == "fp32"


@full
def test_an_adapter_without_float16_refuses_it(bundle: Path) -> None:
    with pytest.raises(DeviceError, match=r"float16 graphs need shaders with float16 \(shader-f16\)") as error:
        load(bundle, device="webgpu", device_precision="fp16")
    assert "requires f16" in str(error.value)
    assert error.value.hint == "load with device precision fp32, or use device cpu"
