"""Engines on a device: every method, what is refused, a device that fails.  The device is the host, by HostModel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec.runtimes.devices.driver_check as opening
import edgespec.runtimes.opening as models
from edgespec.drafters.ngram_stores import build_store
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BundleError, DeviceError, InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.devices import webgpu as devices
from edgespec.runtimes.devices.driver_check import GoldenStep
from edgespec.runtimes.devices.model import NARROW
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.text.codec import TextCodec
from tests.conftest import DRAFT, HEAD_METHODS, PROMPTS, TARGET, fixed_skip_set
from tests.support.device import HostModel
from tests.support.planning import predicting

ALWAYS: dict[str, Any] = {"ignore_eos": True, "fallback": False}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "speculative": {},
    "speculative tree": {"method": "speculative", "branch": (3, 2), "gamma": 2},
    "self-spec": {},
    "medusa": {"nodes": 1},
    "medusa tree": {"method": "medusa", "nodes": 12},
    "blockwise": {},
    "paradecode": {"threshold": 0.3},
    "chain": {"proposers": ("ngram", "self-spec", "medusa")},
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    options = ExportOptions(
        TARGET,
        folder / "bundle",
        ["speculative", "self-spec", "swift", *HEAD_METHODS],
        "fp32",
        draft=DRAFT,
        skip_set=fixed_skip_set(folder, TARGET),
        threads=1,
        devices=("webgpu",),
    )
    export_model(options, golden=False)
    return options.output


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device webgpu is the host, and tried in this process."""
    monkeypatch.setattr(opening, "try_apart", opening.try_here)
    monkeypatch.setattr(opening, "DeviceModel", HostModel)
    monkeypatch.setattr(models, "DeviceModel", HostModel)
    monkeypatch.setattr(opening, "driver", lambda: "host")


@pytest.fixture
def engine(bundle: Path, on_host: None) -> Engine:
    return load(bundle, device="webgpu", threads=1, context=256)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_writes_plain_decodings_text(engine: Engine, bundle: Path, name: str) -> None:
    cpu = load(bundle, operators="stock", threads=1)
    settings: dict[str, Any] = {
        "method": name,
        "max_new_tokens": 40,
        "ignore_eos": True,
        "fallback": False,
        **METHODS[name],
    }
    drafted = accepted = 0
    for prompt in PROMPTS[:6]:
        plain = engine.generate(prompt, method="ar", max_new_tokens=40, ignore_eos=True)
        result = engine.generate(prompt, **settings)
        assert result.tokens == plain.tokens
        assert result.tokens == cpu.generate(prompt, method="ar", max_new_tokens=40, ignore_eos=True).tokens
        assert result.stats.dropped_reason is None
        assert (result.device, result.device_lost) == ("webgpu", None)
        assert result.lossless
        drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("method", ["speculative", "self-spec", "medusa", "paradecode"])
def test_sampling_equals_the_cpus(engine: Engine, bundle: Path, method: str) -> None:
    """The same seed draws the same text wherever logits are equal up to rounding."""
    settings: dict[str, Any] = {
        "max_new_tokens": 30,
        "temperature": 0.8,
        "seed": 5,
        "acceptance": "coupled",
        "ignore_eos": True,
    }
    expected = load(bundle, operators="stock", threads=1).generate("ROMEO:", method="ar", **settings).tokens
    more: dict[str, Any] = {"threshold": 0.3} if method == "paradecode" else {}
    result = engine.generate("ROMEO:", method=method, **settings, **more)
    assert result.tokens == expected


@pytest.mark.parametrize("name", ["ngram", "speculative", "self-spec", "medusa", "blockwise", "paradecode"])
def test_a_few_kilobytes_cross_a_round(engine: Engine, name: str) -> None:
    """In greedy modes; the second turn of a text, so that nothing is measured or put in place any more."""
    assert isinstance(engine.model, HostModel)
    settings: dict[str, Any] = {
        "method": name,
        "max_new_tokens": 30,
        "ignore_eos": True,
        "fallback": False,
        **METHODS[name],
    }
    first = engine.generate("ROMEO:", **settings)
    before = engine.model.crossed.total
    result = engine.generate("ROMEO:" + first.text, **settings)
    kv = engine.model.facts.kv_bytes_per_token * len(result.tokens)
    crossed = (engine.model.crossed.total - before) / result.stats.rounds
    assert crossed < 6144  # control chooses the draft tokens per round, so it depends on timing
    assert crossed < kv / 4


@pytest.mark.parametrize("at", [1, 2, 9, 20, 38])
@pytest.mark.parametrize("method", ["ar", "medusa", "self-spec"])
def test_a_device_that_fails_loses_no_token(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str, at: int
) -> None:
    expected = load(bundle, operators="stock", threads=1).generate(
        PROMPTS[1], method="ar", max_new_tokens=40, ignore_eos=True
    )
    run, done = HostModel.run, 0

    def fails(self: HostModel, *arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done >= at:
            raise DeviceError("device webgpu failed: injected")
        return run(self, *arguments)

    monkeypatch.setattr(HostModel, "run", fails)
    shown = ""
    with engine.stream(PROMPTS[1], method=method, max_new_tokens=40, ignore_eos=True, fallback=False) as stream:
        for chunk in stream:
            shown += chunk.text
    result = stream.result
    assert result.tokens == expected.tokens
    assert result.text == shown == expected.text
    assert result.finish == "length"
    assert result.device == "cpu"
    assert result.device_lost == "device webgpu failed: injected"
    assert "continued on the CPU" in result.reason
    assert not result.exact
    assert result.as_dict()["device_lost"] == result.device_lost
    assert result.stats.tokens == len(expected.tokens)
    again = engine.generate("My lord,", method="ar", max_new_tokens=4)  # and the next request does not try again
    assert again.device == "cpu"
    assert again.device_lost is None


def test_wrong_numbers_are_not_trusted(bundle: Path, on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = HostModel.run

    def wrong(self: HostModel, *arguments: Any) -> Any:
        return [array * np.float32(1.1) for array in run(self, *arguments)]

    monkeypatch.setattr(opening, "driver", lambda: "a wrong driver")
    monkeypatch.setattr(HostModel, "run", wrong)
    with pytest.raises(DeviceError, match=r"gives wrong numbers here: its logits differ from the CPU's by \d"):
        load(bundle, device="webgpu")
    with pytest.raises(DeviceError, match="gives wrong numbers"):  # nothing was remembered
        load(bundle, device="webgpu")


def test_the_golden_step_is_made_once_a_driver(bundle: Path, on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GoldenStep] = []
    step = opening.golden_step

    def counted(*arguments: Any) -> GoldenStep:
        made.append(step(*arguments))
        return made[-1]

    monkeypatch.setattr(opening, "golden_step", counted)
    monkeypatch.setattr(opening, "driver", lambda: "driver 1")
    load(bundle, device="webgpu")
    load(bundle, device="webgpu")
    assert len(made) == 1
    assert max(made[0][1:]) < 1e-5
    monkeypatch.setattr(opening, "driver", lambda: "driver 2")
    load(bundle, device="webgpu")
    assert len(made) == 2
    (cache_folder() / "devices.json").write_text("{", "utf-8")  # a file that cannot be read is no reason to fail
    load(bundle, device="webgpu")
    assert len(made) == 3
    assert json.loads((cache_folder() / "devices.json").read_text("utf-8"))


def test_a_kernel_for_many_rows_may_be_wrong_alone(
    bundle: Path, on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on software Vulkan: then passes stay narrow, prefill included, and texts right."""
    run = HostModel.run

    def wrong(self: HostModel, which: str, small: Any, *arguments: Any) -> Any:
        found = run(self, which, small, *arguments)
        many = small.get("position_ids", np.zeros((1, 1))).shape[1] > NARROW
        return [array * np.float32(1.5) for array in found] if many else found

    monkeypatch.setattr(opening, "driver", lambda: "wrong beyond sixteen rows")
    monkeypatch.setattr(HostModel, "run", wrong)
    engine = load(bundle, device="webgpu")
    assert isinstance(engine.model, HostModel)
    assert engine.model.most_rows == NARROW
    prompt = PROMPTS[-2]
    expected = load(bundle, operators="stock", threads=1).generate(prompt, method="ar", max_new_tokens=12).tokens
    assert engine.generate(prompt, method="ar", max_new_tokens=12).tokens == expected
    again = load(bundle, device="webgpu")
    assert isinstance(again.model, HostModel)
    assert again.model.most_rows == NARROW  # remembered


def test_auto_leaves_out_what_a_device_does_not_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = predicting(engine.bundle.manifest, {"swift": 1.5, "speculative": 1.5})
    monkeypatch.setattr(engine, "bundle", replace(engine.bundle, manifest=manifest))
    assert [one.name for one in engine.choose(None).candidates] == ["speculative", "ngram"]
    settings: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    result = engine.generate("ROMEO:", method="auto", **settings)
    assert result.tokens == engine.generate("ROMEO:", method="ar", **settings).tokens
    assert result.device == "webgpu"
    assert not result.stats.drops


def test_what_goes_on_on_the_cpu_is_loaded_as_it_was_asked_for(bundle: Path, on_host: None, tmp_path: Path) -> None:
    store = tmp_path / "texts.store"
    codec = TextCodec(bundle)
    text = np.array(codec.encode("My lord, my lord, my lord, my lord, my lord, good night."), np.int32)
    build_store(store, [text], codec.vocab_size, codec.vocabulary_sha256())
    asked = LoadOptions(
        threads=1, context=200, operators="stock", device="webgpu", device_precision="fp32", ngram_store=store,
        strict=False, budget="3GiB", check=False,
    )  # fmt: skip
    lost = load(bundle, asked).off_device("a test")
    assert lost.options == replace(asked, device="cpu", device_precision=None)
    assert (lost.run.operators, lost.run.threads, lost.context, lost.strict) == ("stock", 1, 200, False)
    assert lost.memory_budget.limit == 3 << 30
    assert lost.store is not None


def test_what_a_device_does_not_do(engine: Engine, bundles: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match="swift chooses the layers"):
        engine.generate("ROMEO:", method="swift")
    with pytest.raises(BundleError, match="no graphs for device webgpu"):
        load(bundles("stock"), device="webgpu")
    with pytest.raises(InvalidRequest, match="needs native operators"):
        load(engine.bundle.path, device="webgpu", attention="int8")


def test_a_library_that_is_not_there(bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(devices.LIBRARY, str(tmp_path / "nothing.so"))
    with pytest.raises(DeviceError, match=r"nothing\.so: no such file"):
        load(bundle, device="webgpu")
    (tmp_path / "nothing.so").write_bytes(b"no library")
    with pytest.raises(DeviceError, match="the library must fit onnxruntime"):
        load(bundle, device="webgpu")
