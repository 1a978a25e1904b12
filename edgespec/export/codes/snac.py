"""SNAC's decoder, built from only its weights (https://github.com/hubertsiuzdak/snac, arXiv 2410.14411).

Codes are as in Orpheus (https://github.com/canopyai/Orpheus-TTS, decoder.py and engine_class.py).

A frame is seven codes: one of the coarsest codebook, then the two and four of finer ones within its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.codes.graph import CodeGraph, Floats
from edgespec.export.emit.graph import FLOAT, INT64
from edgespec.runtimes.audio.spoken import WINDOW
from edgespec.runtimes.text.codec import TextCodec

PLACES = (0,), (1, 4), (2, 3, 5, 6)  # in a frame, of the codes of each codebook
STRIDES = 4, 2, 1  # steps that a code of each codebook stands for
DILATIONS = 1, 3, 9
EXPECTED = {"attn_window_size": None, "depthwise": True, "vq_strides": list(STRIDES)}  # of the codec of 24 kHz
NORMED = (".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1")
VOICES = ["tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe"]  # of the published English models
CODE, START, STOP = "<custom_token_10>", "<custom_token_1>", "<custom_token_2>"
BEGIN, END = ("<custom_token_3>",), ("<|eot_id|>", "<custom_token_4>", "<custom_token_5>", START)


def suits(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, which names no kind, belongs to a SNAC codec."""
    return "vq_strides" in config and "decoder_rates" in config


def noise_sizes(config: Mapping[str, Any]) -> list[int]:
    """Count the random numbers of each block of the decoder per frame."""
    steps = STRIDES[0] * np.cumprod(config["decoder_rates"])
    return [int(count) for count in steps] if config.get("noise", True) else []


def spoken(codec: TextCodec) -> dict[str, Any]:
    """Find the tokens around a text to speak, and the first code, by Orpheus' names of tokens.

    Raises:
        ExportError: the model has no such tokens.
    """
    known = codec.tokenizer.get_vocab(with_added_tokens=True)
    if lost := [word for word in (*BEGIN, *END, STOP, CODE) if word not in known]:
        raise ExportError(f"the model's tokenizer has no {lost[0]}: expected the tokens of Orpheus",
                          "give a model that writes codes of SNAC")  # fmt: skip
    begin, end = ([known[word] for word in words] for words in (BEGIN, END))
    return {"first": known[CODE], "begin": begin, "end": end, "stop": known[STOP], "voices": VOICES}


def write(graph: CodeGraph, config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the decoder; its ``config`` is the codec's own.

    Inputs: ``codes`` int64 [frames, 7], and where blocks add noise ``noise`` float32 [frames, N], of a standard normal
    distribution.  Output ``sound``: float32 [samples].

    Raises:
        UnsupportedModel: not the codec of three codebooks and no attention, which is the one of 24 kHz.
    """
    for name, value in EXPECTED.items():
        if config.get(name, value) != value:
            raise UnsupportedModel(f"a SNAC codec with {name} {config[name]}: expected {value}",
                                   "take the one of 24 kHz, hubertsiuzdak/snac_24khz")  # fmt: skip
    sizes, rates, places = noise_sizes(config), config["decoder_rates"], sum(map(len, PLACES))
    x = _latent(graph, graph.input("codes", INT64, ("frames", places)))
    if sizes:
        graph.input("noise", FLOAT, ("frames", sum(sizes)))
    x = _conv(graph, x, "decoder.model.0", grouped=True)
    x = _conv(graph, x, "decoder.model.1")
    for at, rate in enumerate(rates):
        name = f"decoder.model.{at + 2}.block."
        x = _upsampled(graph, _snake(graph, x, f"{name}0"), f"{name}1", rate)
        if sizes:
            x = _noisy(graph, x, f"{name}2", sum(sizes[:at]), sizes[at])
        for unit, dilation in enumerate(DILATIONS):
            x = _residual(graph, x, f"{name}{unit + 2 + bool(sizes)}.block.", dilation)
    x = _snake(graph, x, f"decoder.model.{len(rates) + 2}")
    x = _conv(graph, x, f"decoder.model.{len(rates) + 3}")
    graph.node("Reshape", [graph.node("Tanh", [x]), graph.shape(-1)], ["sound"])
    graph.output("sound", FLOAT, ("samples",))
    levels = len(graph.tensors("quantizer.quantizers.0.codebook.weight"))
    last = len(graph.tensors(f"decoder.model.{len(rates) + 2}.alpha")[0])
    working = 4 * WINDOW * STRIDES[0] * int(np.prod(rates)) * last
    sound = {"rate": config["sampling_rate"], "places": places, "noise": sum(sizes)}
    return {"size": places * levels, "working": working, "sound": sound}


def _latent(graph: CodeGraph, codes: str) -> str:
    """Add up the vectors of all codebooks' codes -> [1, channels, steps], the form of later sounds."""
    node, levels = graph.node, []
    for level, (places, stride) in enumerate(zip(PLACES, STRIDES, strict=True)):
        name = f"quantizer.quantizers.{level}"
        own = node("Reshape", [node("Gather", [codes, graph.shape(*places)], axis=1), graph.shape(-1)])
        rows = node("Gather", [graph.weight(f"{name}.codebook.weight"), own])  # [n, size of a code]
        columns = node("Unsqueeze", [node("Transpose", [rows], perm=[1, 0]), graph.shape(0)])
        x = node("Unsqueeze", [_conv(graph, columns, f"{name}.out_proj"), graph.shape(3)])
        levels.append(node("Reshape", [node("Expand", [x, graph.shape(1, 1, 1, stride)]), graph.shape(1, 0, -1)]))
    return node("Sum", levels)


def _residual(graph: CodeGraph, x: str, name: str, dilation: int) -> str:
    y = _conv(graph, _snake(graph, x, f"{name}0"), f"{name}1", grouped=True, dilation=dilation)
    return graph.node("Add", [x, _conv(graph, _snake(graph, y, f"{name}2"), f"{name}3")])


def _snake(graph: CodeGraph, x: str, name: str) -> str:
    """x + sin(alpha x)^2 / alpha (arXiv 2006.08195)."""
    alpha, node = graph.tensors(f"{name}.alpha"), graph.node
    sine = node("Sin", [node("Mul", [x, graph.weight(f"{name}.alpha")])])
    over = graph.constant(f"{name}.over", np.float32(1) / (alpha + np.float32(1e-9)))
    return node("Add", [x, node("Mul", [node("Mul", [sine, sine]), over])])


def _noisy(graph: CodeGraph, x: str, name: str, start: int, size: int) -> str:
    """x + noise W x: the same noise for all channels."""
    own = graph.node("Slice", ["noise", graph.shape(start), graph.shape(start + size), graph.shape(1)])
    noise = graph.node("Reshape", [own, graph.shape(1, 1, -1)])
    return graph.node("Add", [x, graph.node("Mul", [noise, _conv(graph, x, f"{name}.linear")])])


def _upsampled(graph: CodeGraph, x: str, name: str, rate: int) -> str:
    inputs, _ = _weights(graph, name)
    pad = -(-rate // 2)
    return graph.node("ConvTranspose", [x, *inputs], kernel_shape=[2 * rate], strides=[rate], pads=[pad, pad],
                      output_padding=[rate % 2])  # fmt: skip


def _conv(graph: CodeGraph, x: str, name: str, grouped: bool = False, dilation: int = 1) -> str:
    """Add a convolution that keeps the length; ``grouped``: each channel separately."""
    inputs, (outer, _, kernel) = _weights(graph, name)
    pad = (kernel - 1) * dilation // 2
    return graph.node("Conv", [x, *inputs], kernel_shape=[kernel], dilations=[dilation], pads=[pad, pad],
                      group=outer if grouped else 1)  # fmt: skip


def _weights(graph: CodeGraph, name: str) -> tuple[list[str], tuple[int, ...]]:
    """Add weight and, if it has one, bias of a convolution -> their names, and the weight's shape."""
    weight = _folded(graph, name)
    found = [graph.constant(f"{name}.weight", weight)]
    if f"{name}.bias" in graph.tensors:
        found.append(graph.weight(f"{name}.bias"))
    return found, weight.shape


def _folded(graph: CodeGraph, name: str) -> Floats:
    """Read a weight, multiplied by its weight norm (arXiv 1602.07868), under the names of any torch version."""
    for norm, direction in NORMED:
        if name + norm in graph.tensors:
            weight = graph.tensors(name + direction)
            length = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=(1, 2), keepdims=True))
            return np.asarray(weight * (graph.tensors(name + norm) / length), np.float32)
    return graph.tensors(f"{name}.weight")
