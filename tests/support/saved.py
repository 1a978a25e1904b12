"""Checkpoints as transformers writes them, without transformers.

tests/data/reference has an archive for each model type (tools/make_reference_logits.py makes them), with the arrays
NAME/KEY of each of its configurations.  In addition to the reference's logits there are two JSON texts: ``memory``, the
names and shapes of tensors as a model has them, and ``saved``, the config.json, the generation_config.json and the
names and shapes of tensors that ``save_pretrained`` of the reference version of transformers writes.  Experts are
saved one by one, modules are renamed, configurations are written out.  ``saved_tensors`` brings weights into that
form.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.support.zoo import CASES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE = Path(__file__).parents[1] / "data" / "reference"

Array = NDArray[Any]
Shapes = dict[str, tuple[int, ...]]


def archive(name: str) -> Path:
    """Name the file with the reference of a configuration."""
    return REFERENCE / f"{CASES[name].config['model_type']}.npz"


@cache
def arrays_of(file: Path, name: str) -> dict[str, Array]:
    """Read all arrays of a case of an archive, by their names without its own."""
    with np.load(file) as arrays:
        return {key.split("/")[1]: arrays[key] for key in arrays.files if key.startswith(f"{name}/")}


def form_of(file: Path, name: str) -> dict[str, Any]:
    """Give ``config`` and ``tensors``, lists of sizes by name, of a case of an archive as transformers saves it."""
    found: dict[str, Any] = json.loads(arrays_of(file, name)["saved"].tobytes())
    return found


def write_archive(file: Path, cases: Iterable[str], reference: Callable[[str], dict[str, Any]]) -> None:
    """Write the arrays that ``reference`` makes of each case, with ``logits`` and ``greedy`` among them.

    Those of other cases stay.
    """
    found: dict[str, Array] = {}
    if file.exists():
        with np.load(file) as old:
            found = {key: old[key] for key in old.files}
    for name in cases:
        arrays = reference(name)
        found |= {f"{name}/{key}": value for key, value in arrays.items()}
        print(f"{name}: logits of {arrays['logits'].std():.2f}, {len(set(arrays['greedy'].tolist()))} tokens")  # noqa: T201
    np.savez_compressed(file, allow_pickle=False, **found)


def reference_arrays(name: str) -> dict[str, Array]:
    """Read all arrays of a configuration's reference, by their names without its own."""
    return arrays_of(archive(name), name)


def text_array(value: dict[str, Any]) -> Array:
    """Turn a JSON object into an array."""
    return np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)


@cache
def kept(name: str, key: str) -> dict[str, Any]:
    """Read one of the JSON texts, ``memory`` or ``saved``, of a configuration."""
    found: dict[str, Any] = json.loads(reference_arrays(name)[key].tobytes())
    return found


def saved(name: str) -> dict[str, Any]:
    """Give ``config``, ``generation_config`` and ``tensors``, lists of sizes by name, of a configuration as saved."""
    return kept(name, "saved")


def names_differ(name: str, in_memory: Shapes) -> bool:
    """Whether a configuration's tensors are saved by other names than they have in memory."""
    return saved(name)["tensors"].keys() != in_memory.keys()


RENAMED = (  # in memory, saved
    (r"^lm_head\.", "embed_out."),  # of gpt_neox
    (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
    (r"\.block_sparse_moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
    (r"\.block_sparse_moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
    (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
    (r"\.input_layernorm\.", ".attention_layer_norm."),  # of olmo_hybrid, as the next
    (r"\.post_attention_layernorm\.", ".feedforward_layer_norm."),
)
"""Modules that are saved by another name, where the name in memory is not saved."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
CONVOLUTION = re.compile(r"(.*\.linear_attn)\.([qkv])_conv1d\.weight")


def saved_tensors(name: str, made: dict[str, Array]) -> dict[str, Array]:
    """Weights by the names, and in the shapes, in which transformers saves them.

    Args:
        name: of ``hf.CONFIGS``.
        made: the weights by their names in memory.

    Raises:
        AssertionError: a tensor that is saved in a way unknown here, or one that is left over.
    """
    shapes: Shapes = {tensor: tuple(shape) for tensor, shape in saved(name)["tensors"].items()}
    used: set[str] = set()

    def take(source: str) -> Array:
        used.add(source)
        return made[source]

    found: dict[str, Array] = {}
    for tensor, shape in shapes.items():
        found[tensor] = _one(tensor, made, take, shapes)
        assert found[tensor].shape == shape, f"{tensor}: {found[tensor].shape}, but {shape} is saved"
    assert used == made.keys(), f"not saved: {sorted(made.keys() - used)}"
    return found


def _one(tensor: str, made: dict[str, Array], take: Callable[[str], Array], shapes: Shapes) -> Array:
    """Make a saved tensor, of those in memory."""
    if tensor in made:
        return take(tensor)
    if expert := EXPERT.fullmatch(tensor):
        group, number, part = expert[1], int(expert[2]), expert[3]
        if part in ("down_proj", "w2"):
            return take(f"{group}.down_proj")[number]
        gate, up = np.split(take(f"{group}.gate_up_proj")[number], 2)
        return gate if part in ("gate_proj", "w1") else up
    if convolution := CONVOLUTION.fullmatch(tensor):
        sizes = [shapes[f"{convolution[1]}.{part}_conv1d.weight"][0] for part in "qkv"]
        pieces = np.split(take(f"{convolution[1]}.conv1d.weight"), np.cumsum(sizes)[:-1])
        return pieces["qkv".index(convolution[2])]
    for memory, disk in RENAMED:
        for source in made:
            if source not in shapes and re.sub(memory, disk, source) == tensor:
                return take(source)
    raise AssertionError(f"{tensor}: is saved, and nothing here says of what it is made")


def described(folder: Path) -> dict[str, Any]:
    """Give what ``saved`` holds, of a checkpoint in one file that transformers has just written."""
    read = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("config", "generation_config")}
    return {**read, "tensors": shapes_of(folder)}


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Give the sizes of the tensors of a checkpoint in one file, by their names in order."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def new_model(config: dict[str, Any], dtype: str) -> PreTrainedModel:
    """Make a model of transformers with random weights; needs torch and transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=getattr(torch, dtype)
    )
    return made.eval()


def save(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Give what ``save_pretrained`` of the installed transformers writes of a configuration."""
    with tempfile.TemporaryDirectory() as folder:
        new_model(config, dtype).save_pretrained(folder)
        return described(Path(folder))
