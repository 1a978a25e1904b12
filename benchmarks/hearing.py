"""Time a Whisper of random weights, CTranslate2 and transformers: features, encoder, memory and decoder rows.

    python -m benchmarks.hearing small --format int8 --threads 2 --pairs 5

30 s of sound.  All run interleaved in one process, with the same number of threads.  ``features``: log-mel of 30 s;
``encoder``: all of its rows; ``fill``: keys and values of the memory; ``rows``: a pass of each number of rows with 64
tokens before them; ``text``: 32 tokens, greedy, after the encoder's rows.  CTranslate2 (int8) and transformers
(float32) are left out if they are not installed.  The ``encoder`` of whisper.cpp and onnxruntime-genai also makes the
memory (for the latter also the first token), and their ``text`` begins after it, so the comparison includes the same
parts.  In a pass of several rows, whisper.cpp returns only the logits of the last one.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import alternate, conditions, ratio, show
from benchmarks.rivals import genai, whisper_cpp
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.runtimes.audio.features import WINDOW_SAMPLES, encoder_rows, log_mel
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.encoder import EncodedSources, Encoder
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model

SHAPES: dict[str, tuple[int, int, int, int]] = {  # width, layers of encoder and decoder, bands
    "micro": (64, 2, 2, 80),
    "tiny": (384, 4, 4, 80),
    "base": (512, 6, 6, 80),
    "small": (768, 12, 12, 80),
    "medium": (1024, 24, 24, 80),
    "large-v3-turbo": (1280, 32, 4, 128),
}
VOCAB, START, WRITTEN, BEFORE = 51_866, [50_258, 50_259, 50_360, 50_364], 32, 64
Runs = dict[str, Callable[[], None]]


def made(shape: str) -> Any:
    """Make transformers' model of a shape."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, encoder, decoder, bands = SHAPES[shape]
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=bands, d_model=width, encoder_layers=encoder, decoder_layers=decoder,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, suppress_tokens=None, begin_suppress_tokens=None, forced_decoder_ids=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def ours(folder: Path, source: Path, form: Any, threads: int, features: NDArray[np.float32]) -> Runs:
    """Write the model as a bundle's, and give what is timed."""
    arch = open_model(source, None)
    folder.mkdir()
    part = write_model(folder, arch, ModelSpec(form)).part
    assert part.encoder is not None
    assert part.source is not None
    assert part.source.features is not None
    encoder, model = Encoder(Model(folder, part.encoder, NATIVE, threads)), Model(folder, part, NATIVE, threads)
    memories, slot = EncodedSources(model, 2), open_slot(model)
    assert isinstance(slot, NativeSlot)
    given = encoder_rows(features, part.source.features)
    heard = encoder.encode(given)
    number = [0]

    def fill() -> None:
        number[0] += 1
        slot.attend(memories.fill(heard, str(number[0]).encode()))

    def rows(count: int) -> Callable[[], None]:
        tokens = np.arange(count, dtype=np.int64)

        def run() -> None:
            slot.crop(0)
            slot.prefill(list(range(BEFORE)))
            slot.forward(tokens)

        return run

    def prefilled() -> None:
        slot.crop(0)
        slot.prefill(list(range(BEFORE)))

    def text() -> None:
        fill()
        tokens = list(START)
        slot.prefill(tokens[:-1])
        for _ in range(WRITTEN):
            best = slot.forward(np.array(tokens[-1:], np.int64)).logits[0].argmax()
            slot.keep([0])
            tokens.append(int(best))

    fill()
    passes = {f"rows {count}": rows(count) for count in (1, 4, 8)}
    return {"encoder": lambda: discard(encoder.encode(given)), "fill": fill, "prefill": prefilled, **passes,
            "text": text}  # fmt: skip


def transformers_runs(model: Any, threads: int, features: NDArray[np.float32]) -> Runs:
    """Give what is timed of transformers, in float32."""
    import torch

    torch.set_num_threads(threads)
    given = torch.from_numpy(features.T[None].copy())
    with torch.no_grad():
        heard = model.model.encoder(given)

    def encode() -> None:
        with torch.no_grad():
            model.model.encoder(given)

    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # by its version

    def text() -> None:
        from transformers.modeling_outputs import BaseModelOutput

        cache, tokens = None, torch.tensor([START])
        with torch.no_grad():
            for _ in range(WRITTEN):
                given = {"encoder_outputs": BaseModelOutput(heard.last_hidden_state), "decoder_input_ids": tokens}
                out = model(**given, use_cache=True, **{kept: cache})
                cache, tokens = getattr(out, kept), out.logits[:, -1:].argmax(-1)

    return {"encoder": encode, "text": text}


def ctranslate2_runs(model: Any, folder: Path, threads: int, features: NDArray[np.float32]) -> Runs:
    """Convert the model to CTranslate2's int8, and give what is timed."""
    import ctranslate2
    from ctranslate2.converters.transformers import WhisperLoader

    spec = WhisperLoader().get_model_spec(model)
    special = {50_257: "endoftext", 50_258: "startoftranscript", 50_259: "en", 50_360: "transcribe", 50_363: "nospeech",
               50_364: "notimestamps"}  # fmt: skip
    spec.register_vocabulary([f"<|{special[token]}|>" if token in special else f"w{token}" for token in range(VOCAB)])
    spec.config.suppress_ids, spec.config.suppress_ids_begin = [], []
    spec.config.lang_ids, spec.config.alignment_heads = [50_259], [(0, 0)]
    spec.validate()
    spec.optimize(quantization="int8")
    folder.mkdir()
    spec.save(str(folder))
    whisper = ctranslate2.models.Whisper(str(folder), compute_type="int8", intra_threads=threads)
    given = ctranslate2.StorageView.from_array(features.T[None].copy())
    heard = whisper.encode(given)

    def text() -> None:
        found = whisper.generate(heard, [START], beam_size=1, max_length=len(START) + WRITTEN, suppress_blank=False,
                                 suppress_tokens=[])  # fmt: skip
        assert found

    return {"encoder": lambda: discard(whisper.encode(given)), "text": text}


def discard(_: Any) -> None:
    """Take a result, so that it was waited for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--format", choices=FORMATS, default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--whisper-cpp", type=Path, help="folder that it was built in (benchmarks/rivals/whisper_cpp.py)"
    )
    parser.add_argument("--genai", type=Path, help="Python that has onnxruntime-genai (benchmarks/rivals/genai.py)")
    arguments = parser.parse_args()
    sound = np.asarray(np.random.default_rng(0).standard_normal(WINDOW_SAMPLES) / 8, np.float32)
    features = log_mel([sound], SHAPES[arguments.shape][3])
    model = made(arguments.shape)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder / "source")
        runs = ours(folder / "bundle", folder / "source", arguments.format, arguments.threads, features)
        others = {"transformers": transformers_runs(model, arguments.threads, features)}
        if importlib.util.find_spec("ctranslate2") is not None:
            others["ctranslate2"] = ctranslate2_runs(model, folder / "ct2", arguments.threads, features)
        if arguments.whisper_cpp:
            others["whisper.cpp"] = whisper_cpp.runs(arguments.whisper_cpp, model, folder / "ggml", arguments.format,
                                                     arguments.threads, features, (START, WRITTEN, BEFORE))  # fmt: skip
        if arguments.genai:
            kept, how = (folder / "source", folder / "genai"), (arguments.format, arguments.threads)
            others["onnxruntime-genai"] = genai.runs(arguments.genai, *kept, *how, features, (START, WRITTEN))
        every = {f"edgespec {name}": run for name, run in runs.items()} | {
            f"{who} {name}": run for who, each in others.items() for name, run in each.items()
        }
        every["edgespec features"] = lambda: discard(log_mel([sound], features.shape[1]))
        times = alternate(every, arguments.pairs, warm=1)
    before = median(times.pop("edgespec prefill"))
    figures = {name: round(median(found), 2) for name, found in times.items()}
    for count in (1, 4, 8):
        figures[f"edgespec rows {count}"] = round(figures[f"edgespec rows {count}"] - before, 2)
    ratios = {}
    for who in others:
        for name in ("encoder", "text"):  # our rows include the parts before them
            more = {"encoder": 1, "text": -1}[name] * (who in ("whisper.cpp", "onnxruntime-genai"))
            mine = [
                own + more * fill for own, fill in zip(times[f"edgespec {name}"], times["edgespec fill"], strict=True)
            ]
            ratios[f"{who} / edgespec, {name}"] = ratio(times[f"{who} {name}"], mine)
    show({"conditions": conditions(threads=arguments.threads, shape=arguments.shape, format=arguments.format),
          "milliseconds": figures, "ratios": ratios})  # fmt: skip


if __name__ == "__main__":
    main()
