"""Vision towers of published shapes, of random weights: processor time of a picture, beside float32 elsewhere.

    python -m benchmarks.towers [NAME ...]

One thread each: native operators in int8 and float32, transformers' eager float32, and a float32 graph in ONNX Runtime
(torch.onnx).  Times are processor time, least of ``REPEATS``, of the tower alone; ratios to int8.  Needs torch,
transformers and onnx.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, show
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.slots.encoder import Encoder, encoder_attention
from edgespec.runtimes.slots.shared import Model

REPEATS = 2  # times hardly differ: one thread, seconds each
TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def _turned(*pairs: int) -> dict[str, Any]:
    """Say how many pairs of a head's 16 channels turn by each of three positions."""
    how = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": sum(pairs) / 8}
    return {"rope_parameters": how | {"mrope_section": list(pairs)}}


@dataclass(frozen=True)
class Shape:
    """A published shape.

    Attributes:
        model: as in config.json, without the text model, which is as small as can be.
        pixels: preprocessor_config.json.
        grid: of patches that is timed.
    """

    model: dict[str, Any]
    pixels: dict[str, Any]
    grid: tuple[int, int]


SHAPES = {
    "SmolVLM2-500M": Shape(
        {"model_type": "smolvlm", "text_config": {"model_type": "llama", **TEXT}, "scale_factor": 4,
         "vision_config": BASE | {"image_size": 512, "patch_size": 16}, "image_token_id": 99},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, (32, 32),
    ),
    "LFM2-VL-450M": Shape(
        {"model_type": "lfm2_vl", "projector_hidden_size": 2560, "image_token_id": 99,
         "text_config": {"model_type": "lfm2", "layer_types": ["full_attention"], "block_ff_dim": 96, **TEXT},
         "vision_config": BASE | {"model_type": "siglip2_vision_model", "patch_size": 16, "vision_use_head": False}},
        {"encoder_patch_size": 16}, (32, 32),
    ),
    "Qwen3-VL-2B": Shape(
        {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **TEXT, **_turned(4, 2, 2)},
         "image_token_id": 99,
         "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16,
                           "out_hidden_size": 64, "deepstack_visual_indexes": [5, 11, 17]}},
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 1 << 20}}, (32, 32),
    ),
    "Qwen3.5-0.8B": Shape(
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **TEXT, **DELTA, **_turned(2, 1, 1)},
         "image_token_id": 99,
         "vision_config": {"hidden_size": 768, "intermediate_size": 3072, "depth": 12, "num_heads": 12,
                           "out_hidden_size": 64, "deepstack_visual_indexes": []}},
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 1 << 20}}, (32, 32),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHAPES))
    names = parser.parse_args().names or list(SHAPES)
    show(conditions(threads=1) | {"towers": {name: measured(SHAPES[name]) for name in names}})


def measured(shape: Shape) -> dict[str, Any]:
    """Time one shape -> milliseconds, sizes, and how far native float32 and int8 are from transformers' rows."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**shape.model)).float().eval()
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(shape.pixels), "utf-8")
        arch = open_model(folder, None)
        assert arch.sight is not None
        rows = shape.grid[0] * shape.grid[1]
        source = np.random.default_rng(0).standard_normal((rows, arch.sight.tower.input_width)).astype(np.float32)
        places = np.indices(shape.grid).reshape(2, -1) if arch.sight.tower.rotaries else None
        found: dict[str, Any] = {"rows": rows, "threads": 1}
        forms: tuple[Format, ...] = "int8", "fp32"
        for form in forms:
            own = folder / form
            own.mkdir()
            part = write_model(own, arch, ModelSpec(form)).part.tower
            assert part is not None
            encoder = Encoder(Model(own, part, "native", 1, encoder_attention(part)))
            found[f"{form}_ms"] = least(lambda encoder=encoder: encoder.encode(source, places))  # type: ignore[misc]
            found[f"{form}_mb"] = round((own / part.weights).stat().st_size / 1e6, 1)
            encoder.close()
        run, given = of_transformers(model, arch.sight.tower.columns, source, shape)  # type: ignore[attr-defined]
        found["transformers_ms"] = least(run)
        found["onnx_ms"] = of_onnxruntime(model, given, folder / "tower.onnx")
    return found


def least(run: Callable[[], Any]) -> float:
    """Processor time of a call in milliseconds, the least of a few."""
    found = []
    for _ in range(REPEATS):
        begin = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - begin))
    return round(min(found), 1)


def of_transformers(model: Any, columns: int, source: NDArray[np.float32], shape: Shape) -> tuple[Any, Any]:
    """Make a call of transformers' tower on as many patches, and what it is given."""
    import torch

    height, width = shape.grid
    kind = shape.model["model_type"]
    patches = torch.from_numpy(source[:, :columns].copy())
    if kind == "smolvlm":
        given: Any = (torch.randn(1, 3, 16 * height, 16 * width),)
        tower = model.model.vision_model
        if (height, width) == (32, 32):  # without the search for places, which cannot be traced
            from transformers import SiglipVisionConfig, SiglipVisionModel

            size = {"image_size": 16 * height, "patch_size": 16, "vision_use_head": False}
            tower = SiglipVisionModel(SiglipVisionConfig(**BASE, **size)).eval()
    elif kind == "lfm2_vl":
        tower = model.model.vision_tower
        given = (patches[None], torch.ones(1, len(patches), dtype=torch.int32), torch.tensor([[height, width]]))
    else:
        tower = model.model.visual
        given = (torch.cat([patches, patches], 1), torch.tensor([[1, height, width]]))

    def run() -> Any:
        with torch.inference_mode():
            return tower(*given)

    return run, (tower, given)


def of_onnxruntime(model: Any, given: Any, file: Path) -> float | None:
    """Export transformers' tower as a float32 graph and time it; None = torch.onnx cannot."""
    import onnxruntime as ort
    import torch

    tower, inputs = given
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        torch.onnx.export(tower, inputs, str(file), dynamo=False, opset_version=17)
        session = ort.InferenceSession(str(file), options)
    except Exception as error:  # of many kinds: not every tower can be traced
        print(f"no float32 graph: {str(error)[:200]}", file=sys.stderr)
        return None
    feed = {one.name: value.numpy() for one, value in zip(session.get_inputs(), inputs, strict=False)}
    return least(lambda: session.run(None, feed))


if __name__ == "__main__":
    main()
