"""What passes and drafts of a bundle take in one situation: measured, moved from elsewhere, or assumed.

Time is taken to be bytes over a rate: a pass over n rows after d tokens takes

    weights(n) + attention(n) d        weights(1) = bytes of weights / rate

where weights(n) follows a verify curve, and attention(n) is that of ``traffic.attention_bytes``.  A profile gives both
by least squares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.registry import AR, METHODS
from edgespec.formulas.cost import ASSUMED_VERIFY, rising
from edgespec.planning.profiles import Profile, export_busy, manifest_hash
from edgespec.planning.traffic import (
    attention_bytes,
    exit_share,
    fuse_weights,
    kept_share,
    kv_token_bytes,
    layer_size,
    layer_weights,
    look_bytes,
    read_bytes,
    verify_curve,
    weight_size,
)
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.formats import FOUR_BITS, SPECS, Attention, Format
from edgespec.runtimes.files.manifest import HeadGroup, Manifest, ModelPart, Operators, SkipSetPart
from edgespec.runtimes.options import RunOptions

# from best to worst: measured with this bundle on this device; its figures for another bundle, scaled; what the
# exporting machine measured; formulas with assumptions alone
Basis = Literal["calibrated", "scaled", "exported", "assumed"]
Points = Sequence[tuple[float, float]]

STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/project/measurements.md)
# what a byte of int4 weights takes with stock operators over native ones: 16.8 and 8.9 ms a step of the 0.5B shape
# (docs/project/measurements.md) for 20 and 18 bytes of 32 weights
STOCK_STEP = 1.7
# milliseconds that control adds to a round, whether it drafts or not: the embedded model's rounds of 0.08 ms, where
# no method is faster, take 0.022 ms more than plain decoding's (docs/planning.md)
CONTROL = 0.022
EXPORT_DEPTH = 512  # tokens before the passes that an export times, where it does not say


def curve_of(form: Format, operators: Operators) -> Points:
    """v(n), the time of a pass over n rows over that of one row, where nothing was measured, as (n, v) ascending.

    From the machines of docs/project/measurements.md, 2 threads, short contexts; what reads the keys and values of a
    long one is added to them.
    """
    spec = SPECS[form]
    return rising(spec.verify if operators == "native" else spec.stock_verify or ASSUMED_VERIFY)


def line(points: Points, at: float) -> float:
    """Value at ``at`` of the line through ``points`` (ascending), continued with its end slopes where they rise."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if at > x1:
        return y1 + max(slope, 0.0) * (at - x1)
    if at < x0:
        return max(y0 - max(slope, 0.0) * (x0 - at), y0 / 2)
    return y0 + slope * (at - x0)


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of passes by depth (tokens before the pass), by rows.

    Between measured rows and depths it is linear, beyond the last of either it goes on with the last slope, and before
    the first with the first one.  More rows, or more depth, never cost less: a dip is noise.
    """

    table: Mapping[int, Mapping[int, float]]

    def ms(self, rows: float, depth: float) -> float:
        """Time a pass over so many rows (a mean of passes need not be whole) after so many tokens."""
        return line(rising({at: line(rising(points), rows) for at, points in self.table.items()}), depth)

    def split(self, rows: float) -> tuple[float, float]:
        """(milliseconds at no depth, milliseconds a token of depth), by least squares; >= 0 each.

        The first is the weights and the host, the second the keys and values that attention reads.
        """
        points = [(depth, line(rising(points), rows)) for depth, points in sorted(self.table.items())]
        if len(points) == 1:
            return points[0][1], 0.0
        middle = sum(depth for depth, _ in points) / len(points)
        mean = sum(ms for _, ms in points) / len(points)
        spread = sum((depth - middle) ** 2 for depth, _ in points)
        slope = max(0.0, sum((depth - middle) * (ms - mean) for depth, ms in points) / spread)
        return max(mean - slope * middle, 0.0), slope


@dataclass
class Costs:
    """Times in milliseconds, or in those of a byte of weights where ``basis`` is assumed.

    Attributes:
        manifest, use, depth: the situation; tokens before a pass.
        basis: what they rest on.
        pass_ms: rows -> a pass of the graph that runs every method.
        plain: a one-row pass of the fastest plain decoding.
        rate: bytes of weights that a draft step reads in a unit of time.
        per_kv: time that a byte of keys and values takes it.
        measured: (method, whether it is a round's first) -> a draft step as it was timed; None = by bytes.
        other: what a round takes beside its pass and drafts.
        control: what deciding how much to draft adds to it.
        prefill: tokens a second; None = not known.
        notes: what is assumed, in words.
    """

    manifest: Manifest
    use: RunOptions
    depth: float
    basis: Basis
    pass_ms: Callable[[float], float]
    plain: float
    rate: float
    per_kv: float
    measured: Callable[[str, bool], float | None] = lambda *_: None
    other: float = 0.0
    control: float = CONTROL
    prefill: float | None = None
    notes: list[str] = field(default_factory=list)

    def step_ms(self, method: str, first: bool) -> float:
        """Time a draft step, or a round's first; of methods with heads one look at them."""
        if (known := self.measured(method, first)) is not None:
            return known
        weights, kv = _draft_bytes(self.manifest, self.use, method, first)
        return weights / self.rate + kv * self.depth * self.per_kv

    def v(self, rows: float) -> float:
        """Time of a round over so many rows, drafts apart, over one of plain decoding."""
        return (self.pass_ms(rows) + self.other) / (self.plain + self.other)

    def controlled(self, rows: float) -> float:
        """Return ``v`` with what control adds to a method's round."""
        return self.v(rows) + self.control / (self.plain + self.other)

    def c(self, method: str, first: bool = False) -> float:
        """Time of a draft step, or of a round's first, over a round of plain decoding."""
        return self.step_ms(method, first) / (self.plain + self.other)


def costs_of(manifest: Manifest, use: RunOptions, profile: Profile | None, depth: float) -> Costs:
    """Choose the best that is known of passes and drafts after so many tokens.

    Figures of a busy machine, in a profile or from the export, are not used; ``notes`` says so.
    """
    if profile is None or profile.busy:
        found, busy = _by_bytes(manifest, use, depth), export_busy(manifest.cost)
        if profile is not None:
            found.notes.append(f"the calibration is not used, because {profile.busy}")
        elif busy and found.basis == "assumed":
            found.notes.append(f"the export's times are not used, because {busy}")
        return found
    same_way = (profile.operators, profile.device) == (use.operators, use.device)
    strict = use.operators == "native" or profile.strict == use.strict
    same = same_way and strict and profile.bundle == manifest_hash(manifest)
    found = (_calibrated if same else _scaled)(manifest, use, profile, depth)
    found.other = profile.trials[AR].other_ms if AR in profile.trials else 0.0
    return found


def plain_points(profile: Profile) -> Points:
    """One-row passes of the fastest plain decoding by depth; where there is one graph, those of its passes."""
    if profile.plain and profile.operators == "stock":
        return rising(profile.plain)
    return rising({depth: times[min(times)] for depth, times in profile.passes.items()})


def _calibrated(manifest: Manifest, use: RunOptions, profile: Profile, depth: float) -> Costs:
    """Take times of a profile of this very bundle; steps that it lacks as the export says, against its pass."""
    passes, plain, notes = PassTimes(profile.passes), plain_points(profile), []
    (one, slope), deepest = passes.split(1), max(profile.passes)
    attention, pass_ms, plain_ms = _attention(manifest, use), lambda rows: passes.ms(rows, depth), line(plain, depth)
    if depth - deepest > deepest / 2:
        notes.append(f"passes at depth {depth:.0f} go on as they did up to {deepest}")
    if use.threads != profile.threads:
        notes.append(f"{use.threads} threads take what {profile.threads} do")
    if use.operators == "native" and profile.attention not in (None, attention):
        ratio = kv_token_bytes(manifest.target, use.operators, attention) / max(profile.kv_bytes, 1)

        def moved(times: PassTimes, rows: float) -> float:
            return times.ms(rows, depth) + times.split(rows)[1] * depth * (ratio - 1)

        pass_ms, plain_ms = lambda rows: moved(passes, rows), moved(PassTimes({int(d): {1: ms} for d, ms in plain}), 1)
        notes.append(f"attention {attention} takes what {profile.attention} does, by its bytes")

    def measured(method: str, first: bool) -> float | None:
        if points := (first and profile.first_drafts.get(method)) or profile.drafts.get(method):
            return line(rising(points), depth)
        known = _exported_step(manifest, method, first)
        return None if known is None else known * (one + slope * depth)

    kv = profile.kv_bytes or kv_token_bytes(manifest.target, use.operators, use.attention)
    rate = profile.weight_bytes / max(one, 1e-6)  # bytes a millisecond
    found = Costs(manifest, use, depth, "calibrated", pass_ms, plain_ms, rate, slope / max(kv, 1), measured)
    found.prefill, found.notes = _prefill(profile, depth), notes
    return found


def _scaled(manifest: Manifest, use: RunOptions, profile: Profile, depth: float) -> Costs:
    """Scale a profile of another bundle by bytes; its verify curve holds where format and operators are the same."""
    target, passes, (one, slope) = manifest.target, PassTimes(profile.passes), PassTimes(profile.passes).split(1)
    rate = profile.weight_bytes / max(one, 1e-6)  # bytes a millisecond
    weights, kv = read_bytes(target, use.operators), kv_token_bytes(target, use.operators, use.attention)
    same = (profile.format, profile.operators, profile.device) == (target.format, use.operators, use.device)
    theirs = profile.kv_bytes or kv_token_bytes(target, profile.operators)
    slower = STOCK_STEP if target.format in FOUR_BITS and use.operators != profile.operators else 1.0
    slower = slower if use.operators == "stock" else 1 / slower
    slower *= SPECS[target.format].step / SPECS[profile.format].step
    curve = curve_of(target.format, use.operators)

    def own(rows: float) -> float:
        """Read the verify curve of the profile's machine, or of another one."""
        return passes.split(rows)[0] / max(one, 1e-6) if same else line(curve, rows)

    def reading(rows: float) -> float:
        """Attention here over that of the profile."""
        mine = attention_bytes(target.facts, kv, rows, use.operators, _attention(manifest, use))
        return mine / attention_bytes(profile.facts, theirs, rows, profile.operators, profile.attention or "f16")

    def pass_ms(rows: float) -> float:
        # the curve of a mixture of experts is not that of matrices that all rows go through
        v = own(rows) if same and profile.facts.experts else verify_curve(target, rows, use.operators, own)
        return slower * weights / rate * v + passes.split(rows)[1] * reading(rows) * depth

    plain, per_kv = pass_ms(1) / _padding(use, profile), slope * reading(1) / max(kv, 1)
    found = Costs(manifest, use, depth, "scaled", pass_ms, plain, rate / slower, per_kv)
    if prefill := _prefill(profile, depth):
        found.prefill = prefill * layer_weights(profile.facts) / layer_weights(target.facts)
    notes = {
        f"times are those of {profile.name} ({profile.format}, {profile.operators}), by bytes": True,
        f"the verify curve of {use.operators} {target.format} is another machine's": not same,
        f"{use.operators} operators take {slower:.2g} times a byte what {profile.operators} do": use.operators
        != profile.operators,
        f"{use.threads} threads take what {profile.threads} do": use.threads != profile.threads,
        f"device {use.device} takes what {profile.device} does": use.device != profile.device,
    }
    found.notes = [note for note, holds in notes.items() if holds]
    return found


def _by_bytes(manifest: Manifest, use: RunOptions, depth: float) -> Costs:
    """Take what the exporting machine measured, where that is of such operators and it was not busy.

    Else curves of another machine, and bytes: the unit is a byte's time.
    """
    target, how = manifest.target, use.operators
    weights, kv = read_bytes(target, how), kv_token_bytes(target, how, use.attention)
    times = {int(rows): float(ms) for rows, ms in manifest.cost.get("verify_ms", {}).items()}
    known = bool(times) and not export_busy(manifest.cost) and (how, use.device) == (target.layout, "cpu")

    def attention(rows: float) -> float:
        return attention_bytes(target.facts, kv, rows, how, _attention(manifest, use))

    curve, before, per_byte, padded, unit = curve_of(target.format, how), 0.0, 1.0, _padding(use), 1.0
    points: Points = [(n, weights * verify_curve(target, n, how, lambda rows: line(curve, rows))) for n, _ in curve]
    if known:
        points, before = rising(times), float(manifest.cost.get("depth", EXPORT_DEPTH))
        one = line(points, 1)
        per_byte = one / (weights + attention(1) * before)
        step = manifest.cost.get("plain_ms", one)
        padded = max(1.0, one / step) if how == "stock" and use.strict else 1.0
        unit = step if how == "stock" else one  # a row without padding; native operators have none

    def pass_ms(rows: float) -> float:
        then = line(points, rows)
        return max(then + attention(rows) * per_byte * (depth - before), then / 2)

    def measured(method: str, first: bool) -> float | None:
        if not known or (cost := _exported_step(manifest, method, first)) is None:
            return None
        read = _draft_bytes(manifest, use, method, first)[1]
        return max(float(cost * unit) + read * (depth - before) * per_byte, 0.0)

    found = Costs(manifest, use, depth, "exported", pass_ms, pass_ms(1) / padded, 1 / per_byte, per_byte, measured)
    found.notes = ["this device is like the exporting machine"]
    if not known:
        found.basis, found.control = "assumed", 0.0
        curve_note = f"the verify curve of {how} {target.format} is another machine's"
        found.notes = [curve_note, "a draft step takes what its bytes do"]
    return found


# -- parts -----------------------------------------------------------------------------------------------------------


def _attention(manifest: Manifest, use: RunOptions) -> Attention:
    return use.attention or default_attention(manifest.target)


def _padding(use: RunOptions, profile: Profile | None = None) -> float:
    """Compare a strict pass with a plain one, as a profile of stock operators has them at its first depth."""
    if use.operators != "stock" or not use.strict or use.device != "cpu":
        return 1.0
    if profile is not None and profile.operators == "stock" and profile.strict:
        depth = min(profile.passes)
        if plain := profile.plain.get(depth):
            return profile.passes[depth][1] / plain
    return STRICT


def _prefill(profile: Profile, depth: float) -> float | None:
    """Tokens a second; deeper ones take longer."""
    if not profile.prefill:
        return None
    return 1000 / line(rising({at: 1000 / rate for at, rate in profile.prefill.items()}), depth)


def _exported_step(manifest: Manifest, method: str, first: bool) -> float | None:
    """Look up what the export measured: a step in passes of one row; None = nothing."""
    part = manifest.methods[method]
    return part.first_cost if first and part.first_cost is not None else part.draft_cost


def _draft_bytes(manifest: Manifest, use: RunOptions, method: str, first: bool) -> tuple[float, float]:
    """Count what one draft step reads: (bytes of weights, bytes a token before it).

    Those of weights times what its rows take over one row: a drafter's first step reads what was accepted, too.
    """
    target, part, how = manifest.target, manifest.methods[method], use.operators
    weights, kv = read_bytes(target, how), kv_token_bytes(target, how, use.attention)
    needs = METHODS[method].needs
    if needs in ("draft", "drafter"):
        if (draft := manifest.beside(needs)) is None:  # a twentieth of the target (cost.ASSUMED_DRAFT)
            return weights / 20, kv / 20
        if draft.decoder is None:
            return float(read_bytes(draft, how)), kv_token_bytes(draft, how)
        reads, dims = draft.decoder.reads, target.facts.dims  # keys and values of the target's layers, or its own
        own = kv * sum(dims[at] for at in reads) / sum(dims) if reads else kv_token_bytes(draft, how)
        return _step_bytes(draft, first, how), own
    if needs == "layers":
        layers = range(target.facts.layers)
        half = SkipSetPart(attention=list(layers)[1::2], mlp=list(layers)[1::2])
        share, kept = kept_share(target, part.skip or half, how)
        return weights * share, kv * kept
    if METHODS[method].at_once:
        groups = [group for group in target.heads if group.name in part.heads]
        groups = groups or [HeadGroup(name=method, kind="medusa", count=4)]
        return float(sum(look_bytes(target, group, how) for group in groups)), 0.0
    if needs == "heads":
        exits = [group.layer for group in target.heads if group.name in part.heads]
        below = min(exits, default=target.facts.layers // 2)
        return weights * exit_share(target, below, how), kv * below / target.facts.layers
    return 0.0, 0.0


def _step_bytes(part: ModelPart, first: bool, operators: Operators) -> float:
    """Count the bytes of weights that a drafter's step reads, times what its rows take over one row.

    A round's first step also takes in what was accepted before; a further one goes on from its own hidden state::

        eagle       first: all, with the matrix that fuses         further: all but that matrix
        mtp         all                                            all
        assistant   all but the matrix back to the target's width  all
        dflash      the block, and before it the draft cache: the matrix that fuses, keys and values of all layers
    """
    decoder, facts = part.decoder, part.facts
    assert decoder is not None
    curve, layers = curve_of(part.format, operators), layer_size(part, operators)
    fuse = fuse_weights(part) * weight_size(part.head_format or part.format, operators)
    every = float(read_bytes(part, operators))
    if decoder.block:
        block = (every - fuse) * (line(curve, decoder.block) if first else 1.0)
        # keys and values of entries come out of one matrix with queries, which nobody needs
        entries = fuse + facts.layers * facts.hidden * facts.head_dim * (facts.heads + 2 * facts.kv_heads) * layers
        return block + (entries * line(curve, FIRST_ROWS) if first else 0.0)
    if decoder.reads:
        return every - (decoder.columns // 2 * facts.hidden * layers if first else 0.0)
    if first:
        return every * line(curve, FIRST_ROWS)
    return every - (fuse if decoder.fusing.once else 0.0)
