"""Let transformers' exporter write the graph of a decoder: several tokens per pass, and caches as inputs and outputs.

This is the one part of an export that needs torch and transformers (the extra ``transformers``); ``write.py`` runs it
in a separate process: ``python -m edgespec.export.foreign.capture MODEL FOLDER``.

A model is captured with a free number of tokens where everything that it keeps of a text grows by one row per token.
Recurrent states change in every row, so such a model is captured for single tokens.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAPH = "model.onnx"
DATA = "model.onnx.data"
_FIRST, _SECOND = (7, 3), (10, 5)  # (tokens before a pass, tokens in it): what differs between two captures is free
_CACHES = ("cache", "past_key_values", "cache_params", "state")  # what models call it
_FED = ("input_ids", "position_ids")
_GIVEN = ("cache", "past_key_values")  # of those that a caller may make
_LEAST = 1e-8
_EXPERTS = "batched_mm"  # each row multiplies by its own experts: nothing depends on other rows


class NotCaptured(Exception):
    """A model that cannot be captured; the message says why."""


@dataclass(frozen=True)
class Capture:
    """Inputs of a pass after some tokens."""

    inputs: dict[str, Any]  # of ``forward``
    leaves: list[Any]  # tensors of the cache, in its own order


def capture(model: Any, folder: Path) -> None:
    """Write ``model.onnx`` of a decoder of transformers, with the ports that ``ConcatPorts`` reads.

    Args:
        model: in float32, in evaluation mode.
        folder: exists.

    Raises:
        NotCaptured: the model keeps no cache that can be given to it.
    """
    import onnx_ir
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model.eval()
    keep_epsilons(model)
    with row_by_row_experts(model):
        placed = not counts_positions(model)
        first, second = (sample(model, *sizes, placed=placed) for sizes in (_FIRST, _SECOND))
        free = free_axes(first, second)
        if any(not axes for axes in free):  # recurrent states
            first = sample(model, _FIRST[0], 1, placed=placed)
        rows = (1,) if first.inputs["input_ids"].shape[1] > 1 else ()
        shapes: dict[str, Any] = {name: _free(rows) for name in _FED if name in first.inputs}
        shapes[_cache_name(first.inputs)] = [_free(axes) for axes in free]
        program = OnnxExporter().export(model, first.inputs, OnnxConfig(dynamic_shapes=shapes)).program
    name_ports(program, len(free))
    onnx_ir.save(program, str(folder / GRAPH), external_data=DATA)


def counts_positions(model: Any) -> bool:
    """Whether a model knows by its cache where a pass begins; others are given it, as ``generate`` does."""
    import inspect

    import torch

    if "position_ids" not in inspect.signature(model.forward).parameters:
        return True
    own, told = (sample(model, _FIRST[0], 1, placed=placed).inputs for placed in (False, True))
    with torch.no_grad():
        return torch.allclose(model(**own).logits, model(**told).logits, rtol=1e-3, atol=1e-5)


def sample(model: Any, before: int, tokens: int, *, placed: bool = False) -> Capture:
    """Run a model over the first tokens of a text, and give the inputs of the pass over the next ones.

    Args:
        placed: whether position_ids are among them.
    """
    import torch
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
    from transformers.exporters.utils import apply_patches

    ids = torch.arange(before + tokens)[None] % (model.config.get_text_config().vocab_size - 1)
    with torch.no_grad(), apply_patches("dynamo"):  # with them, windows keep all rows, as in the graph
        found = model(input_ids=ids[:, :before], use_cache=True)
    name = next((name for name in _CACHES if getattr(found, name, None) is not None), None)
    if name is None:
        raise NotCaptured(f"{type(model).__name__} gives no cache")
    cache = getattr(found, name)
    if name in _GIVEN and (whole := _without_windows(model, cache)) is not None:
        with torch.no_grad(), apply_patches("dynamo"):
            model(input_ids=ids[:, :before], use_cache=True, **{name: whole})
        cache = whole
    register_cache_pytrees_for_model(model)
    leaves = torch.utils._pytree.tree_leaves(cache)
    if odd := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]:
        raise NotCaptured(f"its cache has a {type(odd[0]).__name__} as well as tensors")
    places = {"position_ids": torch.arange(before, before + tokens)[None]} if placed else {}
    return Capture({"input_ids": ids[:, before:], **places, name: cache, "use_cache": True}, leaves)


def _without_windows(model: Any, cache: Any) -> Any:
    """Make a new cache whose windows keep all rows; None = it has no windows.

    The mask still leaves out what is beyond a window, and rejected rows can be cropped.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if type(cache) is not DynamicCache or not any(type(one) is DynamicSlidingWindowLayer for one in cache.layers):
        return None
    fresh = DynamicCache(config=model.config)
    fresh.layers = [DynamicLayer() if type(one) is DynamicSlidingWindowLayer else one for one in fresh.layers]
    return fresh


def free_axes(first: Capture, second: Capture) -> list[tuple[int, ...]]:
    """Name the axes of each tensor of the cache whose sizes follow from the text's length."""
    if [leaf.dim() for leaf in first.leaves] != [leaf.dim() for leaf in second.leaves]:
        raise NotCaptured("its cache has another form for another length of text")
    pairs = zip(first.leaves, second.leaves, strict=True)
    return [tuple(at for at in range(a.dim()) if a.shape[at] != b.shape[at]) for a, b in pairs]


def name_ports(program: Any, count: int) -> None:
    """Name the inputs and outputs of a captured graph: input_ids, position_ids, past.N, logits and present.N."""
    graph = program.graph
    given = [value for value in graph.inputs if value.name not in _FED]
    made = {value.name: value for value in graph.outputs}
    kept = {_inside(name): value for name, value in made.items()}
    present = [kept.get(_inside(value.name)) for value in given]
    if len(given) != count or None in present or "logits" not in made:
        names = [value.name for value in graph.inputs], sorted(made)
        raise NotCaptured(f"its graph has the inputs and outputs {names}; expected a cache of {count} tensors")
    for at, (past, after) in enumerate(zip(given, present, strict=True)):
        assert after is not None
        past.name, after.name = f"past.{at}", f"present.{at}"
    graph.outputs[:] = [made["logits"], *present]


def _inside(port: str) -> str:
    """Return the place of a tensor in a cache, which models and outputs call differently."""
    return port.removeprefix("input.").removeprefix("output.").partition(".")[2]


@contextmanager
def row_by_row_experts(model: Any) -> Iterator[None]:
    """Let mixtures of experts compute every row on its own, where they have such an implementation."""
    from transformers.exporters.exporter_onnx import use_experts_implementation

    with use_experts_implementation(model, _EXPERTS):
        yield


def keep_epsilons(model: Any) -> None:
    """Raise epsilons of norms that onnxscript takes for zero: it drops addends of at most 1e-8.

    Without one, a row of zeros, such as a padding token's embedding, becomes NaN.
    """
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(epsilon := getattr(module, name, None), float) and 0 < epsilon <= _LEAST:
                setattr(module, name, _LEAST * (1 + 1e-5))


def _free(axes: tuple[int, ...]) -> dict[int, Any]:
    import torch

    return dict.fromkeys(axes, torch.export.Dim.AUTO)


def _cache_name(inputs: Mapping[str, Any]) -> str:
    return next(name for name in inputs if name in _CACHES)


def main(model: str, folder: str) -> int:
    """Capture the checkpoint in a folder; returns the exit code, and says why on the error output."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        capture(loaded, Path(folder))
    except Exception as error:  # of any model's code
        cause = error
        while cause.__cause__ is not None:  # the exporter's own summary is long
            cause = cause.__cause__  # type: ignore[assignment]
        line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
        print(f"{type(cause).__name__}: {line}", file=sys.stderr)  # noqa: T201 - the protocol of this process
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
