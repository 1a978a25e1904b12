"""Run whisper.cpp as a library for the Whisper benchmark: a model of random weights in its layout.

Names and order of the file are those that its ``models/convert-h5-to-ggml.py`` writes: eleven numbers, mel filters,
words, then tensors with their names.  Built by::

    cmake -B build -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON && cmake --build build -j --target whisper whisper-quantize
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MAGIC, BINS = 0x67676D6C, 201
TYPES = {"int8": "q8_0", "int4": "q4_0"}
INNER = {
    "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0",
    "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
}  # fmt: skip
OUTER = {
    "encoder.layer_norm": "encoder.ln_post", "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.layer_norm": "decoder.ln", "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.embed_tokens": "decoder.token_embedding",
}  # fmt: skip


def tensors(model: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Give the tensors of transformers' Whisper by whisper.cpp's names."""
    for name, value in model.model.state_dict().items():
        if match := re.fullmatch(r"(\w+)\.layers\.(\d+)\.(.*)\.(\w+)", name):
            side, layer, inner, end = match.groups()
            named = f"{side}.blocks.{layer}.{INNER[inner]}.{end}"
        else:
            named = next(
                (name.replace(theirs, ours, 1) for theirs, ours in OUTER.items() if name.startswith(theirs)), name
            )
        yield named, value.float().numpy()


def write_model(file: BinaryIO, model: Any) -> None:
    """Write a model in float16, without words."""
    told = model.config
    file.write(struct.pack(
        "14i", MAGIC, told.vocab_size, told.max_source_positions, told.d_model, told.encoder_attention_heads,
        told.encoder_layers, told.max_target_positions, told.d_model, told.decoder_attention_heads,
        told.decoder_layers, told.num_mel_bins, 1, told.num_mel_bins, BINS,
    ))  # fmt: skip
    file.write(bytes(4 * told.num_mel_bins * BINS) + struct.pack("i", 0))
    for name, value in tensors(model):
        whole = value.ndim < 2 or name.endswith("positional_embedding")
        if re.fullmatch(r"encoder\.conv\d\.bias", name):
            value = value[:, None]
        file.write(struct.pack("3i", value.ndim, len(name), int(not whole)))
        file.write(struct.pack(f"{value.ndim}i", *value.shape[::-1]) + name.encode())
        file.write(value.astype(np.float32 if whole else np.float16).tobytes())


def runs(
    build: Path, model: Any, folder: Path, form: str, threads: int, features: NDArray[np.float32],
    asked: tuple[list[int], int, int],
) -> dict[str, Callable[[], None]]:  # fmt: skip
    """Return the timed functions: ``encoder`` with the memory, ``rows N`` after tokens, ``text`` after an encoder.

    Args:
        build: folder that cmake built in.
        asked: what a text begins with, its tokens beyond that, and tokens before ``rows N``.
    """
    begin, written, before = asked
    folder.mkdir()
    with (folder / "f16.bin").open("wb") as file:
        write_model(file, model)
    made = folder / "model.bin"
    subprocess.run([build / "bin" / "whisper-quantize", folder / "f16.bin", made, TYPES[form]], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    library = ctypes.CDLL(str(build / "bin" / "libwhisper.so"))
    library.whisper_init_from_file.restype = ctypes.c_void_p
    library.whisper_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    context = ctypes.c_void_p(library.whisper_init_from_file(str(made).encode()))
    assert context.value, "whisper.cpp cannot read the model"
    mels, vocab = np.ascontiguousarray(features.T), model.config.vocab_size
    assert not library.whisper_set_mel(context, mels.ctypes.data_as(ctypes.c_void_p), len(features), len(mels))

    def encode() -> None:
        assert not library.whisper_encode(context, 0, threads)

    def decode(tokens: list[int], past: int) -> None:
        assert not library.whisper_decode(context, (ctypes.c_int * len(tokens))(*tokens), len(tokens), past, threads)

    def text() -> None:
        tokens = list(begin)
        decode(tokens, 0)
        for _ in range(written - 1):
            row = np.ctypeslib.as_array(library.whisper_get_logits(context), (vocab,))
            tokens.append(int(row.argmax()))
            decode(tokens[-1:], len(tokens) - 1)

    encode()
    decode(list(range(before)), 0)
    passes = {f"rows {count}": lambda count=count: decode(list(range(count)), before) for count in (1, 4, 8)}
    return {"encoder": encode, **passes, "text": text}
