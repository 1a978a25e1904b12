"""Learn tables of coded keys: int4 ranges and NoMAD centroids, from the model's keys of a text.

Keys are taken after rotary positions, because that is what queries meet.  A text is shorter than a context, so half of
the keys are turned to positions all over the context: a channel that turns slowly would otherwise show only a part of
its range.  Nothing is random but the choice of those positions, and that is seeded.

The idea of NoMAD keys is that of NoMAD-Attention (Zhang et al., arXiv 2403.01273); this is an independent
implementation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.rope import inverse_frequencies
from edgespec.runtimes.files.formats import CENTROIDS, KeyFormat
from edgespec.runtimes.files.kv import padded_dim, table_shape
from edgespec.runtimes.files.manifest import ModelFacts
from edgespec.runtimes.slots.slot import Slot

BUDGET = 8192  # tokens
LONGEST = 2048  # tokens of a window
MOST_WINDOWS = 8
MOST_BYTES = 512 << 20  # of keys held at once
ROUNDS = 25  # of k-means
SHRUNK = (1.0, 0.85, 0.7)  # of the full range: where the search for an int4 range starts
FIT_ROUNDS = 8

Keys = NDArray[np.float32]


def learn_tables(
    slot: Slot, tokens: Sequence[int], formats: Sequence[KeyFormat], progress: Callable[[int, int], None]
) -> dict[str, NDArray[np.float32]]:
    """Learn tables by format, of the shapes of ``table_shape``.

    Args:
        slot: the model with exact keys; it is overwritten.
        formats: which of int4, nomad1 and nomad2.
    """
    facts = slot.model.facts
    keys, positions = collect_keys(slot, tokens)
    keys = spread(keys, positions, facts)
    tables: dict[str, NDArray[np.float32]] = {name: np.zeros(table_shape(name, facts), np.float32) for name in formats}
    for layer in range(facts.kv_layers):
        progress(layer, facts.kv_layers)
        rows = keys[layer].astype(np.float32)  # [kv_heads, tokens, head_dim]
        for name in formats:
            for head in range(facts.kv_heads):
                tables[name][layer, head] = learn_head(rows[head], name, padded_dim(facts))
    progress(facts.kv_layers, facts.kv_layers)
    return tables


def windows(tokens: Sequence[int], context: int) -> Iterator[list[int]]:
    """Return stretches of a text that begin at different places and wrap around at its end."""
    length = min(context, len(tokens), LONGEST)
    count = min(MOST_WINDOWS, -(-BUDGET // length))
    for number in range(count):
        start = number * len(tokens) // count
        yield [tokens[(start + at) % len(tokens)] for at in range(length)]


def collect_keys(slot: Slot, tokens: Sequence[int]) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """Return the keys of all layers, [layers, kv_heads, n, head_dim], and their positions, [n]."""
    facts = slot.model.facts
    whole = list(windows(tokens, slot.context))
    most = MOST_BYTES // (2 * facts.kv_layers * facts.kv_heads * facts.head_dim) // len(whole)
    step = max(1, -(-len(whole[0]) // max(most, 1)))
    taken, positions = [], []
    for number, window in enumerate(whole):
        slot.follow([])
        slot.prefill(window)
        held = slot.snapshot()
        chosen = np.arange(number % step, len(window), step)
        rows = [held[f"past_key_values.{layer}.key"][:, chosen] for layer in range(facts.kv_layers)]
        taken.append(np.stack(rows).astype(np.float16))
        positions.append(chosen)
    return np.concatenate(taken, 2), np.concatenate(positions)


def spread(
    keys: NDArray[np.float16],  # [layers, kv_heads, n, head_dim]
    positions: NDArray[np.int64],  # [n]
    facts: ModelFacts,
) -> NDArray[np.float16]:
    """Rotate every other key to a position anywhere in the context, if that is longer than the text."""
    if not facts.rope or facts.context <= positions.max() + 1:
        return keys
    chosen = np.arange(0, len(positions), 2)
    wanted = np.random.default_rng(0).integers(0, facts.context, len(chosen))
    dims = int(str(facts.rope.get("dims", facts.head_dim)))
    steps, _ = inverse_frequencies(facts.rope, dims, facts.context)
    angles = (wanted - positions[chosen])[:, None] * steps
    cos, sin = np.cos(angles), np.sin(angles)  # [chosen, dims / 2]
    half, turned = dims // 2, keys.copy()
    first, second = (keys[..., chosen, at : at + half].astype(np.float32) for at in (0, half))
    turned[..., chosen, :half] = first * cos - second * sin
    turned[..., chosen, half:dims] = first * sin + second * cos
    return turned


def learn_head(rows: Keys, name: KeyFormat, dim: int) -> Keys:
    """Learn the table of one head: rows [n, head_dim] -> [2, dim] or [dim / d_sub, d_sub, 16]."""
    size = rows.shape[1]
    if name == "int4":
        ranges = np.zeros((2, dim), np.float32)
        ranges[:, :size] = uniform_ranges(rows.T)
        return ranges
    sub = 1 if name == "nomad1" else 2
    books = np.zeros((dim // sub, sub, CENTROIDS), np.float32)
    if sub == 1:
        books[:size, 0] = means_of_channels(rows.T)
    else:
        pairs = rows.reshape(len(rows), size // 2, 2).transpose(1, 0, 2)
        books[: size // 2] = means_of_pairs(np.ascontiguousarray(pairs)).transpose(0, 2, 1)
    return books


def uniform_ranges(values: Keys) -> Keys:
    """Scale and zero point of 16 even levels for each channel: values [channels, n] -> [2, channels].

    Least squares: codes given the line, the line given the codes, from several beginnings; the best is kept.  The
    plain range from smallest to largest is among them.
    """
    low, high = values.min(1), values.max(1)
    middle, width = (low + high) / 2, high - low
    best, error = np.stack([width / 15, low]), np.full(len(values), np.inf)
    for part in SHRUNK:
        scale, zero = width * part / 15, middle - width * part / 2
        for _ in range(FIT_ROUNDS):
            levels = uniform_levels(values, scale, zero)
            wrong = np.square(values - (zero[:, None] + scale[:, None] * levels)).mean(1)
            better = wrong < error
            best[:, better], error[better] = np.stack([scale, zero])[:, better], wrong[better]
            centred = levels - levels.mean(1, keepdims=True)
            spreads = np.square(centred).sum(1)
            slope = (centred * values).sum(1) / np.where(spreads > 0, spreads, 1)
            scale = np.where(spreads > 0, slope, scale)
            zero = values.mean(1) - scale * levels.mean(1)
    return best.astype(np.float32)


def uniform_levels(values: Keys, scale: Keys, zero: Keys) -> Keys:
    """Levels 0 to 15 as the operator rounds them: [channels, n], [channels], [channels] -> [channels, n]."""
    step = np.where(scale > 0, scale, 1)[:, None]
    return np.where(scale[:, None] > 0, np.clip(np.rint((values - zero[:, None]) / step), 0, CENTROIDS - 1), 0)


def means_of_channels(values: Keys) -> Keys:
    """k-means on a line, all channels at once: values [channels, n] -> centroids [channels, 16], ascending.

    It begins with quantiles, and again with the even levels of int4, which suit long tails better; the better end is
    kept, so that no channel is worse off than with int4.
    """
    ordered = np.sort(values.astype(np.float64), 1)
    quantiles = ordered[:, (np.arange(CENTROIDS) * 2 + 1) * values.shape[1] // (2 * CENTROIDS)]
    scale, zero = uniform_ranges(values)[..., None].astype(np.float64)
    first, error = _means_from(ordered, quantiles)
    second, other = _means_from(ordered, zero + scale * np.arange(CENTROIDS))
    return np.where((error <= other)[:, None], first, second).astype(np.float32)


def _means_from(
    ordered: NDArray[np.float64],  # [channels, n], ascending
    centroids: NDArray[np.float64],  # [channels, 16], ascending
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return centroids [channels, 16] after the rounds, and their squared error without the common part, [channels].

    Sorted values need only the cuts between neighbours; sums over a stretch are differences of running sums.
    """
    channels, n = ordered.shape
    sums = np.concatenate([np.zeros((channels, 1)), np.cumsum(ordered, 1)], 1)
    error = np.zeros(channels)
    for turn in range(ROUNDS + 1):
        limits = (centroids[:, 1:] + centroids[:, :-1]) / 2
        cuts = np.stack([np.searchsorted(*each) for each in zip(ordered, limits, strict=True)])  # keys below each limit
        bounds = np.concatenate([np.zeros((channels, 1), int), cuts, np.full((channels, 1), n)], 1)
        counts = np.diff(bounds, axis=1)
        totals = np.diff(np.take_along_axis(sums, bounds, 1), axis=1)
        error = (counts * np.square(centroids) - 2 * centroids * totals).sum(1)
        moved = np.where(counts > 0, totals / np.maximum(counts, 1), centroids)
        if turn == ROUNDS or np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids, error


def means_of_pairs(points: Keys) -> Keys:
    """k-means in the plane, all pairs of channels at once: points [pairs, n, 2] -> centroids [pairs, 16, 2].

    It begins with the means of a 4 x 4 grid of equally many points.
    """
    pairs, n, _ = points.shape
    by_first = np.argsort(points[..., 0], 1, kind="stable")
    centroids = np.zeros((pairs, CENTROIDS, 2), np.float32)
    for column in range(4):
        stripe = by_first[:, column * n // 4 : (column + 1) * n // 4]
        inside = np.take_along_axis(points, stripe[..., None], 1)  # [pairs, n / 4, 2]
        order = np.argsort(inside[..., 1], 1, kind="stable")
        size = stripe.shape[1]
        for row in range(4):
            cell = order[:, row * size // 4 : max((row + 1) * size // 4, row * size // 4 + 1)]
            centroids[:, column * 4 + row] = np.take_along_axis(inside, cell[..., None], 1).mean(1)
    offset = np.arange(pairs)[:, None] * CENTROIDS
    for _ in range(ROUNDS):
        # nearest: the smallest |c|^2 / 2 - c x
        scores = points @ centroids.transpose(0, 2, 1) - np.square(centroids).sum(-1)[:, None] / 2
        cells = (scores.argmax(-1) + offset).ravel()  # [pairs * n]
        counts = np.bincount(cells, minlength=pairs * CENTROIDS)
        sums = [np.bincount(cells, points[..., axis].ravel(), pairs * CENTROIDS) for axis in (0, 1)]
        means = (np.stack(sums, -1) / np.maximum(counts, 1)[:, None]).reshape(centroids.shape)
        moved = np.where(counts.reshape(pairs, CENTROIDS, 1) > 0, means, centroids).astype(np.float32)
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids
