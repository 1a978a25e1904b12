"""What the manifest says of a method with trained heads: measured on the exported graph, on this machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgespec.export.heads.description import TrainedHeads
from edgespec.export.measuring.acceptance import ChainScorer
from edgespec.export.measuring.head_acceptance import TOP, choose_exits, head_ranks, record_exits
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.formulas.cost import expected_tokens, measure
from edgespec.formulas.tree import best_tree
from edgespec.runtimes.files.manifest import Measured, MethodPart
from edgespec.runtimes.slots.slot import Slot

MOST_NODES = 16
WRITTEN, STARTS = 24, 4  # tokens that exits are recorded on, from so many places

Note = Callable[[list[float], int], Measured]


def measure_heads(
    name: str, heads: TrainedHeads, slot: Slot, scorer: ChainScorer, costs: StepCosts, note: Note
) -> MethodPart:
    """Acceptance, cost and predicted speed of a method.

    Args:
        name: medusa, blockwise or paradecode.
        heads: what was read.
        slot: the model with the heads; its slot is overwritten.
        scorer: chains of the model's continuations.
        costs: of this machine.
        note: makes the manifest's record of (rates, positions).
    """
    if name == "paradecode":
        return _exits(heads, slot, scorer, costs, note)
    group = heads.groups[0]
    ranks, acceptance = head_ranks(slot, scorer, group)
    hidden = np.zeros((1, slot.model.facts.hidden), np.float32)
    (ms,) = measure(lambda _: _discard(slot.forward_heads(group.name, hidden, TOP)), (1,), 5).values()
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
    record = record_exits(slot, scorer.tokens, heads.file.exits, WRITTEN, STARTS)
    best = choose_exits(record, costs.verify[1], costs.model(0.0).v)
    return MethodPart(
        gamma=8,
        heads=[f"exit.{layer}" for layer in best.layers],
        threshold=best.threshold,
        draft_cost=best.draft_cost,
        predicted_speedup=best.speedup * costs.plain / costs.verify[1],
        measured=[note([best.acceptance], record.right.shape[1])],
        notes=f"takes an exit for {best.taken:.0%} of the tokens",
    )


def _discard(_: object) -> None:
    """The output of a timed pass."""
