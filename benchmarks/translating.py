"""Time encoder-decoders of random weights and CTranslate2 in int8: sources, rows and whole texts.

    python -m benchmarks.translating nllb-600m --format int8 --threads 2 --sources 32,128 --pairs 5

All run interleaved in one process, with the same number of threads.  Figures by tokens of the source: ``read``: the
encoder, the keys and values of the memory, and the first token, which CTranslate2 does not separate; ``text``: that and
``--new`` tokens, greedy; ``batch``: eight such texts at once; ``rows``: our passes of each number of rows.  A ``token``
is the time of a text without reading, by its tokens.  CTranslate2 is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import alternate, conditions, ratio, show
from benchmarks.shapes import TRANSLATORS, write_shape
from edgespec.decoding.settings import Settings
from edgespec.decoding.target import BEST
from edgespec.engine.encoding import Source
from edgespec.engine.engine import Engine
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.options import LoadOptions

BATCH, BEFORE, ROWS = 8, 32, (1, 4, 8)
Runs = dict[str, Callable[[], object]]
Ids = NDArray[np.int64]


class Sources:
    """Random sources of a given number of tokens, always new, so that memories of earlier ones do not help."""

    def __init__(self, length: int, vocab: int) -> None:
        self._random, self._length, self._vocab = np.random.default_rng(0), length, vocab

    def __call__(self, count: int = 1) -> list[Ids]:
        return [self._random.integers(3, self._vocab, self._length) for _ in range(count)]


def ours(engine: Engine, start: int, sources: Sources, new: int) -> Runs:
    """Give what is timed of a bundle."""
    settings = Settings(method="ar", ignore_eos=True, batch=BATCH)

    def write(tokens: int, count: int) -> None:
        found = engine.generate_batch([Source.of(one, [start]) for one in sources(count)],
                                      settings.changed(max_new_tokens=tokens))  # fmt: skip
        assert all(len(one.tokens) == tokens for one in found)

    def alone(tokens: int) -> None:
        (one,) = sources()
        engine.generate(Source.of(one, [start]), settings.changed(max_new_tokens=tokens))

    slot = engine.open_slot(given=Source.of(sources()[0], [start]))
    assert BEST in slot.can
    slot.prefill([start] * BEFORE)

    def rows(count: int) -> Callable[[], object]:
        return lambda: slot.forward(np.arange(3, 3 + count), None, True)

    passes = {f"rows {count}": rows(count) for count in ROWS}
    return {"read": lambda: alone(1), "text": lambda: alone(new), "batch": lambda: write(new, BATCH), **passes}


def theirs(folder: Path, threads: int, sources: Sources, new: int) -> Runs:
    """Give what is timed of CTranslate2."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), compute_type="int8", inter_threads=1, intra_threads=threads)

    def write(tokens: int, count: int) -> None:
        found = translator.translate_batch(
            [[f"t{token}" for token in one] for one in sources(count)], beam_size=1, max_decoding_length=tokens,
            min_decoding_length=tokens, max_input_length=0, max_batch_size=count,
        )  # fmt: skip
        assert all(len(one.hypotheses[0]) >= tokens - 1 for one in found)

    return {"read": lambda: write(1, 1), "text": lambda: write(new, 1), "batch": lambda: write(new, BATCH)}


def converted(config: dict[str, Any], folder: Path) -> None:
    """Write a model of random weights of a shape as CTranslate2 has it, in int8."""
    import ctranslate2.converters.transformers as loaders
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    known = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **known)
    model = AutoModelForSeq2SeqLM.from_config(made, dtype=torch.float16).eval()
    kind = {"marian": "MarianMT", "m2m_100": "M2M100", "t5": "T5"}[config["model_type"]]
    spec = getattr(loaders, f"{kind}Loader")().get_model_spec(model)
    tokens = [f"t{token}" for token in range(spec.decoder.embeddings.weight.shape[0])]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "t0", "t1", "t2"
    spec.config.decoder_start_token = "t0"
    spec.validate()
    spec.optimize(quantization="int8")
    folder.mkdir()
    spec.save(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[name for name in TRANSLATORS if not name.startswith("whisper")])
    parser.add_argument("--folder", type=Path, help="where models are kept from run to run")
    parser.add_argument("--only-write", action="store_true", help="write the models into the folder alone")
    parser.add_argument("--format", choices=FORMATS, default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sources", default="32,128")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        config, beside = TRANSLATORS[arguments.shape], importlib.util.find_spec("ctranslate2") is not None
        bundle, other = folder / f"{arguments.shape}-{arguments.format}", folder / f"{arguments.shape}-ctranslate2"
        if not bundle.exists():
            write_shape(config, bundle, arguments.format, 512)
        if beside and not other.exists():
            converted(config, other)
        if not arguments.only_write:
            compare(bundle, other if beside else None, config, arguments)


def compare(bundle: Path, other: Path | None, config: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Time both, and print."""
    engine = Engine(Bundle.open(bundle, check=False), LoadOptions(threads=arguments.threads, budget="off"))
    found: dict[str, Any] = {}
    for length in (int(text) for text in arguments.sources.split(",")):
        sources = Sources(length, config["vocab_size"] - 1)
        every = {f"edgespec {name}": run for name, run in
                 ours(engine, config["decoder_start_token_id"], sources, arguments.new).items()}  # fmt: skip
        if other is not None:
            rival = theirs(other, arguments.threads, sources, arguments.new)
            every |= {f"ctranslate2 {name}": run for name, run in rival.items()}
        times = alternate(every, arguments.pairs, warm=1)  # type: ignore[arg-type]  # what they return is dropped
        for who in {name.split()[0] for name in every}:
            both = zip(times[f"{who} text"], times[f"{who} read"], strict=True)
            times[f"{who} token"] = [(text - read) / (arguments.new - 1) for text, read in both]
        found[str(length)] = {"milliseconds": {name: round(median(ms), 2) for name, ms in times.items()}}
        if other is not None:
            found[str(length)]["ctranslate2 / edgespec"] = {
                name: ratio(times[f"ctranslate2 {name}"], times[f"edgespec {name}"])
                for name in ("read", "token", "text", "batch")
            }
    how = {"shape": arguments.shape, "format": arguments.format, "new_tokens": arguments.new}
    show(conditions(threads=arguments.threads, **how) | {"sources": found})


if __name__ == "__main__":
    main()
