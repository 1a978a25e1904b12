"""A picture to its first tokens: models of published shapes and random weights, in turns beside llama.cpp's libmtmd.

    python -m benchmarks.seeing SmolVLM2-500M FOLDER --write --llama LLAMA
    g++ -O2 -std=c++17 benchmarks/rivals/mtmd.cpp -I LLAMA/include -I LLAMA/ggml/include -I LLAMA/tools/mtmd \\
        LIBRARIES -o mtmd
    python -m benchmarks.seeing SmolVLM2-500M FOLDER --mtmd ./mtmd --format int4 --threads 2

``--write`` makes a checkpoint, our bundles of it in int4 and int8, whose towers are int8, and with LLAMA, a folder of
llama.cpp's source, GGUF files by its own converter: the decoder in Q4_0 and Q8_0, what reads the picture in Q8_0,
float16 and bfloat16.  int4 is timed beside Q4_0 with a tower in Q8_0, int8 beside Q8_0 with the others, each in a
process of its own.  In milliseconds: ``encode``, the tower and its projector; ``prefill``, the prompt with the
picture's rows; ``step``, one token; ``first``, all that comes before the first token, the picture's preprocessing among
it.  Of ours also the same prompt length without a picture (``text_``), and a token where a proposer knows the text and
is wrong once in five guesses (``guessed``).  ``peak_mb`` is the process' largest resident size.  Needs torch and
transformers, and gguf with LLAMA.
"""

from __future__ import annotations

import argparse
import json
import shlex
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
from edgespec import Image, load
from edgespec.engine.engine import Engine
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.bundle.writer import write_manifest
from edgespec.export.options import ExportOptions
from edgespec.export.planned import planned_bundle

SIDE, CONTEXT = 512, 4096  # pixels: 1024 patches of 16
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TILED = {"size": {"longest_edge": 1024}}  # of SmolVLM2: 4 tiles and the whole, for both
LEVELS = {"int4": ("q4_0", ("q8_0",)), "int8": ("q8_0", ("f16", "bf16"))}  # llama.cpp's decoder and towers beside each
FIGURES = ("encode", "prefill", "step", "first")
RIGHT = 0.8  # of guesses
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
    settings = {
        **shape.model,
        "text_config": TEXT[name] | {"eos_token_id": 10},
        "vision_config": vision,
        "image_token_id": image,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float16)
    model.save_pretrained(source)
    del model
    tiles = TILED if "Smol" in name else {}
    (source / "preprocessor_config.json").write_text(json.dumps(shape.pixels | PIXELS | tiles), "utf-8")
    for form in LEVELS:
        write_bundle(source, folder / form, form)
    if llama is not None:
        convert(source, folder, llama)


def write_bundle(source: Path, folder: Path, form: Any) -> None:
    """Write our bundle of a checkpoint, without what an export measures."""
    folder.mkdir()
    part = write_model(folder, open_model(source, CONTEXT), ModelSpec(form)).part
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    planned = planned_bundle(ExportOptions(str(source), format=form, context=CONTEXT))
    write_manifest(folder, planned.model_copy(update={"target": part}))


def write_tokenizer(folder: Path, kind: str) -> int:
    """Write a tokenizer of bytes and of the words around pictures -> the id of a picture's rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*WORDS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
    vocab = {one: at for at, one in enumerate([*letters, *words, "ĊĊ"])}  # llama.cpp looks for two line ends
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in words])
    made.save(str(folder / "tokenizer.json"))
    used = "<|image_pad|>" if kind.startswith("qwen") else "<image>"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": used}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    return len(letters) + words.index(used)


def convert(source: Path, folder: Path, llama: Path) -> None:
    """Have llama.cpp's converter write GGUF files, all matrices of the decoder at one level."""
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
    import gguf
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from conversion.lfm2 import LFM2VLModel  # type: ignore[import-not-found]

    def forced(self: Any, name: str, new_name: str, bid: int | None, n_dims: int) -> Any:
        fits = n_dims == 2 and new_name.endswith(".weight") and "conv" not in new_name and "norm" not in new_name
        return level if fits else False

    def renamed(cls: Any, item: tuple[str, Any]) -> Any:  # as transformers saved it when the model was published
        name = item[0].replace("model.vision_tower.", "model.vision_tower.vision_model.")
        return filtered(cls, (name, item[1]))

    filtered = LFM2VLModel.filter_tensors.__func__
    LFM2VLModel.filter_tensors = classmethod(renamed)
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel.tensor_force_quant = forced

    def run(file: Path, words: list[str]) -> None:
        sys.argv = ["convert", str(source), "--outfile", str(file), *words]
        converter.main()

    delta = "linear_num_key_heads" in (source / "config.json").read_text("utf-8")
    for level in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        run(folder / f"model-{level.name.lower()}.gguf", ["--outtype", "f16", *["--no-mtp"] * delta])
    for kind in ("q8_0", "f16", "bf16"):
        run(folder / f"sight-{kind}.gguf", ["--mmproj", "--outtype", kind])


class Told:
    """A proposer that knows what comes, and is right in so many guesses."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.random = text, np.random.default_rng(1)

    def propose(self, tokens: list[int], budget: int) -> list[int]:
        known = self.text[len(tokens) : len(tokens) + budget]
        return [token if self.random.random() < RIGHT else token + 1 for token in known]


def ours(engine: Engine, new: int, turn: int) -> dict[str, float]:
    """Ask about a picture that nobody has seen, and the same without one."""
    random = np.random.default_rng(turn)
    asked: Any = [Image.of(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)), "what is it"]
    found: dict[str, float] = {}
    for name in ("", "text_"):
        begin = perf_counter()
        one = engine.generate(asked, method="ar", max_new_tokens=1, ignore_eos=True).stats
        first = 1000 * (perf_counter() - begin)
        prompt: Any = engine.encode(asked, engine.defaults)
        plain = engine.generate(prompt, method="ar", max_new_tokens=new, ignore_eos=True)
        proposer: Any = Told([*prompt, *plain.tokens])
        guessed = engine.generate(prompt, proposer=proposer, max_new_tokens=new, ignore_eos=True)
        if guessed.tokens != plain.tokens:
            raise SystemExit("guesses changed the text")
        # the last token of the prompt is read by the first pass
        found |= {f"{name}prefill": one.prefill_ms + one.decode_ms, f"{name}step": plain.stats.decode_ms / new}
        found |= {f"{name}guessed": guessed.stats.decode_ms / new}
        if not name:
            found |= {"encode": one.encode_ms, "first": first, "prompt": one.prompt_tokens}
        asked = random.integers(0, 256, one.prompt_tokens).tolist()
    return found


def serve(bundle: Path, threads: int) -> None:
    """Answer lines with the number of new tokens."""
    with load(bundle, threads=threads, prompt_cache=False) as engine:
        print("ready", flush=True)
        for turn, line in enumerate(sys.stdin):
            print(json.dumps(ours(engine, int(line), turn)), flush=True)


def peak(pid: int) -> float:
    """Give the largest resident size of a process in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TEXT)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's source")
    parser.add_argument("--mtmd", help="benchmarks/rivals/mtmd.cpp, compiled")
    parser.add_argument("--genai", action="store_true", help="benchmarks/rivals/genai_pictures.py wrote its files")
    parser.add_argument("--format", choices=LEVELS, default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.name, args.folder, args.llama)
        return
    if args.serve:
        serve(args.folder / args.format, args.threads)
        return
    own = [sys.executable, "-m", "benchmarks.seeing", args.name, str(args.folder), "--serve", "--format", args.format]
    commands = {"edgespec": shlex.join([*own, "--threads", str(args.threads)])}
    decoder, towers = LEVELS[args.format]
    for tower in towers if args.mtmd else ():
        files = f"{args.folder}/model-{decoder}.gguf {args.folder}/sight-{tower}.gguf"
        commands[f"llama.cpp {decoder}, tower {tower}"] = f"{args.mtmd} {files} {{threads}} {SIDE}"
    if args.genai:
        its = shlex.join([sys.executable, "-m", "benchmarks.rivals.genai_pictures", args.name, str(args.folder)])
        commands["onnxruntime-genai"] = f"{its} {{threads}}"
    workers = {name: Worker(command, args.threads, 0) for name, command in commands.items()}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    for turn in range(args.pairs + 1):
        for name in list(workers)[:: 1 if turn % 2 else -1]:
            for what, value in json.loads(workers[name].ask(str(args.new))).items():
                if turn:
                    times[name].setdefault(what, []).append(value)
    figures = {who: {what: round(median(one), 2) for what, one in each.items()}
               | {"peak_mb": round(peak(workers[who].process.pid))} for who, each in times.items()}  # fmt: skip
    for worker in workers.values():
        worker.process.communicate()  # ends at the end of its input
    over = {who: {what: ratio(each[what], times["edgespec"][what]) for what in FIGURES}
            for who, each in times.items() if who != "edgespec"}  # fmt: skip
    text = {what: ratio(times["edgespec"][what], times["edgespec"][f"text_{what}"])
            for what in ("prefill", "step", "guessed")}  # fmt: skip
    show(conditions(threads=args.threads, shape=args.name, format=args.format, side=SIDE)
         | {"figures": figures, "over_edgespec": over, "picture_over_text": text})  # fmt: skip


if __name__ == "__main__":
    main()
