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

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of passes.

    Between measured rows and depths it is linear, beyond the last of either it goes on with the last slope, and before
    the first with the first one.  More rows, or more depth, never cost less: a dip is noise.

    Attributes:
        table: by depth (tokens before the pass), by rows.
    """

    table: Mapping[int, Mapping[int, float]]

    def ms(self, rows: float, depth: float) -> float:
        """Of so many rows (a mean of passes need not be whole) after so many tokens."""
        return line(rising({at: line(rising(points), rows) for at, points in self.table.items()}), depth)

    @property
    def deepest(self) -> int:
        """The last depth that was measured."""
        return max(self.table)

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


# v(n), the time of a pass over n rows over that of one row, where nothing was measured: from the machines of
# docs/project/measurements.md, 2 threads, short contexts; what reads the keys and values of a long one is added to them
CURVES: Mapping[Operators, Mapping[Format, Mapping[int, float]]] = {
    "native": {name: spec.verify for name, spec in SPECS.items()},
    "stock": {name: spec.stock_verify or ASSUMED_VERIFY for name, spec in SPECS.items()},
}
STEP: Mapping[Format, float] = {name: spec.step for name, spec in SPECS.items()}
STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/project/measurements.md)
# what a byte of weights takes with stock operators over native ones: 16.8 and 8.9 ms a step of the 0.5B shape
# (docs/project/measurements.md) for 20 and 18 bytes of 32 weights
STOCK_STEP: Mapping[Format, float] = dict.fromkeys(FOUR_BITS, 1.7)


def step_bytes(part: ModelPart, first: bool, operators: Operators) -> float:
    """Count the bytes of weights that a drafter's step reads, times what its rows take over one row.

    A round's first step also takes in what was accepted before; a further one goes on from its own hidden state::

        eagle       first: all, with the matrix that fuses         further: all but that matrix
        mtp         all                                            all
        assistant   all but the matrix back to the target's width  all
        dflash      the block, and before it the draft cache: the matrix that fuses, keys and values of all layers

    Args:
        part: the drafter.
        first: of a round.
        operators: that compute it.
    """
    decoder, facts = part.decoder, part.facts
    assert decoder is not None
    curve, layers = rising(CURVES[operators][part.format]), layer_size(part, operators)
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


def token_bytes(part: ModelPart, target: ModelPart, operators: Operators, attention: Attention | None) -> float:
    """Bytes of keys and values of a token: the drafter's own, or those of the target's layers that it reads."""
    reads = part.decoder.reads if part.decoder else []
    if not reads:
        return kv_token_bytes(part, operators)
    dims = target.facts.dims
    return kv_token_bytes(target, operators, attention) * sum(dims[at] for at in reads) / sum(dims)


# milliseconds that control adds to a round, whether it drafts or not: the embedded model's rounds of 0.08 ms, where
# nothing pays, take 0.022 ms more than plain decoding's (docs/planning.md)
CONTROL = 0.022
Step = tuple[str, bool]  # method; whether it is a round's first
EXPORT_DEPTH = 512  # tokens before the passes that an export times, where it does not say


@dataclass
class Costs:
    """Times in milliseconds, or in passes over one row where ``known`` is false.

    Attributes:
        plain: a one-row pass of the fastest plain decoding, at the depth in question.
        pass_ms: rows -> a pass of the graph that runs every method, at that depth.
        step_ms: (method, whether it is a round's first) -> one draft step, or one look at its heads.
        other: what a round takes beside its pass and drafts.
        control: what deciding how much to draft adds to it.
        prefill: tokens a second; None = not known.
        known: whether times are those of the device in question.
        assumed: what is assumed, in words.
    """

    plain: float
    pass_ms: Callable[[float], float]
    step_ms: Callable[[str, bool], float]
    other: float = 0.0
    control: float = 0.0
    prefill: float | None = None
    known: bool = False
    assumed: list[str] = field(default_factory=list)

    def v(self, rows: float) -> float:
        """Time of a round over so many rows, drafts apart, over one of plain decoding."""
        return (self.pass_ms(rows) + self.other) / (self.plain + self.other)

    def controlled(self, rows: float) -> float:
        """Return ``v`` with what control adds to a method's round."""
        return self.v(rows) + self.control / (self.plain + self.other)

    def c(self, method: str, first: bool = False) -> float:
        """Time of a draft step, or of a round's first, over a round of plain decoding."""
        return self.step_ms(method, first) / (self.plain + self.other)


def is_of(profile: Profile, manifest: Manifest, use: RunOptions) -> bool:
    """Whether a profile was measured with this very bundle, on these operators and this device."""
    return (
        profile.bundle == manifest_hash(manifest)
        and (profile.operators, profile.device) == (use.operators, use.device)
        and (use.operators == "native" or profile.strict == use.strict)
    )


def plain_points(profile: Profile) -> Points:
    """One-row passes of the fastest plain decoding by depth; where there is one graph, those of its passes."""
    if profile.plain and profile.operators == "stock":
        return rising(profile.plain)
    return rising({depth: times[min(times)] for depth, times in profile.passes.items()})


def calibrated(manifest: Manifest, use: RunOptions, profile: Profile, depth: float) -> Costs:
    """Of a profile of this very bundle."""
    passes, plain = PassTimes(profile.passes), plain_points(profile)
    more = max(0.0, depth - passes.deepest)
    found = Costs(
        plain=line(plain, depth),
        pass_ms=lambda rows: passes.ms(rows, depth),
        step_ms=lambda *step: _measured_step(manifest, use, profile, step, depth),
        other=profile.trials[AR].other_ms if AR in profile.trials else 0.0,
        control=CONTROL,
        prefill=_prefill(profile, depth),
        known=True,
    )
    if more > passes.deepest / 2:
        found.assumed.append(f"passes at depth {depth:.0f} go on as they did up to {passes.deepest}")
    if use.threads != profile.threads:
        found.assumed.append(f"{use.threads} threads take what {profile.threads} do")
    attention = use.attention or default_attention(manifest.target)
    if use.operators == "native" and profile.attention not in (None, attention):
        ratio = kv_token_bytes(manifest.target, use.operators, attention) / max(profile.kv_bytes, 1)
        found.plain = _other_attention(PassTimes({int(d): {1: ms} for d, ms in plain}), 1, depth, ratio)
        found.pass_ms = lambda rows: _other_attention(passes, rows, depth, ratio)
        found.assumed.append(f"attention {attention} takes what {profile.attention} does, by its bytes")
    return found


def scaled(manifest: Manifest, use: RunOptions, profile: Profile, depth: float) -> Costs:
    """Of a profile of another bundle, by bytes; its verify curve where format and operators are the same."""
    target, passes = manifest.target, PassTimes(profile.passes)
    one, slope = passes.split(1)
    rate = profile.weight_bytes / max(one, 1e-6)  # bytes a millisecond
    weights, kv = read_bytes(target, use.operators), kv_token_bytes(target, use.operators, use.attention)
    same = (profile.format, profile.operators, profile.device) == (target.format, use.operators, use.device)
    theirs = profile.kv_bytes or kv_token_bytes(target, profile.operators)
    slower = _slower(profile.operators, use.operators, target.format)
    slower *= STEP[target.format] / STEP[profile.format]
    curve = rising(CURVES[use.operators][target.format])

    def own(rows: float) -> float:
        """Read the verify curve of the profile's machine, or of another one."""
        return passes.split(rows)[0] / max(one, 1e-6) if same else line(curve, rows)

    def reading(rows: float) -> float:
        """Attention here over that of the profile."""
        mine = attention_bytes(target.facts, kv, rows, use.operators, use.attention or default_attention(target))
        return mine / attention_bytes(profile.facts, theirs, rows, profile.operators, profile.attention or "f16")

    def pass_ms(rows: float) -> float:
        # the curve of a mixture of experts is not that of matrices that all rows go through
        v = own(rows) if same and profile.facts.experts else verify_curve(target, rows, use.operators, own)
        weighed = slower * weights / rate * v
        return weighed + passes.split(rows)[1] * reading(rows) * depth

    strict = pass_ms(1)
    padded = _padding(use) if profile.operators != "stock" or not profile.strict else _measured_padding(profile, use)
    found = Costs(
        plain=strict / padded,
        pass_ms=pass_ms,
        step_ms=lambda *step: _step_by_bytes(manifest, use, step, depth, rate / slower, slope * reading(1) / kv),
        other=profile.trials[AR].other_ms if AR in profile.trials else 0.0,
        control=CONTROL,
        known=True,
        assumed=[f"times are those of {profile.name} ({profile.format}, {profile.operators}), by bytes"],
    )
    if prefill := _prefill(profile, depth):
        found.prefill = prefill * layer_weights(profile.facts) / layer_weights(target.facts)
    if not same:
        found.assumed.append(f"the verify curve of {use.operators} {target.format} is another machine's")
    if use.operators != profile.operators:
        found.assumed.append(f"{use.operators} operators take {slower:.2g} times a byte what {profile.operators} do")
    if use.threads != profile.threads:
        found.assumed.append(f"{use.threads} threads take what {profile.threads} do")
    if use.device != profile.device:
        found.assumed.append(f"device {use.device} takes what {profile.device} does")
    return found


def exported(manifest: Manifest, use: RunOptions, depth: float) -> Costs | None:
    """Take what the exporting machine measured; None = nothing, with other operators, or while it was busy."""
    if export_busy(manifest.cost):
        return None
    times = {int(rows): float(ms) for rows, ms in manifest.cost.get("verify_ms", {}).items()}
    if not times or use.operators != manifest.target.layout or use.device != "cpu":
        return None
    target, before = manifest.target, float(manifest.cost.get("depth", EXPORT_DEPTH))
    weights, kv = read_bytes(target, use.operators), kv_token_bytes(target, use.operators, use.attention)
    points = rising(times)
    one = line(points, 1)
    attention = use.attention or default_attention(target)
    per_byte = one / (weights + attention_bytes(target.facts, kv, 1, use.operators, attention) * before)
    step = manifest.cost.get("plain_ms", one)
    padded = max(1.0, one / step) if use.operators == "stock" and use.strict else 1.0

    def step_ms(method: str, first: bool) -> float:
        known = _exported_step(manifest, (method, first))
        if known is None:
            return _step_by_bytes(manifest, use, (method, first), depth, 1 / per_byte, per_byte)
        # the manifest's unit is the step of one row without padding; native operators have none
        unit = step if use.operators == "stock" else one
        return float(known * unit) + _draft_bytes(manifest, use, (method, first))[1] * (depth - before) * per_byte

    pass_ms = _moved(manifest, use, points, per_byte, before, depth)
    return Costs(
        plain=pass_ms(1) / padded,
        pass_ms=pass_ms,
        step_ms=lambda *step: max(step_ms(*step), 0.0),
        control=CONTROL,
        assumed=["this device is like the exporting machine"],
    )


def assumed(manifest: Manifest, use: RunOptions, depth: float) -> Costs:
    """Formulas alone: curves of another machine, and bytes.  The unit is a byte's time."""
    target = manifest.target
    weights = read_bytes(target, use.operators)
    curve = rising(CURVES[use.operators][target.format])
    points = [
        (rows, weights * verify_curve(target, rows, use.operators, lambda n: line(curve, n))) for rows, _ in curve
    ]
    pass_ms = _moved(manifest, use, points, 1.0, 0.0, depth)
    return Costs(
        plain=pass_ms(1) / _padding(use),
        pass_ms=pass_ms,
        step_ms=lambda *step: _step_by_bytes(manifest, use, step, depth, 1.0, 1.0),
        assumed=[
            f"the verify curve of {use.operators} {target.format} is another machine's",
            "a draft step takes what its bytes do",
        ],
    )


# -- parts -----------------------------------------------------------------------------------------------------------


def _moved(
    manifest: Manifest, use: RunOptions, points: Points, per_byte: float, before: float, depth: float
) -> Callable[[float], float]:
    """rows -> a pass at ``depth``, from those at depth ``before``."""
    facts, attention = manifest.target.facts, use.attention or default_attention(manifest.target)
    kv = kv_token_bytes(manifest.target, use.operators, attention)

    def pass_ms(rows: float) -> float:
        known = line(points, rows)
        grown = attention_bytes(facts, kv, rows, use.operators, attention) * per_byte * (depth - before)
        return max(known + grown, known / 2)

    return pass_ms


def _other_attention(passes: PassTimes, rows: float, depth: float, ratio: float) -> float:
    """Time a pass where a token's keys and values have ``ratio`` times the bytes."""
    return passes.ms(rows, depth) + passes.split(rows)[1] * depth * (ratio - 1)


def _slower(there: Operators, here: Operators, form: Format) -> float:
    """Compare what a byte of weights takes with some operators over others, where that is known."""
    known = STOCK_STEP.get(form, 1.0)
    return 1.0 if there == here else known if here == "stock" else 1 / known


def _padding(use: RunOptions) -> float:
    """Compare a strict pass with a plain one."""
    return STRICT if use.operators == "stock" and use.strict and use.device == "cpu" else 1.0


def _measured_padding(profile: Profile, use: RunOptions) -> float:
    """Compare them as a profile has them, at its first depth."""
    depth = min(profile.passes)
    plain = profile.plain.get(depth)
    return profile.passes[depth][1] / plain if plain and _padding(use) > 1 else _padding(use)


def _prefill(profile: Profile, depth: float) -> float | None:
    """Tokens a second; deeper ones take longer."""
    if not profile.prefill:
        return None
    return 1000 / line(rising({at: 1000 / rate for at, rate in profile.prefill.items()}), depth)


def _exported_step(manifest: Manifest, step: Step) -> float | None:
    """Look up what the export measured: a step in passes of one row; None = nothing."""
    method, first = step
    part = manifest.methods[method]
    return part.first_cost if first and part.first_cost is not None else part.draft_cost


def _measured_step(manifest: Manifest, use: RunOptions, profile: Profile, step: Step, depth: float) -> float:
    """Time a draft step at a depth, as measured; else what the export says, or bytes, against the measured pass."""
    method, first = step
    if points := (first and profile.first_drafts.get(method)) or profile.drafts.get(method):
        return line(rising(points), depth)
    one, slope = PassTimes(profile.passes).split(1)
    if (known := _exported_step(manifest, step)) is not None:
        return known * (one + slope * depth)
    kv = profile.kv_bytes or kv_token_bytes(manifest.target, use.operators, use.attention)
    return _step_by_bytes(manifest, use, step, depth, profile.weight_bytes / max(one, 1e-6), slope / kv)


def _step_by_bytes(
    manifest: Manifest, use: RunOptions, step: Step, depth: float, rate: float, per_kv_byte: float
) -> float:
    """One draft step: its bytes of weights over ``rate``, and those of the keys and values that it reads."""
    weights, kv = _draft_bytes(manifest, use, step)
    return weights / rate + kv * depth * per_kv_byte


def _draft_bytes(manifest: Manifest, use: RunOptions, step: Step) -> tuple[float, float]:
    """Count what one draft step reads: (bytes of weights, bytes a token before it).

    Those of weights times what its rows take over one row: a drafter's first step reads what was accepted, too.
    """
    method, first = step
    target, part, how = manifest.target, manifest.methods[method], use.operators
    weights, kv = read_bytes(target, how), kv_token_bytes(target, how, use.attention)
    needs = METHODS[method].needs
    if needs in ("draft", "drafter"):
        if (draft := manifest.beside(needs)) is None:  # a twentieth of the target (cost.ASSUMED_DRAFT)
            return weights / 20, kv / 20
        if draft.decoder is not None:
            return step_bytes(draft, first, how), token_bytes(draft, target, how, use.attention)
        return float(read_bytes(draft, how)), kv_token_bytes(draft, how)
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
