"""Rows of images in a text: equal to transformers', in whatever pieces they are read, and found again by their ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.text import INSERTED
from edgespec.errors import InvalidRequest
from edgespec.export.architectures.rope import axes_of
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.slots.inserted import Inserted
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import BatchPass, NativeBatch
from edgespec.runtimes.slots.shared import Model
from tests.runtimes.files.test_images import IMAGE
from tests.support.c_interface import F32, Native

pytestmark = pytest.mark.usefixtures("native")
HIDDEN, VOCAB = 64, 96
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SECTION, DEEP = [4, 2, 2], 2  # layers behind which more is added to rows of images
GRID = 3, 5  # lines and columns of an image


def image(seed: int, grid: bool) -> Inserted:
    columns = (1 + DEEP if grid else 1) * HIDDEN
    rows = np.random.default_rng(seed).standard_normal((GRID[0] * GRID[1], columns)).astype(np.float32)
    places = np.stack(np.divmod(np.arange(len(rows)), GRID[1])) if grid else None
    return Inserted(bytes([seed] * 32), rows, (10, 5), places)


@dataclass
class Case:
    """A model that reads images, a text with three of them, and transformers' logits."""

    model: Model
    images: list[Inserted]
    tokens: list[int]
    logits: Any  # [n, vocab]


def text_of(images: list[Inserted]) -> list[int]:
    return [5, 6, 7, *images[0].tokens, 8, *images[1].tokens, *images[0].tokens, *range(20, 41)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    pytest.importorskip("transformers", reason="transformers is not installed")
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def write(folder: Path, name: str) -> Case:
    import torch

    torch.manual_seed(0)
    images = [image(seed, name == "grid") for seed in (1, 2)]
    tokens = text_of(images)
    model = {"plain": llama, "grid": qwen, "blocks": gemma, "states": lfm}[name](folder)
    arch = open_model(folder, None)
    arch.inserts = images[0].rows.shape[1]
    if name == "grid":
        rope = arch.rotaries["rope"]
        arch.rotaries = {"rope": replace(rope, axes=axes_of(rope.parameters, rope.dims))}
    (folder / "bundle").mkdir()
    part = write_model(folder / "bundle", arch, ModelSpec("fp32")).part
    about = ImagePart.model_validate(IMAGE | {"bidirectional": name == "blocks", "taps": []})
    part = part.model_copy(update={"image": about})
    native = Model(folder / "bundle", part, "native", 2, ATTENTION["f32"])
    native.inserted.hold(images)
    with torch.no_grad():
        x = model.get_input_embeddings()(torch.tensor([[min(token, VOCAB - 1) for token in tokens]]))
        at = 0
        for token, one in ((token, one) for token in tokens for one in images if token >= INSERTED):
            if one.first <= token < one.first + len(one.rows):
                x[0, tokens.index(token, at)] = torch.from_numpy(one.rows[token - one.first, :HIDDEN])
                at = tokens.index(token, at) + 1
        logits = model(inputs_embeds=x, **about_text(name, tokens, images)).logits[0]
    return Case(native, images, tokens, logits.numpy())


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(SIZES | config), "utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def llama(folder: Path) -> Any:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()
    save(folder, {"model_type": "llama", "tie_word_embeddings": False}, model.state_dict())
    return model


def qwen(folder: Path) -> Any:
    import torch
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTION, "mrope_interleaved": True}
    text = theirs.Qwen3VLTextModel(theirs.Qwen3VLTextConfig(**SIZES, rope_parameters=rope)).eval()
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    tensors = {f"model.{name}": tensor for name, tensor in text.state_dict().items()}
    config = {"model_type": "qwen3_vl_text", "tie_word_embeddings": False, "rope_parameters": rope,
              "rms_norm_eps": 1e-6}  # fmt: skip
    save(folder, config, tensors | {"lm_head.weight": head.weight.detach()})

    class Whole:
        def get_input_embeddings(self) -> Any:
            return text.get_input_embeddings()

        def __call__(self, **how: Any) -> Any:
            found = text(**how)
            found.logits = head(found.last_hidden_state)
            return found

    return Whole()


def gemma(folder: Path) -> Any:
    import transformers

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    how = {**SIZES, "sliding_window": 24, "layer_types": kinds, "query_pre_attn_scalar": 16}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**how)).eval()
    config = {"model_type": "gemma3_text", **{key: how[key] for key in how if key not in SIZES}, "rms_norm_eps": 1e-6}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save(folder, config | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, tensors)
    return model


def lfm(folder: Path) -> Any:
    import transformers

    how = {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
           "conv_L_cache": 3, "tie_word_embeddings": False}  # fmt: skip
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**how)).eval()
    save(folder, {"model_type": "lfm2", "block_ff_dim": 96, "rope_theta": 1e6, **how}, model.state_dict())
    return model


def about_text(name: str, tokens: list[int], images: list[Inserted]) -> dict[str, Any]:
    """Say how rows see each other, or where they stand, as transformers is told it."""
    import torch

    n = len(tokens)
    if name == "grid":
        places, at, start = np.zeros((3, 1, n), np.int64), 0, 0
        for i, token in enumerate(tokens):
            if token < INSERTED:
                places[:, 0, i], at = at, at + 1
                continue
            row = (token - INSERTED) % (1 << 14)
            start = at if row == 0 else start
            places[:, 0, i] = start, start + row // GRID[1], start + row % GRID[1]
            at = start + max(GRID) if row == GRID[0] * GRID[1] - 1 else at
        more = np.concatenate([images[number].rows[:, HIDDEN:] for number in (0, 1, 0)])
        return {
            "position_ids": torch.from_numpy(places),
            "visual_pos_masks": torch.tensor([[token >= INSERTED for token in tokens]]),
            "deepstack_visual_embeds": [torch.from_numpy(part) for part in np.split(more, DEEP, axis=1)],
        }
    if name != "blocks":
        return {}
    block, number = np.zeros(n), 0
    for k, token in enumerate(tokens):
        number += token >= INSERTED and (token - INSERTED) % (1 << 14) in (0, 10)
        block[k] = number if token >= INSERTED else -k
    back = np.arange(n)[:, None] - np.arange(n)  # how far
    same = block[:, None] == block
    masks = {"full_attention": (back >= 0) | same, "sliding_attention": ((back >= 0) & (back < 24)) | same}
    floats = {key: np.where(seen, 0, -1e30).astype(np.float32)[None, None] for key, seen in masks.items()}
    return {"attention_mask": {key: torch.from_numpy(mask) for key, mask in floats.items()}}


KINDS = ["plain", "grid", "blocks", "states"]


def last(case: Case, slot: NativeSlot) -> Any:
    """Run the last 20 tokens as a pass -> logits, a copy."""
    return slot.forward(np.array(case.tokens[-20:])).logits.copy()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_images_give_transformers_logits_in_whatever_pieces(cases: Callable[[str], Case], kind: str) -> None:
    case, kept = cases(kind), []
    wanted = case.logits[-20:]
    for chunk in (128, 7, 16):
        slot = NativeSlot(case.model, reserve=1)
        slot.chunk = chunk
        slot.prefill(case.tokens[:-20])
        kept.append(last(case, slot))
        np.testing.assert_allclose(kept[-1], wanted, atol=2e-4, rtol=0)
        # a text that goes back into an image, to the beginning, and is read on
        for length in (9, 25, 40):
            slot.crop(length)
            slot.prefill(case.tokens[length:-20])
            np.testing.assert_array_equal(last(case, slot), kept[0])
    known, at = slot.tokens, np.array([3, 18, 34, len(slot.tokens)])  # beginnings, that some tokens continue
    for row, length in zip(slot.forward_hypotheses(np.arange(4), at, np.full(4, -1)).logits.copy(), at, strict=True):
        other = NativeSlot(case.model, reserve=1)
        other.prefill(known[:length])
        np.testing.assert_array_equal(row, other.forward(np.array([list(at).index(length)])).logits[0])
    batch = NativeBatch(case.model, 2)
    for one in batch.slots:
        one.prefill(case.tokens[:-20])
    passes = batch.forward([BatchPass(one, np.array(case.tokens[-20:])) for one in batch.slots])
    for output in passes:
        np.testing.assert_array_equal(output.logits, kept[0])
    batch.close()
    tree = slot.forward(np.array([case.tokens[-20], 1, case.tokens[-19]]), np.array([-1, 0, 0])).logits
    np.testing.assert_array_equal(tree[[0, 2]], kept[0][:2])
    np.testing.assert_array_equal(slot.embed(np.array(case.tokens[3:6])), case.images[0].rows[:3, :HIDDEN])


def test_an_image_that_nobody_holds_and_a_draft_that_knows_none(cases: Callable[[str], Case]) -> None:
    case = cases("plain")
    slot, other = NativeSlot(case.model, reserve=1), image(9, False)
    with pytest.raises(InvalidRequest, match="not there"):
        slot.prefill(other.tokens)
    slot.crop(0)
    case.model.inserted.hold([other])
    slot.prefill(other.tokens)
    same = replace(other, digest=other.digest[:6] + bytes(26))
    with pytest.raises(InvalidRequest, match="same number"):
        case.model.inserted.hold([same])
    case.model.inserted.let_go([other])


def test_the_c_interface_reads_texts_of_a_model_of_images(cases: Callable[[str], Case]) -> None:
    model, text = cases("grid").model, list(range(5, 30))
    slot = NativeSlot(model, reserve=1)
    slot.prefill(text)
    with Native(model.folder / model.graph.file, attention=F32) as native:
        native.prefill(text)
        np.testing.assert_array_equal(native.forward([1, 2]).logits, slot.forward(np.array([1, 2])).logits)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            native.forward([-1])
