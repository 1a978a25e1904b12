"""What steps of drafters are taken to read, against the matrices that their weight files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.bundle.model import open_model
from edgespec.export.drafters.drafter import Drafter, cut_drafter
from edgespec.export.drafters.mtp import read_mtp
from edgespec.export.drafters.read import read_drafter, with_tokens
from edgespec.export.planned import planned_bundle
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import Checkpoint
from edgespec.planning.costs import CURVES, assumed, line, rising
from edgespec.planning.traffic import kv_token_bytes, layer_weights, read_bytes
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import MethodPart, ModelPart
from edgespec.runtimes.options import RunOptions
from tests.support import hf
from tests.support.assistant import write_assistant, write_target
from tests.support.dflash import write_dflash
from tests.support.eagle import write_random
from tests.support.mtp import write_mtp
from tests.support.planning import manifest

pytestmark = pytest.mark.usefixtures("native")
KINDS = ("eagle", "mtp", "dflash", "assistant")
BITS = {"q4": 18 / 4, "q4x64": 17 / 4, "q8": 34 / 4, "c8": 8.0, "f32": 32.0}  # of a weight, with its share of a scale
HEADS: dict[Format, str] = {"int4": "q8", "int4-64": "q8", "int8": "q8", "w8a8": "c8", "fp32": "f32"}  # of drafters
NORMS = 0.02  # of all weights, which the planner takes for matrices


def made(folder: Path, kind: str, cut: int | None) -> Drafter:
    """A drafter of random weights; ``cut``: rows of its LM head, of all tokens' where it is None.

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
    """A drafter's entry, and bytes of each matrix in its weight file, padding apart."""
    (folder / "bundle").mkdir()
    part = write_drafter(folder / "bundle", drafter, WeightChoice.of(form, None, None), "native")
    assert part.index is not None
    stored = json.loads((folder / "bundle" / part.index).read_text("utf-8"))["matrices"]
    return part, {name: each["n"] * each["k"] * BITS[each["kind"]] / 8 for name, each in stored.items()}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cut", [None, 64, 96])
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
    v = rising(CURVES["native"][form])
    several = line(v, FIRST_ROWS)
    first, further = {
        "eagle": (every * several, every - fuse),
        "mtp": (every * several, every),
        "assistant": (every - sizes.get("post_projection.weight", 0), every),
        "dflash": ((every - fuse) * line(v, decoder.block or 0) + entries * several, every - fuse),
    }[kind]
    found = manifest().model_copy(update={"drafter": part, "methods": {kind: MethodPart()}})
    costs = assumed(found, RunOptions(kind, "native", 1024), 0)  # the unit is a byte's time
    assert costs.step_ms(kind, True) == pytest.approx(first, rel=NORMS)
    assert costs.step_ms(kind, False) == pytest.approx(further, rel=NORMS)


def test_an_assistant_reads_keys_and_values_of_the_target(tmp_path: Path) -> None:
    part, _ = written(tmp_path, made(tmp_path, "assistant", None), "int8")
    assert part.decoder is not None
    found = manifest().model_copy(update={"drafter": part, "methods": {"assistant": MethodPart()}})
    use = RunOptions("assistant", "native", 4096)
    near, far = (assumed(found, use, depth).step_ms("assistant", False) for depth in (0, 1000))
    share = len(part.decoder.reads) / found.target.facts.layers
    assert far - near == pytest.approx(1000 * share * kv_token_bytes(found.target, "native"))


@pytest.mark.parametrize("rows", [None, 8192])
def test_a_planned_drafter_in_the_shape_of_a_real_model(tmp_path: Path, rows: int | None) -> None:
    """EAGLE-3's layer, with doubled inputs of q, k and v, and the matrix that fuses three taps."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"]), "utf-8")
    hidden, inner, heads, keys, dim = 2048, 8192, 32, 8, 64
    layer = 2 * hidden * dim * (heads + 2 * keys) + hidden * dim * heads + 3 * hidden * inner
    planned = planned_bundle(tmp_path, methods=["eagle"], draft_vocab=rows).drafter
    assert planned is not None
    head = (rows or planned.facts.vocab) * hidden
    assert layer_weights(planned.facts, head) == pytest.approx(layer + 3 * hidden**2, rel=1e-3)
    assert planned.facts.parameters - layer_weights(planned.facts, head) == head
