"""Any defect of a file or a request is tolerated or raises an EdgespecError: never another exception."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, InvalidRequest, StoreError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.measuring.skip_search import read_skip_set
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf
from tests.support.saved import saved
from tests.support.zoo import CASES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FUZZ = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in leaves(inner, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Make a copy with something else at ``path``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(checkpoint("llama_tied_llama3_parameters"), tmp_path_factory.mktemp("bad") / "model"))


@pytest.fixture(scope="module")
def sound(bundles: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(bundles("stock"), tmp_path_factory.mktemp("bad") / "bundle"))


@pytest.mark.parametrize(
    "key, value",
    [("rope_parameters", {"rope_type": "llama3"}), ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
     ("rope_parameters", {"rope_type": ["default"]}), ("quantization_config", "gptq"), ("architectures", {"a": 1}),
     ("rms_norm_eps", "1e-5"), ("num_key_value_heads", 4), ("head_dim", 7), ("model_type", ["llama"]),
     ("hidden_act", ["silu"])],
)  # fmt: skip
def test_configurations_that_broke_once(model: Path, key: str, value: object) -> None:
    config = {**hf.CONFIGS["llama_tied_llama3_parameters"], key: value}
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    with suppress(EdgespecError):
        open_model(model, None)


@pytest.fixture(scope="module")
def every(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a folder for each configuration of tests/support/zoo.py, whose config.json may be spoilt."""
    folder = tmp_path_factory.mktemp("every")
    return {name: Path(shutil.copytree(checkpoint(name), folder / name)) for name in CASES}


MORE = ["quantization_config", "architectures", "layer_types", "no_rope_layers", "partial_rotary_factor",
        "rope_scaling", "rope_parameters", "text_config"]  # fmt: skip


@FUZZ
@given(data=st.data())
def test_any_configuration_of_any_architecture(every: dict[str, Path], data: st.DataObject) -> None:
    """One value of what transformers writes, at any depth, is another, or an option is there that was not."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    config = saved(name)["config"]
    if data.draw(st.booleans()):
        changed = replaced(config, data.draw(st.sampled_from(leaves(config))), data.draw(JSON))
    else:
        changed = {**config, data.draw(st.sampled_from(sorted({*config, *MORE}))): data.draw(JSON)}
    (every[name] / "config.json").write_text(json.dumps(changed), "utf-8")
    with suppress(EdgespecError):
        open_model(every[name], None)


KINDS = {case.config["model_type"]: name for name, case in CASES.items()}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_value_of_a_configuration_may_be_nonsense(every: dict[str, Path], kind: str) -> None:
    """As transformers writes it; of lists the first entry."""
    name = KINDS[kind]
    config = saved(name)["config"]
    for path in leaves(config)[1:]:
        for wrong in ({"a": 1}, 0, 10**9):
            if not any(type(key) is int and key for key in path):
                changed = replaced(config, path, wrong)
                (every[name] / "config.json").write_text(json.dumps(changed), "utf-8")
                with suppress(EdgespecError):
                    open_model(every[name], None)


@FUZZ
@given(data=st.data())
def test_any_manifest(sound: Path, data: st.DataObject) -> None:
    good = json.loads((sound / MANIFEST).read_text("utf-8"))
    changed = replaced(good, data.draw(st.sampled_from(leaves(good))), data.draw(JSON))
    try:
        (sound / MANIFEST).write_text(json.dumps(changed), "utf-8")
        with suppress(EdgespecError):
            Bundle.open(sound, check=False)
            read_manifest(sound)
    finally:
        (sound / MANIFEST).write_text(json.dumps(good), "utf-8")


@FUZZ
@given(value=JSON)
@example(value={"attention": [1.5]})
@example(value={"attention": ["x"]})
@example(value={"attention": 3})
@example(value={"a": {"attention": [0]}, "b": {"mlp": [0]}})
@example(value={"a": 3})
@example(value=[1])
@example(value=None)
def test_any_skip_set(tmp_path: Path, value: object) -> None:
    file = tmp_path / "skip.json"
    file.write_text(json.dumps(value), "utf-8")
    with suppress(EdgespecError):
        skip = read_skip_set(file, 2)
        assert len(skip) > 0
        assert all(0 <= layer < 2 for layer in (*skip.attention, *skip.mlp))


@FUZZ
@given(value=JSON)
@example(value={"chat_template": 3})
@example(value={"chat_template": [{"name": "default"}]})
@example(value={"chat_template": ["x"]})
@example(value={"bos_token": 3, "chat_template": "{{ bos_token }}"})
@example(value=[1])
def test_any_tokenizer_configuration(model: Path, value: object) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(value), "utf-8")
    with suppress(EdgespecError):
        codec = TextCodec(model)
        codec.token_id(codec.special("bos_token"))
        codec.chat([{"role": "user", "content": "hello"}])


@FUZZ
@given(prompt=st.text(max_size=30))
@example(prompt="\ud800")
@example(prompt="\x00")
def test_any_text_is_a_prompt_or_refused(engine: Callable[..., Engine], prompt: str) -> None:
    made = engine("int4")
    with suppress(EdgespecError):
        assert len(made.generate(prompt, max_new_tokens=2, ignore_eos=True).tokens) == 2
    assert not made.sessions._busy


@pytest.mark.parametrize("prompt", [None, 3, b"abc", [1.5], [[1]], ["a"], {"a": 1}])
def test_what_is_no_prompt_is_refused(engine: Callable[..., Engine], prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected text, or token ids"):
        engine("int4").generate(prompt)


@pytest.mark.parametrize("threads", [0, -2, 513, 10**9])
def test_fewer_threads_than_one_are_refused_and_so_are_too_many(
    bundle: Callable[..., Path], tmp_path: Path, threads: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"threads {threads}: expected 1 to 512"):
        load(bundle("int4"), threads=threads)
    with pytest.raises(InvalidRequest, match=f"threads {threads}: expected 1 to 512"):
        export_model(ExportOptions("builtin:shakespeare", tmp_path / "out", threads=threads), golden=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 10**12), ("threads", "2"), ("threads", 1.5), ("context", "9"), ("operators", "x"), ("device", []),
     ("ngram_store", 3), ("strict", "no"), ("check", 1)],
)  # fmt: skip
def test_ways_to_load_of_other_types_are_refused(bundle: Callable[..., Path], name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} .*expected"):
        load(bundle("int4"), **{name: value})


@pytest.mark.parametrize("folder", [None, 3, b"x", []])
def test_what_is_no_folder_is_refused(folder: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a folder"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "x"), ("temperature", 10**400), ("top_p", None), ("min_p", []), ("repetition_penalty", "x"),
     ("logit_bias", 3), ("logit_bias", {1: "a"}), ("stop", 3), ("stop", [3]), ("method", []), ("accept", 3),
     ("grammar", "(")],
)  # fmt: skip
def test_settings_of_other_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is"):
        Settings().changed(**{name: value})


def test_requests_that_cannot_be_are_refused(engine: Callable[..., Engine], bundle: Callable[..., Path]) -> None:
    model: Any = engine("int4")
    for prompts in (None, 3, b"ab", {"a"}):
        with pytest.raises(InvalidRequest, match="expected a list of prompts"):
            model.generate_batch(prompts)
    with pytest.raises(InvalidRequest, match="cancel is 3: expected"):
        model.generate("a", cancel=3)
    with pytest.raises(InvalidRequest, match="cancel is 3: expected"):
        model.generate_batch(["a"], cancel=3)
    with pytest.raises(InvalidRequest, match=r"cannot be encoded: character 1, '\\udcff', is no text"):
        model.generate("a\udcff")
    with pytest.raises(StoreError, match="cannot read it: embedded null byte"):
        load(bundle("int4"), ngram_store="a\0b")


def test_an_unknown_device_is_refused(bundle: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match=r"device cuda: expected one of cpu, webgpu(.|\n)*edgespec devices"):
        load(bundle("int4"), device="cuda")


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(allow_nan=True),
        "top_k": st.integers(-2, 2000),
        "top_p": st.floats(-1, 2),
        "min_p": st.floats(-1, 2),
        "repetition_penalty": st.floats(allow_nan=True),
        "seed": st.integers(),
        "gamma": st.integers(-2, 30),
        "max_new_tokens": st.integers(-2, 6),
        "method": st.sampled_from(["ar", "ngram", "self-spec", "speculative", "", "AR"]),
        "stop": st.text(max_size=2) | st.tuples(st.text(max_size=2)),
        "logit_bias": st.dictionaries(st.integers(-2, 2000), st.floats(), max_size=2),
        "acceptance": st.sampled_from(["rejection", "coupled", "none"]),
    },
)


@FUZZ
@given(wanted=SETTINGS)
@example(wanted={"temperature": 1e-300, "top_k": 3})
@example(wanted={"temperature": 1e300, "top_p": 1e-300})
@example(wanted={"repetition_penalty": 1e300})
@example(wanted={"repetition_penalty": 1e-300, "temperature": 1.0})
def test_any_settings_decode_or_are_refused(engine: Callable[..., Engine], wanted: dict[str, Any]) -> None:
    made = engine("int4")
    with suppress(EdgespecError):
        result = made.generate("The", **wanted)
        assert len(result.tokens) <= wanted.get("max_new_tokens", 128)
        assert result.stats.dropped_reason is None
    assert not made.sessions._busy
