"""Drafters trained here on the same texts, in the real loop: tokens a round; what DSpark's confidence is worth.

    python -m benchmarks.trained --folder BUILT --train eagle=125 --train dspark=140 --train dspark:lk=140 ...
    python -m benchmarks.trained --folder BUILT --train dspark=140 --costs qwen3-1.7b.json [--costs ..]

Each kind is trained for so many steps, once, by a loss of its own if one is named; BUILT keeps what was trained.  All
are exported in float32 and guess in every round, without control; their text is plain decoding's.  ``--costs`` are
what ``benchmarks.which_drafter`` prints: DSpark's blocks are then cut at fixed lengths, and where its confidence says
that a guess is worth less than its row, and the rounds cost what theirs would on that model.  Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.acceptance import own_texts
from benchmarks.common import conditions, show
from benchmarks.methods import read_run
from benchmarks.which_drafter import drafting_ms, verified_ms
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.decoding.stats import Stats
from edgespec.drafters import hidden_state
from edgespec.drafters.registry import Parts
from edgespec.engine.engine import Engine
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.training.options import DRAFTERS, PROMPT, TrainOptions
from edgespec.export.training.target import Source, Target
from edgespec.export.training.train import Trainer
from edgespec.formulas.cost import CostModel
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.options import LoadOptions

TEXTS, LENGTH, BATCH, SECONDS = 384, 192, 8, "seconds.txt"
BLOCK = ("gamma=4:threshold=0", "gamma=7:threshold=0")
RUNS = {"eagle": ("gamma=4",), "mtp": ("gamma=4",), "draft": ("gamma=4",), "dflash": ("gamma=4", "gamma=7"),
        "dspark": BLOCK, "medusa": ("nodes=4", "nodes=8")}  # fmt: skip
LENGTHS, THRESHOLDS = (1, 2, 3, 5, 7), (0.3, 0.5, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:shakespeare")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--train", action="append", required=True, metavar="KIND[:LOSS]=STEPS")
    parser.add_argument("--costs", action="append", type=Path, default=[])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=64, help="tokens of each text; so many rounds are kept")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    target = Target(Source.open(asked.model), "no", torch.device("cpu"))
    prompts = own_texts(target, asked.prompts, asked.new, 1000)["sampled"].tokens[:, :PROMPT].tolist()
    found: dict[str, Any] = {}
    for each in asked.train:
        name, _, steps = each.partition("=")
        method = name.partition(":")[0]
        if asked.costs:  # an engine each: drafters are kept with the costs that they were told
            found[name] = {
                path.stem: _lengths(_engine(asked, name, int(steps))[0], prompts, asked.new, path)
                for path in asked.costs
            }
            continue
        engine, seconds = _engine(asked, name, int(steps))
        rows = {run: _tokens(engine, method, run, prompts, asked.new) for run in RUNS[method]}
        found[name] = {"steps": int(steps), "seconds": seconds, **rows}
    show(conditions(model=asked.model, texts=TEXTS, prompts=len(prompts), new=asked.new) | {"found": found})


def _engine(asked: argparse.Namespace, name: str, steps: int) -> tuple[Engine, float]:
    """Open what was trained, after training it where it is not there yet -> processor time of its training."""
    kind, _, loss = name.partition(":")
    drafter, bundle = (asked.folder / f"{name.replace(':', '-')}-{steps}-{asked.seed}{end}" for end in ("", ".bundle"))
    if not (drafter / SECONDS).is_file():
        begun = time.process_time()
        how: dict[str, Any] = {
            "self_distill": TEXTS,
            "length": LENGTH,
            "batch": BATCH,
            "seed": asked.seed,
            "threads": 1,
        }
        how |= {"steps": steps, "threads": 1, "own_lm_heads": kind == "medusa"} | ({"loss": loss} if loss else {})
        Trainer(TrainOptions(kind, asked.model, drafter, **how)).run()
        (drafter / SECONDS).write_text(f"{time.process_time() - begun:.0f}", "utf-8")
    method, path = "speculative" if kind == "draft" else kind, str(drafter)
    if not bundle.is_dir():
        given: dict[str, Any] = {"drafter": path} if kind in DRAFTERS else {"heads": [path]}
        given = {"draft": path} if kind == "draft" else given
        Exporter(ExportOptions(asked.model, bundle, [method], "fp32", threads=1, draft_vocab=0, **given)).run()
    engine = Engine(Bundle.open(bundle, check=False), LoadOptions(threads=1, budget="off"))
    return engine, float((drafter / SECONDS).read_text("utf-8"))


def _tokens(engine: Engine, method: str, run: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Measure tokens a round, with their standard errors."""
    found = {}
    for kind, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        each = [stats.tokens / stats.rounds for stats in _rounds(engine, method, run, prompts, new, temperature)]
        found[kind] = [round(mean(each), 3), round(stdev(each) / len(each) ** 0.5, 3)]
    return found


def _rounds(
    engine: Engine, method: str, run: str, prompts: list[list[int]], new: int, temperature: float
) -> Iterator[Stats]:
    base = Settings(max_new_tokens=new, ignore_eos=True).changed(temperature=temperature)
    settings = read_run(f"{'speculative' if method == 'draft' else method}:{run}", base)
    for at, prompt in enumerate(prompts):
        yield engine.generate(prompt, settings.changed(seed=at)).stats


def _lengths(engine: Engine, prompts: list[list[int]], new: int, path: Path) -> dict[str, Any]:
    """Give rows, tokens and predicted speed of rounds of DSpark, by how it is said where its blocks end."""
    ms = {name: each["ms"] for name, each in json.loads(path.read_text("utf-8"))["passes"].items()}
    plain, block = ms["target 1"], partial(drafting_ms, ms, "dspark")
    curve = {rows: verified_ms(ms, rows) / plain for rows in range(1, 9)}
    runs = {f"always {length}": f"gamma={length}:threshold=0" for length in LENGTHS}
    runs |= {f"from {sure}": f"gamma=7:threshold={sure}" for sure in THRESHOLDS} | {"what its row is worth": "gamma=7"}
    found: dict[str, Any] = {}
    for name, run in runs.items():
        found[name] = {}
        for kind, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            with _costing(CostModel(curve, block(7) / plain)):
                stats = list(_rounds(engine, "dspark", run, prompts, new, temperature))
            rounds = [each for one in stats for each in one.recent]
            tokens, rows = sum(each.tokens for each in rounds), [each.drafted + 1 for each in rounds]
            took = sum(verified_ms(ms, each) + (block(each - 1) if each > 1 else block(1)) for each in rows)
            found[name][kind] = {"rows": round(mean(rows), 2), "tokens": round(tokens / len(rounds), 3),
                                 "speed": round(tokens * plain / took, 3)}  # fmt: skip
    return found


@contextmanager
def _costing(costs: CostModel) -> Iterator[None]:
    """Let drafters be told other costs than this machine's."""
    real = hidden_state.build

    def build(parts: Parts, part: MethodPart, options: DraftOptions) -> hidden_state.HiddenStateDrafter:
        return real(replace(parts, costs=lambda: costs), part, options)

    hidden_state.build = build
    try:
        yield
    finally:
        hidden_state.build = real


if __name__ == "__main__":
    main()
