"""Sessions of the C interface add LoRA adapters to rows as Python does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.loading import load
from edgespec.export.source.source import resolve
from edgespec.runtimes.slots.adapters import AS_STORED
from tests.conftest import PROMPTS, TARGET
from tests.support.c_sessions import NO_FILE, REFUSED, Bundle, Refused, settings_of
from tests.support.checkpoints import write_adapter
from tests.support.selftest import NATIVE

pytestmark = pytest.mark.usefixtures("native")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the embedded model, of different ranks, scales and kinds of numbers."""
    folder, config = tmp_path_factory.mktemp("adapters"), json.loads((resolve(TARGET) / "config.json").read_text())
    ranks = dict(zip(MODULES, (3, 5, 8, 4, 19, 4, 6), strict=True))
    wanted: dict[str, dict[str, Any]] = {
        "a": {"rank": ranks, "rank_pattern": ranks, "alpha_pattern": {r"self_attn\.q_proj": 16}},
        "b": {"rank": 19, "use_rslora": True},
    }
    for name, how in wanted.items():
        write_adapter(folder / name, config, MODULES, **how)
    half = {name: value.astype(np.float16) for name, value in load_file(folder / "a" / WEIGHTS).items()}
    save_file(half, folder / "a" / WEIGHTS)
    return {"a": folder / "a", "b": folder / "b"}


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_texts_are_those_of_python(bundles: Callable[..., Path], adapters: dict[str, Path], form: str) -> None:
    folder, different = bundles("native", form), set[tuple[int, ...]]()
    with load(folder, threads=1, adapters=adapters) as engine, Bundle(folder) as bundle:
        numbers = {None: 0} | {name: bundle.add_adapter(path) for name, path in adapters.items()}
        assert list(numbers.values()) == [0, 1, 2]
        with bundle.session() as session:
            for prompt in map(engine.codec.encode, PROMPTS[:3]):
                for name in (None, "a", "b", "a", None):  # a text of one adapter is none of another's
                    wanted = engine.generate(prompt, method="ar", max_new_tokens=24, adapter=name).tokens
                    different.add(tuple(wanted))
                    for method in ("plain", "self-spec", "speculative", "auto"):
                        given = settings_of(SamplingParams(), method, 24, adapter=numbers[name], fixed=0, ignore_eos=0)
                        assert session.generate(prompt, given) == wanted
                        assert session.counts().dropped == b""
    assert len(different) > 5


def test_what_cannot_be_added_is_refused(bundles: Callable[..., Path], adapters: dict[str, Path],
                                         tmp_path: Path) -> None:  # fmt: skip
    folder = bundles("native", "int4")

    def changed(name: str, tensors: Callable[[dict[str, Any]], None] = lambda all: None, **config: Any) -> Path:
        made = tmp_path / name
        shutil.copytree(adapters["b"], made)
        found = load_file(made / WEIGHTS)
        tensors(found)
        save_file(found, made / WEIGHTS)
        settings = json.loads((made / "adapter_config.json").read_text()) | config
        (made / "adapter_config.json").write_text(json.dumps(settings))
        return made

    def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
        def work(tensors: dict[str, Any]) -> None:
            for name in [one for one in tensors if old in one]:
                tensors[name.replace(old, new)] = tensors.pop(name)

        return work

    def damage(tensors: dict[str, Any]) -> None:
        next(iter(tensors.values()))[0, 0] = np.nan

    def remove(tensors: dict[str, Any]) -> None:
        del tensors[next(iter(tensors))]

    def narrow(tensors: dict[str, Any]) -> None:
        for name in [one for one in tensors if "lora_A" in one]:
            tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])

    cut = changed("cut")
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-5])
    bad = (
        (tmp_path / "none", "adapter_config.json", NO_FILE),
        (cut, "damaged", REFUSED),
        (changed("kind", peft_type="IA3"), "not a LoRA adapter", REFUSED),
        (changed("dora", use_dora=True), "use_dora", REFUSED),
        (changed("bias", bias="all"), "bias", REFUSED),
        (changed("start", init_lora_weights="pissa"), "pissa", REFUSED),
        (changed("rank", r=7), "not of the rank", REFUSED),
        (changed("alpha", lora_alpha=0), "positive lora_alpha", REFUSED),
        (changed("pattern", rank_pattern={"(": 3}), "expected names in patterns", REFUSED),
        (changed("half", rename("lora_B", "lora_C")), "no lora_A or lora_B", REFUSED),
        (changed("one", remove), "needs lora_A and lora_B", REFUSED),
        (changed("layer", rename("layers.0.", "layers.99.")), "no such matrix", REFUSED),
        (changed("nan", damage), "not finite", REFUSED),
        (changed("narrow", narrow), "an adapter for", REFUSED),
    )  # fmt: skip
    with Bundle(folder) as bundle:
        for path, words, status in bad:
            with pytest.raises(Refused, match=words) as refused:
                bundle.add_adapter(path)
            assert refused.value.status == status, path
        number = bundle.add_adapter(adapters["a"])
        with bundle.session() as session:
            with pytest.raises(Refused, match="before sessions"):
                bundle.add_adapter(adapters["b"])
            for other in (-1, number - 1, number + 1):  # that of one that was refused among them
                with pytest.raises(Refused, match=f"adapter {other}: expected one that was added"):
                    session.begin([1], settings_of(adapter=other))
            session.generate([1, 2], settings_of(adapter=number, tokens=4))
            with pytest.raises(Refused, match="the text of an adapter"):
                session.save(tmp_path / "saved")


def test_the_architectures_are_those_of_python() -> None:
    text = (NATIVE / "lora.cpp").read_text("utf-8")
    listed = re.search(r"kAsStored\[\] = \{(.*?)\}", text, re.DOTALL)
    assert listed
    assert tuple(re.findall(r'"(\w+)"', listed[1])) == AS_STORED
