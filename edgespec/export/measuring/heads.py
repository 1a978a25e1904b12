"""Measure how often trained heads predict the exported model's text, and describe their methods for the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.drafters.registry import has_exits
from edgespec.export.drafters.heads import TrainedHeads
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer, counted
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.formulas.cost import Curve, expected_tokens, measure
from edgespec.formulas.tree import best_tree
from edgespec.runtimes.files.manifest import HeadGroup, Measured, MethodPart
from edgespec.runtimes.slots.slot import Slot

TOP = 10  # candidates of a head that are compared
FLIGHT = 8  # maximum tokens that leave by exits before the rest of the layers runs
DOUBT = 8  # positions, taken to be wrong, that are counted with the measured ones


def head_ranks(slot: Slot, scorer: ChainScorer, group: HeadGroup) -> tuple[list[list[float]], Acceptance]:
    """How often the guess of each rank of each head is right, on the model's own greedy text.

    Returns:
        ([head][rank] shares, acceptance of the chain of first guesses).
    """
    chains, gamma = scorer.chains, scorer.gamma  # [P, gamma + 1]
    count = min(group.count, gamma - 1)
    depth = gamma - count  # rows of each chain that are followed by known tokens for all these heads
    guesses = _guesses(slot, scorer, group.name, depth)  # [count of group, P, depth, TOP]
    right = np.stack(
        [guesses[i] == chains[:, i + 2 : i + 2 + depth, None] for i in range(count)]
    )  # [count, P, depth, TOP]
    # a few positions right by chance must not make a tree look good
    ranks = (right.sum((1, 2)) / (right[0, :, :, 0].size + DOUBT)).tolist()
    first = right[..., 0].reshape(count, -1).T  # [P * depth, count]
    return ranks, counted(first)


def _guesses(slot: Slot, scorer: ChainScorer, group: str, depth: int) -> NDArray[np.int64]:
    """Return the heads' candidates after each row of each chain, int64 [count, P, depth, TOP]."""
    found = []
    for output in scorer.passes(slot, depth, hidden=True):
        assert output.hidden is not None
        best = slot.run(Pass(inputs=output.hidden.copy(), top=TOP, group=group)).best
        assert best is not None
        found.append(best[0].reshape(len(best[0]), -1, depth, best[0].shape[-1]).copy())
    return np.concatenate(found, 1)


@dataclass(frozen=True)
class ExitRecord:
    """Predictions of each exit along the model's own greedy text."""

    layers: tuple[int, ...]  # of each exit, ascending
    confidence: NDArray[np.float64]  # float [exits, N], its probability of its likeliest token
    right: NDArray[np.bool_]  # bool [exits, N], whether that was the model's token
    # [exits + 1], time of one row through the layers from exit to exit, and through the rest with the LM head
    ms: tuple[float, ...]
    head_ms: float  # time of asking an exit


def _run_layers(
    slot: Slot, row: NDArray[np.int64], hidden: NDArray[np.float32] | None, first: int, last: int
) -> NDArray[np.float32]:
    """Run layers over a token [1] from the hidden state before them -> [1, hidden], a copy."""
    found = slot.run(Pass(row, hidden=True, scored=0, inputs=hidden, layers=(first, last))).hidden
    assert found is not None
    return found.copy()


def record_exits(slot: Slot, tokens: Sequence[int], layers: Sequence[int]) -> ExitRecord:
    """Write greedy text from several places of ``tokens`` and ask every exit at every token."""
    confidence: list[list[float]] = [[] for _ in layers]
    right: list[list[bool]] = [[] for _ in layers]
    for start in np.linspace(len(tokens) // 4, len(tokens) - 1, STARTS).astype(int):
        text = list(tokens[: start + 1])
        for _ in range(WRITTEN):
            slot.prefill(text[slot.follow(text[:-1]) : -1])
            row = np.array(text[-1:], np.int64)
            below, said = 0, []
            hidden: NDArray[np.float32] | None = None
            for layer in layers:
                hidden = _run_layers(slot, row, hidden, below, layer)
                below = layer
                logits = slot.run(Pass(inputs=hidden, group=f"exit.{layer}"))
                said.append(confident(logits.logits, logits.tokens))
            assert hidden is not None
            token = int(slot.run(Pass(row, inputs=hidden, layers=(below, slot.layers))).logits[0].argmax())
            slot.keep([0])
            text.append(token)
            for i, (guess, chance) in enumerate(said):
                confidence[i].append(chance)
                right[i].append(guess == token)
    edges = [0, *layers]
    row, stream = np.zeros(1, np.int64), np.zeros((1, slot.model.facts.hidden), np.float32)

    def segment(at: int) -> None:
        if at < len(layers):
            _run_layers(slot, row, stream if at else None, edges[at], edges[at + 1])
        elif at == len(layers):
            slot.run(Pass(row, inputs=stream, layers=(edges[-1], slot.layers)))
        else:
            slot.run(Pass(inputs=stream, group=f"exit.{layers[0]}"))

    times = measure(segment, range(len(layers) + 2), 5)
    ms = tuple(times[at] for at in range(len(layers) + 1))
    return ExitRecord(tuple(layers), np.array(confidence), np.array(right), ms, times[len(layers) + 1])


def confident(logits: NDArray[np.float32] | None, tokens: NDArray[np.int64] | None) -> tuple[int, float]:
    """Return the likeliest token of one row of a head, [1, 1, size], and its probability."""
    assert logits is not None
    row = logits[0, 0].astype(np.float64)
    best = int(row.argmax())
    return best if tokens is None else int(tokens[best]), float(1 / np.exp(row - row[best]).sum())


@dataclass(frozen=True)
class ExitChoice:
    """Exits with the highest predicted speed, by what was recorded."""

    layers: tuple[int, ...]  # of the exits to ask
    threshold: float  # minimum confidence to take an exit
    speedup: float  # predicted over plain decoding
    acceptance: float  # share of taken exits that were right
    taken: float  # share of tokens that left by an exit
    draft_cost: float  # time of a guess over that of a plain step


def choose_exits(record: ExitRecord, plain_ms: float, v: Curve) -> ExitChoice:
    """Go through single exits and all together, and thresholds, along the recorded text."""
    sets = [(i,) for i in range(len(record.layers))] + (
        [tuple(range(len(record.layers)))] if len(record.layers) > 1 else []
    )
    choices = [
        _along(record, which, threshold, plain_ms, v)
        for which in sets
        for threshold in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    ]
    return max(choices, key=lambda choice: choice.speedup)


def _along(record: ExitRecord, which: tuple[int, ...], threshold: float, plain_ms: float, v: Curve) -> ExitChoice:
    """Count the rounds along the recorded text with these exits."""
    n = record.confidence.shape[1]
    ms = taken = right = guesses = at = spent = 0.0
    last = which[-1]
    back = record.ms[last + 1 :]
    position = 0
    while position < n:
        flight, ok = 0, True
        while True:  # one token of the flight
            here = min(position + flight, n - 1)
            left = next((i for i in which if record.confidence[i, here] > threshold), None)
            reached = last if left is None else left
            spent += sum(record.ms[: reached + 1]) + record.head_ms * sum(1 for i in which if i <= reached)
            if left is None or flight >= FLIGHT or not ok:
                break
            spent += sum(record.ms[left + 1 : last + 1]) * (v(2) - 1)  # deferred, then in a row's company
            ok = bool(record.right[left, here])
            taken, right, flight = taken + 1, right + ok, flight + 1
        ms += sum(back) * v(flight + 1)
        guesses += flight
        position += flight + ok
        at += 1
    total = spent + ms
    return ExitChoice(
        tuple(record.layers[i] for i in which),
        threshold,
        position * plain_ms / total,
        right / taken if taken else 0.0,
        taken / n,
        spent / max(guesses + at, 1) / plain_ms,
    )


MOST_NODES = 16
WRITTEN, STARTS = 24, 4  # tokens per text that exits are recorded on, and the number of texts

Note = Callable[[list[float], int], Measured]


def measure_heads(
    name: str, heads: TrainedHeads, slot: Slot, scorer: ChainScorer, costs: StepCosts, note: Note
) -> MethodPart:
    """Return acceptance, cost and predicted speed of a method.

    Args:
        name: of the method; its heads are of the kind that it needs.
        slot: the model with the heads; its slot is overwritten.
        note: makes the manifest's record of (rates, positions).
    """
    if has_exits(name):
        return _exits(heads, slot, scorer, costs, note)
    group = heads.file.groups[0]
    ranks, acceptance = head_ranks(slot, scorer, group)
    hidden = np.zeros((1, slot.model.facts.hidden), np.float32)
    (ms,) = measure(lambda _: slot.run(Pass(inputs=hidden, top=TOP, group=group.name)), (1,), 5).values()
    cost = costs.model(ms)
    padding = costs.plain / costs.verify[1]
    trained = heads.file.ranks.get("greedy")
    if trained and len(trained) == group.count:  # many more positions than an export can look at
        ranks = trained
    if name == "medusa":
        paths, gain = best_tree(ranks, cost.v, cost.c, MOST_NODES)
        gamma, gain = max((len(path) for path in paths), default=1), padding * gain
    else:
        rates = acceptance.rates
        gains = {g: padding * expected_tokens(rates, g) / (cost.c + cost.v(g + 1)) for g in range(1, len(rates) + 1)}
        gamma = max(gains, key=lambda g: gains[g])
        gain = gains[gamma]
    return MethodPart(
        gamma=gamma,
        heads=[group.name],
        ranks=[[round(share, 5) for share in head] for head in ranks],
        draft_cost=cost.c,
        predicted_speedup=gain,
        measured=[note(acceptance.rates, acceptance.offered[0])],
    )


def _exits(heads: TrainedHeads, slot: Slot, scorer: ChainScorer, costs: StepCosts, note: Note) -> MethodPart:
    record = record_exits(slot, scorer.tokens, heads.file.exits)
    best = choose_exits(record, costs.verify[1], costs.model(0.0).v)
    return MethodPart(
        gamma=FLIGHT,
        heads=[f"exit.{layer}" for layer in best.layers],
        threshold=best.threshold,
        draft_cost=best.draft_cost,
        predicted_speedup=best.speedup * costs.plain / costs.verify[1],
        measured=[note([best.acceptance], record.right.shape[1])],
        notes=f"takes an exit for {best.taken:.0%} of the tokens",
    )
