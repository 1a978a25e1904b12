"""A picture to its first tokens: models of published shapes and random weights, in turns beside llama.cpp's libmtmd.

    python -m benchmarks.seeing SmolVLM2-500M FOLDER --write --llama LLAMA
    g++ -O2 -std=c++17 benchmarks/rivals/mtmd.cpp -I LLAMA/include -I LLAMA/ggml/include -I LLAMA/tools/mtmd \\
        LIBRARIES -o mtmd
    python -m benchmarks.seeing SmolVLM2-500M FOLDER --mtmd ./mtmd --threads 2

``--write`` makes a checkpoint, our bundle of it, and with LLAMA, a folder of llama.cpp's source, GGUF files by its own
converter: Q4_0 for the decoder, Q8_0 and float16 for what reads the picture.  Ours are int4 and int8.  What is timed,
in milliseconds: ``encode``, the tower and its projector; ``prefill``, the prompt with the picture's rows; ``step``,
one token; ``first``, all that comes before the first token, the picture's preprocessing among it.  Needs torch and
transformers, and gguf with LLAMA.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import conditions, ratio, show
from benchmarks.rivals.__main__ import Worker
from benchmarks.shapes import SHAPES as TEXTS
from benchmarks.towers import SHAPES as TOWERS
from edgespec import Image, export, load
from edgespec.engine.engine import Engine
from edgespec.export.source.source import resolve

SIDE = 512  # pixels: 1024 patches of 16
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_image_splitting": False}
FIGURES = ("encode", "prefill", "step", "first")
TEXT: dict[str, dict[str, Any]] = {
    "SmolVLM2-500M": {
        "model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "vocab_size": 49280, "hidden_size": 960,
        "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
        "head_dim": 64, "max_position_embeddings": 8192,
    },
    "LFM2-VL-450M": TEXTS["lfm2-350m"] | {"architectures": ["Lfm2ForCausalLM"]},
    "Qwen3-VL-2B": {
        "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "Qwen3.5-0.8B": TEXTS["qwen3.5-0.8b"] | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                            "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip
WORDS = ("<image>", "<fake_token_around_image>", "<global-img>", "<|image_start|>", "<|image_end|>",
         "<|img_thumbnail|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")  # fmt: skip


def write(name: str, folder: Path, llama: Path | None) -> None:
    """Write a checkpoint and our bundle, and what llama.cpp reads."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    source, shape = folder / "source", TOWERS[name]
    source.mkdir(parents=True)
    image = write_tokenizer(source, str(shape.model["model_type"]))
    vision = dict(shape.model["vision_config"])
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = TEXT[name]["hidden_size"]
    settings = {**shape.model, "text_config": TEXT[name], "vision_config": vision, "image_token_id": image}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float16)
    model.save_pretrained(source)
    del model
    (source / "preprocessor_config.json").write_text(json.dumps(shape.pixels | PIXELS), "utf-8")
    shutil.copyfile(resolve("builtin:shakespeare") / "calibration.txt", source / "calibration.txt")
    if llama is not None:
        convert(source, folder, llama)
    export(source, folder / "bundle", format="int4", quick=True, context=4096, methods=["ngram"])


def write_tokenizer(folder: Path, kind: str) -> int:
    """Write a tokenizer of bytes and of the words around pictures -> the id of a picture's rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*WORDS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
    # llama.cpp wants a merge
    made = Tokenizer(
        models.BPE(vocab={one: at for at, one in enumerate([*letters, *words, "qz"])}, merges=[("q", "z")])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in words])
    made.save(str(folder / "tokenizer.json"))
    used = "<|image_pad|>" if kind.startswith("qwen") else "<image>"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": used}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    return len(letters) + words.index(used)


def convert(source: Path, folder: Path, llama: Path) -> None:
    """Have llama.cpp's converter write GGUF files, matrices of the decoder in Q4_0."""
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
    import gguf
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from conversion.lfm2 import LFM2VLModel  # type: ignore[import-not-found]

    def forced(self: Any, name: str, new_name: str, bid: int | None, n_dims: int) -> Any:
        fits = n_dims == 2 and new_name.endswith(".weight") and "conv" not in new_name and "norm" not in new_name
        return gguf.GGMLQuantizationType.Q4_0 if fits else False

    def renamed(cls: Any, item: tuple[str, Any]) -> Any:  # as transformers saved it when the model was published
        name = item[0].replace("model.vision_tower.", "model.vision_tower.vision_model.")
        return filtered(cls, (name, item[1]))

    filtered = LFM2VLModel.filter_tensors.__func__
    LFM2VLModel.filter_tensors = classmethod(renamed)
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel.tensor_force_quant = forced
    delta = "linear_num_key_heads" in (source / "config.json").read_text("utf-8")
    for file, words in (
        ("model.gguf", ["--outtype", "f16", *["--no-mtp"] * delta]),
        ("sight-q8_0.gguf", ["--mmproj", "--outtype", "q8_0"]),
        ("sight-f16.gguf", ["--mmproj", "--outtype", "f16"]),
    ):
        sys.argv = ["convert", str(source), "--outfile", str(folder / file), *words]
        converter.main()


def ours(engine: Engine, new: int, turn: int) -> dict[str, float]:
    """Ask about a picture that nobody has seen."""
    pixels = np.random.default_rng(turn).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    asked: list[str | Image] = [Image.of(pixels), "what is it"]
    begin = perf_counter()
    read = engine.generate(asked, method="ar", max_new_tokens=1, ignore_eos=True).stats
    first = 1000 * (perf_counter() - begin)
    steps = engine.generate(asked, method="ar", max_new_tokens=new, ignore_eos=True).stats
    prefill = read.prefill_ms + read.decode_ms  # the last token of the prompt is read by the first pass
    return {"encode": read.encode_ms, "prefill": prefill, "step": steps.decode_ms / new, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TEXT)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's source")
    parser.add_argument("--mtmd", help="benchmarks/rivals/mtmd.cpp, compiled")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--new", type=int, default=16)
    args = parser.parse_args()
    if args.write:
        write(args.name, args.folder, args.llama)
        return
    rivals = {}
    if args.mtmd:
        for kind in ("q8_0", "f16"):
            command = f"{args.mtmd} {args.folder}/model.gguf {args.folder}/sight-{kind}.gguf {{threads}} {SIDE}"
            rivals[f"llama.cpp {kind}"] = Worker(command, args.threads, 0)
    times: dict[str, dict[str, list[float]]] = {}
    prompt = 0
    with load(args.folder / "bundle", threads=args.threads, prompt_cache=False) as engine:
        for turn in range(args.pairs + 1):
            found = {"edgespec": ours(engine, args.new, turn)}
            for who, worker in rivals.items():
                *values, tokens = map(float, worker.ask(str(args.new)).split())
                found[who], prompt = dict(zip(FIGURES, values, strict=True)), int(tokens)
            for who, values_of in found.items():
                for what, value in values_of.items():
                    if turn:
                        times.setdefault(who, {}).setdefault(what, []).append(value)
    figures = {who: {what: round(median(one), 2) for what, one in each.items()} for who, each in times.items()}
    over = {who: {what: ratio(each[what], times["edgespec"][what]) for what in FIGURES}
            for who, each in times.items() if who != "edgespec"}  # fmt: skip
    show(conditions(threads=args.threads, shape=args.name, side=SIDE, their_prompt=prompt)
         | {"milliseconds": figures, "over_edgespec": over})  # fmt: skip


if __name__ == "__main__":
    main()
