"""DFlash drafters for tests: random checkpoints in the published layouts, and the arithmetic again in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.export.architectures import Architecture
from edgespec.runtimes.slots.slot import Slot
from tests.support.any_drafter import (
    Array,
    Recorder,
    attend,
    check_chains,
    random_tensors,
    rms,
    rotated,
    swiglu,
)  # fmt: skip
from tests.support.passes import run_layers

RANK = 32
TAPS, GROUP, CANDIDATES = 2, 8, 5  # of DFlash 2
HEADS, DIM, INNER, BLOCK, MASK, WINDOW, EPS, THETA = 4, 16, 96, 6, 2, 7, 1e-6, 1e4


def write_dflash(
    folder: Path,
    target: Architecture,
    layers: tuple[int, ...] = (0, 2),
    theirs: bool = False,
    agrees: bool = False,
    spark: bool = False,
    second: bool = False,
) -> Path:
    """Write a checkpoint with random weights for a target: a full layer and a sliding one.

    Args:
        folder: to make.
        target: the model that it is for.
        layers: of the target whose outputs are read.
        theirs: in transformers' layout.
        agrees: one sliding layer that guesses what the last tokens were.
        spark: with DSpark's heads, of which the one that corrects is weak, in SpecForge's layout.
        second: DFlash 2, with convolutions and a selector; as ``agrees`` needs it, weak ones.
    """
    folder.mkdir(parents=True)
    hidden, kinds = target.facts.hidden, ["full_attention", "sliding_attention"]
    keys = HEADS if agrees else 2
    kinds = kinds[1:] if agrees else kinds
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(layers) * hidden), "hidden_norm.weight": (hidden,),
                                          "norm.weight": (hidden,)}  # fmt: skip
    for layer in range(len(kinds)):
        for part, rows, columns in (("self_attn.q_proj", HEADS * DIM, hidden), ("self_attn.k_proj", keys * DIM, hidden),
                                    ("self_attn.v_proj", keys * DIM, hidden), ("self_attn.o_proj", hidden, HEADS * DIM),
                                    ("mlp.gate_proj", INNER, hidden), ("mlp.up_proj", INNER, hidden),
                                    ("mlp.down_proj", hidden, INNER)):  # fmt: skip
            shapes[f"layers.{layer}.{part}.weight"] = rows, columns
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.q_norm", DIM),
                           ("self_attn.k_norm", DIM)):  # fmt: skip
            shapes[f"layers.{layer}.{norm}.weight"] = (size,)
    tensors = random_tensors(shapes, 3)
    if agrees:
        for name in tensors:
            if len(tensors[name].shape) == 1:
                tensors[name][:] = 1
            elif name.endswith(("q_proj.weight", "down_proj.weight")):
                tensors[name][:] = 0
        same = np.eye(hidden, dtype=np.float32)
        mask = target.source.read(target.embedding, slice(MASK, MASK + 1))  # of which nothing is to be seen
        tensors["layers.0.self_attn.v_proj.weight"] = 4 * (same - mask.T @ mask / (mask @ mask.T))
        tensors["layers.0.self_attn.o_proj.weight"] = same
        tensors["fc.weight"] = np.concatenate([0 * same] * (len(layers) - 1) + [same], 1)
        tensors["norm.weight"] = target.source.read(target.final_norm.weight)
    config: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": INNER, "num_hidden_layers": len(kinds),
                              "num_attention_heads": HEADS, "num_key_value_heads": keys, "head_dim": DIM,
                              "rms_norm_eps": EPS, "rope_theta": THETA, "sliding_window": WINDOW,
                              "layer_types": kinds}  # fmt: skip
    blocks = {"target_layer_ids": list(layers), "mask_token_id": MASK, "block_size": BLOCK}
    if theirs:
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        tensors = {names.get(name, name): value for name, value in tensors.items()}
        config |= {"model_type": "muse_glimmer_assistant", **blocks}
    else:
        config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": blocks}
    if spark:
        vocab, random = target.facts.vocab, np.random.default_rng(4)
        for name, rows in (("w1", vocab), ("w2", vocab)):
            tensors[f"markov_head.markov_{name}.weight"] = 0.2 * random.standard_normal((rows, RANK), np.float32)
        tensors["confidence_head.proj.weight"] = 0.2 * random.standard_normal((1, hidden + RANK), np.float32)
        tensors["confidence_head.proj.bias"] = np.ones(1, np.float32)
        blocks |= {"projector_type": "dspark", "markov_rank": RANK, "confidence_head_with_markov": True}
    if second:
        tensors |= _of_the_second(len(kinds), hidden, target.facts.vocab, 0.02 if agrees else 0.4)
        config["architectures"] = ["DFlash2DraftModel"]
        blocks |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK,
                   "selector_top_k": CANDIDATES}  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _of_the_second(layers: int, hidden: int, vocab: int, much: float) -> dict[str, NDArray[np.float32]]:
    """Draw the tensors of DFlash 2; ``much``: how far convolutions are from doing nothing."""
    random, tensors = np.random.default_rng(5), dict[str, NDArray[np.float32]]()
    for layer in range(layers):
        for part in ("attention_conv", "mlp_conv"):
            base = much * random.standard_normal((2, TAPS, hidden), np.float32)
            base[:, 0] += 1
            own = random.standard_normal((2 * TAPS * hidden // GROUP, hidden), np.float32)
            tensors[f"layers.{layer}.{part}.base_kernel"] = base
            tensors[f"layers.{layer}.{part}.kernel_projection.weight"] = much * own * np.float32(hidden**-0.5)
    at = "candidate_selector."
    tensors[f"{at}hidden_projection.weight"] = random.standard_normal((RANK, hidden), np.float32) / np.float32(8)
    for name in ("predecessor", "successor"):
        tensors[f"{at}{name}_codebook"] = much * random.standard_normal((vocab, RANK), np.float32)
    return tensors


@dataclass
class BlockReference:
    """The arithmetic of a checkpoint; the rest are mistakes that others have made.

    Attributes:
        folder: the checkpoint.
        causal: a row of a block does not see those after it.
        normed: what was fused is normed again in each layer.
        short: a window that is one too narrow.
        early: positions of a block one too low.
        forward: taps of a convolution reach the row after instead of the one before.
        swapped: a row's summands of both convolutions, the other way round.
        anchored: the selector takes every guess to follow the pending token.
    """

    folder: Path
    causal: bool = False
    normed: bool = False
    short: bool = False
    early: bool = False
    forward: bool = False
    swapped: bool = False
    anchored: bool = False

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text("utf-8"))
        names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
        read = load_file(self.folder / "model.safetensors").items()
        self.tensors = {names.get(name, name): value.astype(np.float64) for name, value in read}

    def hidden(self, taps: Array, block: Array) -> Array:
        """[B, H] after the last norm, of taps [n - 1, k * H] and embeddings of the block's rows [B, H]."""
        c = self._norm(taps @ self.tensors["fc.weight"].T, "hidden_norm")
        before, rows = len(taps), len(block)
        places = np.concatenate((np.arange(before), before + np.arange(rows) - self.early))
        x = block
        for layer, kind in enumerate(self.config["layer_types"]):
            at = f"layers.{layer}"
            h, given = self._norm(x, f"{at}.input_layernorm"), self._norm(c, f"{at}.input_layernorm")
            h, end = self._convolved(h, f"{at}.attention_conv")
            every = np.concatenate((given if self.normed else c, h))
            q = self._turned(h, f"{at}.self_attn.q", places[before:])
            k = self._turned(every, f"{at}.self_attn.k", places)
            v = (every @ self.tensors[f"{at}.self_attn.v_proj.weight"].T).reshape(len(every), -1, DIM)
            far = places[before:, None] - places
            unseen = far > (WINDOW - self.short if kind == "sliding_attention" else len(every))
            if self.causal:
                unseen |= far < 0
            x = x + end(attend(q, k, v, unseen) @ self.tensors[f"{at}.self_attn.o_proj.weight"].T)
            h, end = self._convolved(self._norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp_conv")
            x = x + end(swiglu(h, partial(self._mlp, at)))
        return self._norm(x, "norm")

    def _convolved(self, x: Array, name: str) -> tuple[Array, Callable[[Array], Array]]:
        """Convolve rows [B, H] -> what a part reads, and how what it gives is convolved; without taps both stay."""
        if f"{name}.base_kernel" not in self.tensors:
            return x, lambda y: y
        base = self.tensors[f"{name}.base_kernel"]  # [2, taps, H]
        own = (x @ self.tensors[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, TAPS, -1)

        def convolved(y: Array, side: int) -> Array:
            out = np.zeros_like(y)
            for tap in range(TAPS):
                taps = base[side, tap] + np.repeat(own[:, side ^ self.swapped, tap], GROUP, -1)
                shifted = np.zeros_like(y)
                if self.forward:
                    shifted[: len(y) - tap] = y[tap:]
                else:
                    shifted[tap:] = y[: len(y) - tap]
                out += taps * shifted
            return out

        return convolved(x, 0), lambda y: convolved(y, 1)

    def chosen(self, rows: Array, logits: Array, tokens: list[int], ids: NDArray[np.int64]) -> Array:
        """Give logits [n, size] by the selector: of rows [n, H], after ``tokens`` [n], of the tokens ``ids`` [size]."""
        read, found = self.tensors, np.empty_like(logits)
        for at, (row, before) in enumerate(zip(rows, tokens, strict=True)):
            pair = read["candidate_selector.predecessor_codebook"][tokens[0] if self.anchored else before]
            pair = pair * (read["candidate_selector.hidden_projection.weight"] @ row)
            best = np.argsort(-logits[at])[:CANDIDATES]
            scores = logits[at, best] + read["candidate_selector.successor_codebook"][ids[best]] @ pair
            found[at] = scores.min() - scores.std()  # of others, low but not so low that rounding errors look small
            found[at, best] = scores
        return found

    def _turned(self, x: Array, name: str, places: NDArray[np.int64]) -> Array:
        y = self._norm((x @ self.tensors[f"{name}_proj.weight"].T).reshape(len(x), -1, DIM), f"{name}_norm")
        return rotated(y, places[:, None] * THETA ** (-np.arange(DIM // 2) / (DIM // 2)))

    def _mlp(self, at: str, part: str) -> Array:
        return np.asarray(self.tensors[f"{at}.mlp.{part}_proj.weight"])

    def _norm(self, x: Array, name: str) -> Array:
        return rms(x, self.tensors[f"{name}.weight"], EPS)


def check_blocks(
    made: Recorder,
    reference: BlockReference,
    fresh: Slot,
    tapped: tuple[int, ...],
    head: Array,
    ids: NDArray[np.int64],
    least: int,
) -> None:
    """See ``check_chains``; ``tapped``: after how many layers, ``head``: [size, H], rows of the target's LM head."""

    second = "candidate_selector.successor_codebook" in reference.tensors

    def logits(slot: Slot, tokens: list[int], guesses: list[int]) -> Array:
        text = np.array(tokens[:-1], np.int64)
        slot.reserve(len(text))
        taps = np.concatenate([run_layers(slot, text, 0, 0, at) for at in tapped], -1).astype(np.float64)
        block = slot.embed(np.array([tokens[-1]] + [MASK] * len(guesses), np.int64)).astype(np.float64)
        rows = reference.hidden(taps, block)[1:]
        found: Array = rows @ head.T
        return reference.chosen(rows, found, [tokens[-1], *guesses][: len(rows)], ids) if second else found

    check_chains(made, logits, fresh, ids.tolist(), least)
