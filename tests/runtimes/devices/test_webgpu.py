"""The real WebGPU provider: on a GPU, or on software Vulkan (docs/devices.md has the recipe)."""

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
from edgespec.runtimes.devices.webgpu import make_device_session, webgpu_state
from edgespec.runtimes.files.manifest import SkipSetPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import rows_exact
from tests.conftest import Reference, Written
from tests.export.architectures.test_architectures import PARENTS, path_to, run
from tests.lossless.test_architectures import HEADS, LOSSLESS
from tests.support.heads import make_heads

STATE = webgpu_state()
pytestmark = pytest.mark.skipif(not STATE.usable, reason=f"needs device webgpu: {STATE.reason}")

NAME = "llama_tied_llama3_parameters"
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
def bundle(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("webgpu"), str(checkpoint(NAME))
    skip = folder / "skip.json"
    skip.write_text('{"attention": [1], "mlp": []}', "utf-8")
    options = ExportOptions(
        source,
        folder / "bundle",
        ["speculative", "self-spec", *HEADS],
        "fp32",
        heads=[str(make_heads(folder / kind, kind, source)) for kind in HEADS],
        draft=source,
        skip_set=skip,
        threads=1,
        devices=("webgpu",),
    )
    Exporter(options).run()
    return options.output


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle, device="webgpu", context=128)


@pytest.fixture(scope="module")
def plain(engine: Engine, bundle: Path) -> list[list[int]]:
    """Plain decoding on the device, which is also the CPU's."""
    cpu = load(bundle, operators="stock", threads=1)
    found = []
    for prompt in PROMPTS:
        tokens = engine.generate(prompt, method="ar", max_new_tokens=TOKENS, ignore_eos=True).tokens
        assert tokens == cpu.generate(prompt, method="ar", max_new_tokens=TOKENS, ignore_eos=True).tokens
        found.append(tokens)
    return found


@pytest.mark.parametrize("number, name", [*enumerate(METHODS)])
def test_every_method_writes_plain_decodings_text(
    engine: Engine, plain: list[list[int]], number: int, name: str
) -> None:
    """After one of the prompts each."""
    settings: dict[str, Any] = {"method": name, "max_new_tokens": TOKENS, "ignore_eos": True, "fallback": False}
    settings |= {"adaptive": False, "gamma": 4} | METHODS[name]
    at = number % len(PROMPTS)
    result = engine.generate(PROMPTS[at], **settings)
    assert result.tokens == plain[at]
    assert (result.device, result.device_lost, result.stats.dropped_reason) == ("webgpu", None, None)


def test_rows_have_the_same_bits_in_every_pass(engine: Engine) -> None:
    assert engine.rows_exact()


def test_a_few_kilobytes_cross(engine: Engine) -> None:
    assert isinstance(engine.model, DeviceModel)
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
