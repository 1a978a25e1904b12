"""What drafters conditioned on hidden states cost in the shapes of real models: bytes, milliseconds, share of the roof.

    python -m benchmarks.drafter_cost [--model qwen3-0.6b | --model FOLDER] [--heads 32768,8192] [--threads 2]

The weights are random, so nothing is said about text.  The model is a shape of ``SHAPES``, or a folder's config.json;
beside it are EAGLE-3 as `edgespec train eagle` makes it, a layer for multi-token prediction, and DFlash of five
layers.  All passes take turns.  Bytes are the matrices that a pass reads; bandwidth is measured before and after.  A
round of EAGLE-3 makes its entries and its first guess in one pass, takes a step for each further guess, and is verified
by one pass that taps; ``speed`` is that of a round over plain decoding if each guess is right with that chance.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import alternate, conditions, show
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_described
from edgespec.export.drafters.dflash import DFlash, assumed_blocks
from edgespec.export.drafters.head_choice import cut_draft, write_tokens
from edgespec.export.drafters.heads import FUSE, HeadPlan
from edgespec.export.drafters.mtp import mtp_of
from edgespec.export.emit.plans import storage_plans
from edgespec.export.measuring.planned_heads import assumed_drafter
from edgespec.export.source.derived import Extra, extended
from edgespec.export.source.source import Checkpoint, ConfigOnly
from edgespec.formulas.cost import expected_tokens
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import read_bandwidth
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

SHAPES = {  # hidden, layers, heads, keys and values, size of a head, MLP, vocabulary
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "llama-3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256),  # without its scaled rotation, with Qwen3's norms of heads
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936),
}
DEPTH, CONTEXT, BLOCKS, ROWS, CHANCES = 200, 512, (4, 8, 16), (1, 2, 3, 4, 5, 8), (0.6, 0.8)
OWED = 3  # rows of a round before, of which entries are made
MEGABYTES = 512  # read where bandwidth is measured
PART = "part.json"  # what a model's folder says of it
_NUMBERS = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)


@dataclass(frozen=True)
class Drawn:
    """A tensor of random numbers."""

    shape: tuple[int, ...]
    file: Path = Path("random")

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        count = len(range(*rows.indices(self.shape[0])))
        if len(self.shape) == 1:
            return np.ones(count, np.float32)
        whole = np.resize(_NUMBERS, (count, self.shape[1])) * np.float32(self.shape[1] ** -0.5)
        return whole if columns is None else whole[:, columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--heads", default="32768,8192", help="rows of the drafters' LM heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    sizes = [int(text) for text in arguments.heads.split(",")]
    with tempfile.TemporaryDirectory() as name:
        measured = Measured(Path(name), arguments.threads)
        _target(measured, described(Path(name), arguments.model))
        for rows in sizes:
            _drafters(measured, described(Path(name), arguments.model), rows)
        roofs = [roof(arguments.threads)]
        times = {name: median(ms) for name, ms in alternate(measured.runs, arguments.pairs).items()}
        roofs.append(roof(arguments.threads))
    read, one = sum(roofs) / 2, times["target, 1 row"]
    passes = {
        name: {
            "mb": round(measured.bytes[name] / 1e6, 1),
            "ms": round(ms, 3),
            "gb_s": round(measured.bytes[name] / ms / 1e6, 1),
            "share_of_bandwidth": round(measured.bytes[name] / ms / 1e6 / read, 2),
            "over_a_step": round(ms / one, 3),
            "bytes_over_a_steps": round(measured.bytes[name] / measured.bytes["target, 1 row"], 3),
        }
        for name, ms in times.items()
    }
    rounds = {str(rows): _rounds(times, rows) for rows in sizes}
    said = conditions(model=arguments.model, format="int4", depth=DEPTH, threads=arguments.threads)
    show(said | {"bandwidth_gb_s": [round(each, 1) for each in roofs], "passes": passes, "eagle_rounds": rounds})


class Measured:
    """Passes to be timed, and the bytes of the matrices that each reads."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.runs: dict[str, Callable[[], None]] = {}
        self.bytes: dict[str, int] = {}

    def opened(
        self,
        name: str,
        arch: Architecture,
        plan: HeadPlan,
        tokens: int | None,
        extra: Mapping[str, tuple[int, ...]] | None = None,
    ) -> tuple[Slot, dict[str, int]]:
        """Write a model of random weights, and open it at a depth; its matrices' bytes, too.

        Args:
            name: of its folder; what is there already is opened as it is.
            extra: shapes of tensors that its heads have.
        """
        folder = self.folder / name
        head: Format | None = None if arch.drafts is None else "int8"
        built = (folder / PART).is_file()
        folder.mkdir(exist_ok=True)
        arch.source = Checkpoint(folder, arch.source.config, {key: Drawn(at) for key, at in arch.tensors.items()})
        vocab = None
        if tokens is not None:
            ids = np.arange(tokens)
            vocab, plan = write_tokens(folder, "", ids), replace(plan, cut=True, only=True)
            cut_draft(arch, ids)
        if extra:
            drawn = {key: Drawn(shape) for key, shape in extra.items()}
            beside = {key: Extra(partial(tuple, each.shape), each.read) for key, each in drawn.items()}
            arch.source = extended(arch.source, beside)
        if not built:
            spec = ModelSpec("int4", head=head, draft=arch.drafts is not None, plan=plan, head_vocab=vocab)
            (folder / PART).write_text(write_model(folder, arch, spec).part.model_dump_json(), "utf-8")
        part = ModelPart.model_validate_json((folder / PART).read_text("utf-8"))
        native = storage_plans(arch, "int4", head, plan)["native"]
        sizes = {
            key: matrix.packed.nbytes + matrix.packed.low_nbytes
            for key, matrix in native.matrices.items()
            if matrix.packed
        }
        slot = open_slot(Model(folder, part, "native", self.threads), reserve=DEPTH + 64)
        slot.stand_in(DEPTH)
        return slot, sizes

    def add(self, name: str, size: int, run: Callable[[], object]) -> None:
        """One more pass, of so many bytes."""

        def pass_() -> None:
            run()

        self.runs[name], self.bytes[name] = pass_, size


def described(folder: Path, model: str) -> Architecture:
    """Give the model, without weights."""
    if model not in SHAPES:
        return open_described(Path(model), CONTEXT)
    hidden, layers, heads, keys, dim, inner, vocab = SHAPES[model]
    config: dict[str, Any] = {"model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers,
                              "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": dim,
                              "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": CONTEXT,
                              "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
                              "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return open_described(folder, CONTEXT)


def _target(measured: Measured, arch: Architecture) -> None:
    """Its passes, plain and tapped."""
    tapped = assumed_drafter(arch)[1]
    slot, sizes = measured.opened("target", arch, HeadPlan(tapped=tapped), None)
    size = sum(sizes.values()) - (0 if arch.facts.tied else sizes.get(arch.embedding, 0))

    def verify(rows: int, taps: bool) -> None:
        slot.keep_aux_hidden = taps
        slot.forward_best(np.arange(rows) + 100)  # type: ignore[attr-defined]

    for rows in ROWS:
        measured.add(f"target, {rows} row{'s' * (rows > 1)}", size, partial(verify, rows, False))
    measured.add(f"target, {OWED + 1} rows, tapped", size, lambda: verify(OWED + 1, True))
    measured.add("embedding, 1 row", 0, lambda: slot.embed(np.array([5])))


def _drafters(measured: Measured, target: Architecture, rows: int) -> None:
    """Time passes of a drafter of each kind, whose LM head has so many rows."""
    made = {"eagle": assumed_drafter(target)[0], "mtp": mtp_of(target, ConfigOnly(target.source.path, {}))}
    for kind, arch in made.items():
        slot, sizes = measured.opened(f"{kind} {rows}", arch, HeadPlan(), rows)
        whole, hidden = sum(sizes.values()), target.facts.hidden
        fused = sizes[FUSE] if kind == "eagle" else 0  # which mtp runs in every step
        given = np.ones((OWED, arch.input_width), np.float32)
        own = np.ones((1, arch.input_width), np.float32)
        own[:, 2 * hidden :] = 0
        said = f"{kind}, head of {rows}"
        for owed in (1, OWED):
            name = f"{said}: {owed} entr{'ies' if owed > 1 else 'y'} and a guess"
            measured.add(name, whole, partial(slot.forward_inputs, given[:owed], False, True))
        measured.add(f"{said}: a step", whole - fused, partial(slot.forward_inputs, own, True, True))
    blocks = assumed_blocks(DFlash, target, {"block_size": 16})[0]
    slot, sizes = measured.opened(f"dflash {rows}", blocks, HeadPlan(), rows)
    whole = sum(sizes.values()) - sizes[FUSE]
    given = np.ones((OWED, blocks.input_width), np.float32)

    def absorb() -> None:
        slot.absorb_inputs(given)
        del slot.tokens[DEPTH:]

    keys = sum(size for key, size in sizes.items() if "q_proj" in key)
    measured.add(f"dflash, head of {rows}: {OWED} entries", sizes[FUSE] + keys, absorb)
    for count in BLOCKS:
        block = given[:1].repeat(count, 0)
        measured.add(f"dflash, head of {rows}: a block of {count}", whole, partial(slot.forward_block, block, True))


def _rounds(times: dict[str, float], rows: int) -> dict[str, Any]:
    """Time rounds of EAGLE-3 with so many guesses: milliseconds, and speed over plain decoding."""
    made: dict[str, Any] = {}
    for guesses in range(1, 5):
        first, step = (times[f"eagle, head of {rows}: {what}"] for what in (f"{OWED} entries and a guess", "a step"))
        ms = first + (guesses - 1) * step + times[f"target, {guesses + 1} rows"]
        speed = {str(a): round(expected_tokens(a, guesses) * times["target, 1 row"] / ms, 2) for a in CHANCES}
        made[str(guesses)] = {"ms": round(ms, 2), "speed": speed}
    return made


def roof(threads: int) -> float:
    return max(read_bandwidth(threads, streams, MEGABYTES) for streams in (1, 4, 8))


if __name__ == "__main__":
    main()
