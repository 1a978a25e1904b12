"""A plan of storage knows every byte before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_described, open_model
from edgespec.export.measuring.plan import weight_bytes
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import Layout, Operators
from tests.conftest import DRAFT, TARGET, Written
from tests.support import hf
from tests.support.planned import PLANS, with_heads

# tied and not, with biases, learnt positions, norms of heads, fused and parallel layers
SOME = ("llama_tied_gqa", "qwen2_untied", "llama_biases_mqa", "gpt2_default", "gemma3_new", "olmo2_mha", "falcon_40b")
LAYOUTS: tuple[Layout, ...] = ("native", "stock")


def config_only(source: Path, folder: Path, *more: str) -> Path:
    """Copy config.json and the files ``more`` of ``source`` to ``folder``, without the weights."""
    folder.mkdir()
    for name in ("config.json", *more):
        shutil.copyfile(source / name, folder / name)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SOME)
def test_the_size_of_weights_is_exact(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, form: Format, layout: Layout
) -> None:
    head: Format | None = "int8" if form == "int4" else None
    write_model(tmp_path, open_model(checkpoint(name), None), ModelSpec(form, head=head, layout=layout, gated=True))
    alone = open_described(config_only(checkpoint(name), tmp_path / "config"), None)
    assert isinstance(alone.source.path, Path)
    assert weight_bytes(alone, form, head, layout) == (tmp_path / "model.data").stat().st_size


@pytest.mark.parametrize("name", sorted(set(hf.CONFIGS) - set(SOME)))
def test_the_size_of_weights_is_exact_for_every_architecture(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    context = hf.CONTEXTS.get(name)
    write_model(tmp_path, open_model(checkpoint(name), context), ModelSpec("int4"))
    alone = open_described(config_only(checkpoint(name), tmp_path / "config"), context)
    assert weight_bytes(alone, "int4") == (tmp_path / "model.data").stat().st_size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_size_of_heads_is_exact(
    checkpoint: Callable[[str], Path], tmp_path: Path, plan: str, form: Format, layout: Operators
) -> None:
    made = with_heads(tmp_path, checkpoint("gemma2_caps"), PLANS[plan], form, layout)
    size = (tmp_path / made.written.part.weights).stat().st_size
    assert weight_bytes(made.written.arch, form, None, layout, PLANS[plan]) == size


def test_large_tensors_are_aligned_to_large_pages(written: Callable[..., Written]) -> None:
    made = written(TARGET, "fp32")
    size = (made.folder / made.part.weights).stat().st_size
    assert weight_bytes(open_model(resolve(TARGET), None), "fp32", None, "stock") == size > 4 << 20


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [TARGET, DRAFT, *sorted(hf.CORE)])
def test_the_plan_knows_the_size(written: Callable[..., Written], name: str, form: Format) -> None:
    made = written(name, form)
    assert weight_bytes(made.arch, form, layout="stock") == (made.folder / made.part.weights).stat().st_size
