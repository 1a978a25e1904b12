"""Compute what the authors' code makes of codes of speech, for the tests (tests/support/snac.py).

Needs torch, einops, and checkouts of https://github.com/hubertsiuzdak/snac and https://github.com/canopyai/Orpheus-TTS:
python tools/make_snac_reference.py SNAC ORPHEUS
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edgespec.export.codes.snac import noise_sizes
from edgespec.runtimes.audio.spoken import frame_noise
from tests.support.snac import ARCHIVE, CONFIG, PLACES, codes, weights


class Noise:
    """Gives ``torch.randn`` the numbers that edgespec draws, window by window."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, shape: tuple[int, ...], **_: Any) -> Any:
        sizes = noise_sizes(CONFIG)
        window, block = divmod(self.calls, len(sizes))
        self.calls += 1
        drawn = frame_noise(0, window, shape[2] // sizes[block], sum(sizes))
        own = drawn[:, sum(sizes[:block]) : sum(sizes[: block + 1])]
        return torch.from_numpy(own.reshape(shape).copy())


async def heard(frames: Any) -> list[Any]:
    """Let Orpheus' own code stream the sound of frames."""

    async def tokens() -> AsyncIterator[str]:
        for at, code in enumerate(frames.reshape(-1)):
            yield f"<custom_token_{10 + at % PLACES * 4096 + code}>"

    pieces = import_module("decoder").tokens_decoder(tokens())
    return [np.frombuffer(piece, np.int16) async for piece in pieces]


def main(snac: str, orpheus: str) -> None:
    torch.set_num_threads(1)
    sys.path[:0] = [snac, f"{orpheus}/orpheus_tts_pypi/orpheus_tts"]
    authors: Any = import_module("snac").SNAC
    model = authors(**CONFIG).eval()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if "encoder" not in name}
    model.load_state_dict({name: torch.from_numpy(made) for name, made in weights(shapes).items()}, strict=False)
    frames = codes()
    levels = [frames[:, :1], frames[:, [1, 4]], frames[:, [2, 3, 5, 6]]]
    torch.randn = Noise()
    with torch.inference_mode():
        sound = model.decode([torch.from_numpy(one.reshape(1, -1)) for one in levels]).numpy().reshape(-1)
    print(f"{len(sound)} samples of {sound.std():.2f}, of {len(shapes)} tensors")
    authors.from_pretrained = lambda name: model
    torch.randn = Noise()
    tensors = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    np.savez_compressed(ARCHIVE, tensors=tensors, sound=sound[::8], heard=np.stack(asyncio.run(heard(frames))))


main(*sys.argv[1:])
