"""Costs of passes and drafts of a bundle in one situation: measured, scaled, or assumed.

Time is taken to be bytes over a rate: a pass over n rows after d tokens takes

    weights(n) + attention(n) d        weights(1) = bytes of weights / rate

where weights(n) follows a verify curve, and attention(n) is that of ``traffic.attention_bytes``.  A profile gives both
by least squares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.registry import AR, METHODS
from edgespec.formulas.cost import ASSUMED_VERIFY, rising
from edgespec.planning.profiles import Profile, export_busy, manifest_hash
from edgespec.planning.traffic import (
    attention_bytes,
    early_exit_cost_ratio,
    fuse_weights,
    head_pass_bytes,
    kept_share,
    kv_token_bytes,
    layer_size,
    layer_weights,
    read_bytes,
    verify_curve,
    weight_size,
)
from edgespec.runtimes.files.attention import default_attention
from edgespec.runtimes.files.formats import FOUR_BITS, SPECS, Format
from edgespec.runtimes.files.manifest import HeadGroup, Manifest, ModelPart, Operators, SkipSetPart
from edgespec.runtimes.options import RunOptions

# from best to worst: measured with this bundle on this device; its figures for another bundle, scaled; what the
# exporting machine measured; formulas with only assumptions
Basis = Literal["calibrated", "scaled", "exported", "assumed"]
Points = Sequence[tuple[float, float]]

STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/dev/measurements.md)
# time per byte of int4 weights, stock over native operators: 16.8 and 8.9 ms a step of the 0.5B shape
# (docs/dev/measurements.md) for 20 and 18 bytes of 32 weights
STOCK_STEP = 1.7
# milliseconds that control adds to a round, whether it drafts or not: the embedded model's rounds of 0.08 ms, where
# no method is faster, take 0.022 ms more than plain decoding's (docs/dev/planning.md)
CONTROL = 0.022
EXPORT_DEPTH = 512  # tokens before the passes that an export times, where it does not say


def curve_of(form: Format, operators: Operators) -> Points:
    """v(n), the time of a pass over n rows over that of one row, where nothing was measured, as (n, v) ascending.

    From the machines of docs/dev/measurements.md, 2 threads, short contexts; what reads the keys and values of a
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

    Between measured rows and depths it is linear, beyond the last of either it continues with the last slope, and
    before the first with the first one.  More rows, or more depth, never cost less: a dip is noise.
    """

    table: Mapping[int, Mapping[int, float]]

    def ms(self, rows: float, depth: float) -> float:
        """Time of a pass over ``rows`` (may be a mean) after this many tokens."""
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


def plain_points(profile: Profile) -> Points:
    """One-row passes of the fastest plain decoding by depth; where there is one graph, those of its passes."""
    if profile.plain and profile.operators == "stock":
        return rising(profile.plain)
    return rising({depth: times[min(times)] for depth, times in profile.passes.items()})


class Costs:
    """The best known costs of passes and drafts of a bundle after this many tokens.

    Times are in milliseconds, or in those of a byte of weights where ``basis`` is assumed.  Figures of a busy machine,
    in a profile or from the export, are not used; ``notes`` reports it.
    """

    pass_ms: Callable[[float], float]  # rows -> a pass of the graph that runs every method
    plain: float  # a one-row pass of the fastest plain decoding
    rate: float  # bytes of weights that a draft step reads in a unit of time
    per_kv: float  # time that a byte of keys and values takes it

    def __init__(self, manifest: Manifest, use: RunOptions, profile: Profile | None, depth: float) -> None:
        self.manifest, self.target, self.use, self.how = manifest, manifest.target, use, use.operators
        self.depth = depth  # tokens before a pass
        self.attention = use.attention or default_attention(self.target)
        self.weights, self.kv = read_bytes(self.target, self.how), kv_token_bytes(self.target, self.how, use.attention)
        # (method, whether it is a round's first) -> a draft step as it was timed; None = by bytes
        self.measured: Callable[[str, bool], float | None] = lambda *_: None
        self.other = 0.0  # time of a round without its pass and drafts
        self.control = CONTROL  # time of adaptive control
        self.prefill: float | None = None  # tokens per second; None = unknown
        self.notes: list[str] = []  # assumptions, as text
        if profile is None or profile.busy:
            self.basis: Basis = self._by_bytes()
            if profile is not None:
                self.notes.append(f"the calibration is not used, because {profile.busy}")
            elif self.basis == "assumed" and (busy := export_busy(manifest.cost)):
                self.notes.append(f"the export's times are not used, because {busy}")
            return
        there = (profile.operators, profile.device, profile.bundle)
        same = there == (self.how, use.device, manifest_hash(manifest))
        same = same and (self.how == "native" or profile.strict == use.strict)
        self.basis = self._calibrated(profile) if same else self._scaled(profile)
        self.other = profile.trials[AR].other_ms if AR in profile.trials else 0.0

    def step_ms(self, method: str, first: bool) -> float:
        """Time a draft step, or a round's first; of methods with heads one look at them."""
        if (known := self.measured(method, first)) is not None:
            return known
        weights, kv = self._draft_bytes(method, first)
        return weights / self.rate + kv * self.depth * self.per_kv

    def v(self, rows: float) -> float:
        """Verification cost of n rows relative to a plain step, without drafting."""
        return (self.pass_ms(rows) + self.other) / (self.plain + self.other)

    def controlled(self, rows: float) -> float:
        """Return ``v`` with the cost of control in a method's round."""
        return self.v(rows) + self.control / (self.plain + self.other)

    def c(self, method: str, first: bool = False) -> float:
        """Time of a draft step, or of a round's first, over a round of plain decoding."""
        return self.step_ms(method, first) / (self.plain + self.other)

    # -- from elsewhere ------------------------------------------------------------------------------------------------

    def _calibrated(self, profile: Profile) -> Basis:
        """Take times of a profile of this very bundle; steps that it lacks as the export says, against its pass."""
        depth, passes, plain = self.depth, PassTimes(profile.passes), plain_points(profile)
        (one, slope), deepest = passes.split(1), max(profile.passes)
        self.pass_ms, self.plain = lambda rows: passes.ms(rows, depth), line(plain, depth)
        if depth - deepest > deepest / 2:
            self.notes.append(f"passes at depth {depth:.0f} go on as they did up to {deepest}")
        if self.use.threads != profile.threads:
            self.notes.append(f"{self.use.threads} threads take what {profile.threads} do")
        if self.how == "native" and profile.attention not in (None, self.attention):
            ratio = self.kv / max(profile.kv_bytes, 1)

            def moved(times: PassTimes, rows: float) -> float:
                return times.ms(rows, depth) + times.split(rows)[1] * depth * (ratio - 1)

            self.pass_ms = lambda rows: moved(passes, rows)
            self.plain = moved(PassTimes({int(d): {1: ms} for d, ms in plain}), 1)
            self.notes.append(f"attention {self.attention} takes what {profile.attention} does, by its bytes")

        def measured(method: str, first: bool) -> float | None:
            if points := (first and profile.first_drafts.get(method)) or profile.drafts.get(method):
                return line(rising(points), depth)
            known = self._exported_step(method, first)
            return None if known is None else known * (one + slope * depth)

        self.rate = profile.weight_bytes / max(one, 1e-6)  # bytes a millisecond
        self.per_kv, self.measured = slope / max(profile.kv_bytes or self.kv, 1), measured
        self.prefill = _prefill(profile, depth)
        return "calibrated"

    def _scaled(self, profile: Profile) -> Basis:
        """Scale a profile of another bundle by bytes; its curve holds where format and operators are the same."""
        target, how, use = self.target, self.how, self.use
        passes = PassTimes(profile.passes)
        one, slope = passes.split(1)
        rate = profile.weight_bytes / max(one, 1e-6)  # bytes a millisecond
        same = (profile.format, profile.operators, profile.device) == (target.format, how, use.device)
        theirs = profile.kv_bytes or kv_token_bytes(target, profile.operators)
        slower = STOCK_STEP if target.format in FOUR_BITS and how != profile.operators else 1.0
        slower = slower if how == "stock" else 1 / slower
        slower *= SPECS[target.format].step / SPECS[profile.format].step
        curve = curve_of(target.format, how)

        def own(rows: float) -> float:
            """Read the verify curve of the profile's machine, or of another one."""
            return passes.split(rows)[0] / max(one, 1e-6) if same else line(curve, rows)

        def reading(rows: float) -> float:
            """Attention here over that of the profile."""
            kind = profile.attention or "f16"
            return self._attended(rows) / attention_bytes(profile.facts, theirs, rows, profile.operators, kind)

        def pass_ms(rows: float) -> float:
            # the curve of a mixture of experts is not that of matrices that all rows go through
            v = own(rows) if same and profile.facts.experts else verify_curve(target, rows, how, own)
            return slower * self.weights / rate * v + passes.split(rows)[1] * reading(rows) * self.depth

        self.pass_ms, self.plain = pass_ms, pass_ms(1) / _padding(use, profile)
        self.rate, self.per_kv = rate / slower, slope * reading(1) / max(self.kv, 1)
        if prefill := _prefill(profile, self.depth):
            self.prefill = prefill * layer_weights(profile.facts) / layer_weights(target.facts)
        notes = {
            f"times are those of {profile.name} ({profile.format}, {profile.operators}), by bytes": True,
            f"the verify curve of {how} {target.format} is another machine's": not same,
            f"{how} operators take {slower:.2g} times a byte what {profile.operators} do": how != profile.operators,
            f"{use.threads} threads take what {profile.threads} do": use.threads != profile.threads,
            f"device {use.device} takes what {profile.device} does": use.device != profile.device,
        }
        self.notes = [note for note, holds in notes.items() if holds]
        return "scaled"

    def _by_bytes(self) -> Basis:
        """Use the exporting machine's measurements, if operators match and it was not busy.

        Else curves of another machine, and bytes: the unit is a byte's time.
        """
        target, how, depth, cost = self.target, self.how, self.depth, self.manifest.cost
        times = {int(rows): float(ms) for rows, ms in cost.get("verify_ms", {}).items()}
        points: Points = rising(times)
        known = times and not export_busy(cost) and (how, self.use.device) == (target.layout, "cpu")
        curve, before, per_byte, padded, unit = curve_of(target.format, how), 0.0, 1.0, _padding(self.use), 1.0
        if known:
            before = float(cost.get("depth", EXPORT_DEPTH))
            one = line(points, 1)
            per_byte = one / (self.weights + self._attended(1) * before)
            step = cost.get("plain_ms", one)
            padded = max(1.0, one / step) if how == "stock" and self.use.strict else 1.0
            unit = step if how == "stock" else one  # a row without padding; native operators have none
            self.notes = ["this device is like the exporting machine"]
        else:
            v = partial(verify_curve, target, operators=how, v=lambda rows: line(curve, rows))
            points, self.control = [(n, self.weights * v(n)) for n, _ in curve], 0.0
            self.notes = [f"the verify curve of {how} {target.format} is another machine's"]
            self.notes.append("a draft step takes what its bytes do")

        def pass_ms(rows: float) -> float:
            then = line(points, rows)
            return max(then + self._attended(rows) * per_byte * (depth - before), then / 2)

        def measured(method: str, first: bool) -> float | None:
            if not known or (step := self._exported_step(method, first)) is None:
                return None
            read = self._draft_bytes(method, first)[1]
            return max(float(step * unit) + read * (depth - before) * per_byte, 0.0)

        self.pass_ms, self.plain, self.measured = pass_ms, pass_ms(1) / padded, measured
        self.rate, self.per_kv = 1 / per_byte, per_byte
        return "exported" if known else "assumed"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _attended(self, rows: float) -> float:
        """Count attention's cost per token before a pass, in bytes read."""
        return attention_bytes(self.target.facts, self.kv, rows, self.how, self.attention)

    def _exported_step(self, method: str, first: bool) -> float | None:
        """Return the export's measurement: a step in passes of one row; None = none."""
        part = self.manifest.methods[method]
        return part.first_cost if first and part.first_cost is not None else part.draft_cost

    def _draft_bytes(self, method: str, first: bool) -> tuple[float, float]:
        """Count the bytes of one draft step: (bytes of weights, bytes per token before it).

        Those of weights times what its rows take over one row: a drafter's first step reads what was accepted, too.
        """
        target, part, how, weights, kv = self.target, self.manifest.methods[method], self.how, self.weights, self.kv
        needs = METHODS[method].needs
        if needs in ("draft", "drafter"):
            if (draft := self.manifest.beside(needs)) is None:  # a twentieth of the target (cost.ASSUMED_DRAFT)
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
            return float(sum(head_pass_bytes(target, group, how) for group in groups)), 0.0
        if needs == "heads":
            exits = [group.layer for group in target.heads if group.name in part.heads]
            below = min(exits, default=target.facts.layers // 2)
            return weights * early_exit_cost_ratio(target, below, how), kv * below / target.facts.layers
        return 0.0, 0.0


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
    """Tokens per second; deeper ones take longer."""
    if not profile.prefill:
        return None
    return 1000 / line(rising({at: 1000 / rate for at, rate in profile.prefill.items()}), depth)


def _step_bytes(part: ModelPart, first: bool, operators: Operators) -> float:
    """Count the bytes of weights that a drafter's step reads, times what its rows take over one row.

    A round's first step also reads the accepted tokens; a further one continues from its own hidden state::

        eagle       first: all, with the matrix that fuses         further: all except that matrix
        mtp         all                                            all
        assistant   all except the matrix back to the target's width  all
        dflash      the block, and before it the draft cache: the matrix that fuses, keys and values of all layers
    """
    decoder, facts = part.decoder, part.facts
    assert decoder is not None
    curve, layers = curve_of(part.format, operators), layer_size(part, operators)
    fuse = fuse_weights(part) * weight_size(part.head_format or part.format, operators)
    every = float(read_bytes(part, operators))
    if decoder.block:
        block = (every - fuse) * (line(curve, decoder.block) if first else 1.0)
        # entries use one matrix for keys, values and (unused) queries
        entries = fuse + facts.layers * facts.hidden * facts.head_dim * (facts.heads + 2 * facts.kv_heads) * layers
        return block + (entries * line(curve, FIRST_ROWS) if first else 0.0)
    if decoder.reads:
        return every - (decoder.columns // 2 * facts.hidden * layers if first else 0.0)
    if first:
        return every * line(curve, FIRST_ROWS)
    return every - (fuse if decoder.fusing.once else 0.0)
