"""N-gram drafting on the text of a real model, at the cost of another: replay of recorded answers.

    python -m benchmarks.replay BUNDLE... --traces ANSWERS.jsonl --questions QUESTIONS.jsonl --tokenizer tokenizer.json

Every pass of the target is really run, so its cost is real; its logits are then overwritten with the recorded next
token, so that the text is that of the recording.  Plain decoding and the n-gram method replay the same answers,
taking turns. The second turn of a conversation sees the first in its prompt.  ``--shuffle`` permutes each answer's
tokens: text that does not repeat.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, ratio, show
from edgespec.control.adaptive import Adaptive
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import GreedyTarget, Pass
from edgespec.drafters.ngram import NGram
from edgespec.drafters.plain import Plain
from edgespec.formulas.cost import CostModel, measure
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

FORCED = 1e9


class Replay:
    """A target that costs what its slot costs and says what the script says."""

    def __init__(self, slot: Slot, script: Sequence[int]) -> None:
        self._slot, self._script = slot, list(script)
        self.vocab_size, self.context = slot.vocab_size, slot.context

    @property
    def tokens(self) -> list[int]:
        return self._slot.tokens

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self._slot.tokens = tokens

    def follow(self, tokens: Sequence[int]) -> int:
        return self._slot.follow(tokens)

    def crop(self, length: int) -> int:
        return self._slot.crop(length)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._slot.prefill(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        self._slot.keep(rows)

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Pass:
        at = len(self._slot.tokens) + 1
        if isinstance(self._slot, GreedyTarget):
            output = self._slot.forward_best(tokens, parents)
            said = [self._script[min(at + row, len(self._script) - 1)] for row in range(len(tokens))]
            return Pass(output.logits, best=(np.array(said), np.zeros(len(said), np.float32)))
        output = self._slot.forward(tokens, parents)
        for row in range(len(tokens)):  # a row after a wrong guess is never read
            output.logits[row, self._script[min(at + row, len(self._script) - 1)]] = FORCED
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=15)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--shuffle", action="store_true")
    arguments = parser.parse_args()
    scripts = _scripts(arguments)
    slots: dict[str, Slot] = {}
    drafters: dict[str, Any] = {}
    for path in arguments.bundles:
        bundle = Bundle.open(path, check=False)
        form = bundle.manifest.target.format
        target = bundle.manifest.target
        operators = choose_operators(arguments.operators, target)
        native = operators.kind == "native"  # one graph for everything
        plain = Model(bundle.path, target, "native" if native else "plain", arguments.threads)
        slots[f"{form} plain"], drafters[f"{form} plain"] = open_slot(plain), Plain()
        runs = [(f"{form} ngram", plain)]
        if not native:
            strict = Model(bundle.path, target, target.main, arguments.threads)
            runs = [(f"{form} ngram", strict), (f"{form} ngram --no-strict", plain)]
        for name, model in runs:
            slots[name] = slot = open_slot(model)
            slot.prefill(list(range(5, 69)))
            drafters[name] = Adaptive(NGram(), CostModel(_curve(slot), 0.0), gamma_max=8)
    times: dict[str, list[float]] = {name: [] for name in slots}
    stats = {name: Stats() for name in slots}
    for number, (prompt, answer) in enumerate(scripts):
        for name in list(slots)[:: 1 if number % 2 else -1]:
            once = Stats()
            replay = Replay(slots[name], prompt + answer)
            options = DecodeOptions(max_new_tokens=min(arguments.new, len(answer)), gamma=8)
            replay.follow([])
            for _ in decode(replay, drafters[name], prompt, options, once):
                pass
            times[name].append(once.decode_ms / once.tokens)
            stats[name].rounds += once.rounds
            stats[name].tokens += once.tokens
            stats[name].drafted += once.drafted
            stats[name].accepted += once.accepted
    best = min((name for name in slots if name.endswith("plain")), key=lambda name: median(times[name]))
    rows = {
        name: {
            "ms_per_token": round(median(times[name]), 2),
            "speedup": ratio(times[best], times[name]),
            "total_speedup": round(sum(times[best]) / sum(times[name]), 3),
            "tokens_per_round": round(stats[name].tokens_per_round, 2),
            "acceptance_rate": round(stats[name].acceptance_rate, 3),
        }
        for name in slots
    }
    kind = "shuffled answers" if arguments.shuffle else "second turns"
    show(conditions(threads=arguments.threads, text=kind, answers=len(scripts), baseline=best) | {"runs": rows})


def _scripts(arguments: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, answer tokens) of second turns."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    questions = {}
    for line in arguments.questions.read_text("utf-8").splitlines():
        item = json.loads(line)
        questions[item["question_id"]] = item["turns"]
    found: list[tuple[list[int], list[int]]] = []
    for line in arguments.traces.read_text("utf-8").splitlines():
        item = json.loads(line)
        first, second = item["choices"][0]["turns"][:2]
        asked = questions[item["question_id"]]
        prompt = tokenizer.encode(f"USER: {asked[0]} ASSISTANT: {first} USER: {asked[1]} ASSISTANT:").ids
        answer = tokenizer.encode(" " + second).ids
        if len(answer) >= 48:
            if arguments.shuffle:
                answer = np.random.default_rng(len(found)).permutation(answer).tolist()
                prompt = prompt[:32]
            found.append((prompt, answer))
    step = max(1, len(found) // arguments.answers)
    return found[::step][: arguments.answers]


def _curve(slot: Slot) -> dict[int, float]:
    """Give times of passes by rows: where adaptive control starts from."""

    def run(n: int) -> None:
        slot.forward(np.arange(n) + 5)

    return measure(run, [1, 2, 3, 5, 9], 3)


if __name__ == "__main__":
    main()
