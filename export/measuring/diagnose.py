"""A drafter with the settings that checkpoints get wrong, and in other formats, to say which of them would help.

Readings are compared in float32, the current one among them: what its format costs is no reason to read it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import FINAL_NORM, LAYERS
from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.drafters.assistant import Assistant
from edgespec.export.drafters.dflash import DFlash
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.eagle3 import EMBEDDED, FUSED, TAPS
from edgespec.export.drafters.heads import CUT, FUSE
from edgespec.export.drafters.mtp import TARGET_NORM, Mtp
from edgespec.export.drafters.vocabulary import HEAD_WEIGHT
from edgespec.export.measuring.guesses import LEAST, Text, accepted, decoder_of, opened, streams, tapped
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.derived import ExtendedCheckpoint, held
from edgespec.runtimes.files.formats import FOUR_BITS, Format
from edgespec.runtimes.files.staged import scratch
from edgespec.runtimes.slots.slot import Slot

Array = NDArray[np.float32]
HELPS = 0.05  # how much more often first guesses must be right


def best_setting(drafter: Drafter, target: Slot, texts: Sequence[Sequence[int]], given: int) -> str:
    """Which setting would make first guesses better, in words; "" = none of those that are tried.

    Args:
        target: gives its residual stream after any number of layers.
        given: how many tokens of each it was given; guesses of those do not count.
    """
    wanted_at = {0} | {at + shift for at in drafter.tapped for shift in (-1, 0, 1) if 0 <= at + shift <= target.layers}
    found_at = [streams(target, text, wanted_at) for text in texts]
    ends = np.concatenate([[number] * (len(text) - 2) for number, text in enumerate(texts)])  # [N]: which text's
    wanted = np.concatenate([np.asarray(text)[2:] for text in texts])  # [N]
    counted = np.concatenate([np.arange(2, len(text)) >= given for text in texts])  # [N]

    def rows(at: int, first: int) -> Array:  # [N, hidden]
        return np.concatenate([found[at][first : len(found[at]) - 2 + first] for found in found_at])

    shares: dict[tuple[int, bool, bool, int], float] = {}
    before = drafter.arch.settings.flag("norm_before_residual")
    orders = (1, -1) if len(set(drafter.tapped)) > 1 else (1,)
    for shift, swapped, residual, order in product((0, -1, 1), (False, True), (before, not before), orders):
        if not all(0 <= at + shift <= target.layers for at in drafter.tapped):
            continue
        taps = np.concatenate([rows(at + shift, 0) for at in drafter.tapped[::order]], -1)  # [N, k * hidden]
        guesses = _guesses(drafter, rows(0, 1), taps, ends, swapped, residual)  # [N]
        shares[shift, swapped, residual, order] = float((guesses == wanted)[counted].mean())
    best = max(shares, key=lambda each: shares[each])
    if shares[best] < shares[0, False, before, 1] + HELPS:
        return ""
    shift, swapped, residual, order = best
    words = [f"{TAPS}: {[at + shift for at in drafter.tapped[::order]]}"] if shift or order < 0 else []
    words += [f"norm_before_residual: {str(residual).lower()}"] if residual != before else []
    words += ["the hidden state before the embedding, which this layout does not have"] if swapped else []
    return f"{shares[best]:.0%} would be right with {', '.join(words)} in its config.json"


def _guesses(
    drafter: Drafter,
    embedded: Array,  # [n, hidden]
    taps: Array,  # [n, k * hidden]
    ends: NDArray[np.int64],  # [n]
    swapped: bool,
    residual: bool,
) -> NDArray[np.int64]:
    """First guesses [n] of entries [n] of several texts, one after the other; ``ends`` says whose each is.

    Of the first layer alone, which is all that most drafters have.
    """
    arch, source = drafter.arch, drafter.arch.source
    facts, layer = arch.facts, f"{LAYERS}.0"

    def read(name: str) -> Array:
        return source.read(f"{name}.weight")

    def norm(x: Array, name: str) -> Array:
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(arch.eps)) * read(name)
        return y

    if arch.settings.flag("norm_before_fc"):
        taps = norm(taps, "input_norm")
    if arch.settings.flag("fc_norm"):
        each = np.split(taps, taps.shape[1] // facts.hidden, -1)
        taps = np.concatenate([norm(x, f"fc_norm.{at}") for at, x in enumerate(each)], -1)
    g: Array = taps @ source.read(FUSE).T
    halves = [norm(embedded, f"{layer}.{EMBEDDED}"), norm(g, f"{layer}.{FUSED}")]
    x = np.concatenate(halves[::-1] if swapped else halves, -1)
    n, dim = len(x), facts.head_dim
    q, k, v = ((x @ read(f"{layer}.self_attn.{part}_proj").T).reshape(n, -1, dim) for part in "qkv")
    rule = arch.rule(0)
    if rule.q_norm and rule.k_norm:
        q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
    cos, sin = (np.tile(table[:, None], (1, 1, 2)) for table in arch.rotaries["rope"].tables(n, facts.context))
    q, k = (each * cos + np.concatenate((-each[..., dim // 2 :], each[..., : dim // 2]), -1) * sin for each in (q, k))
    out = np.zeros((n, facts.heads, dim), np.float32)
    above = np.triu(np.ones((n, n), bool), 1) | (ends[:, None] != ends)  # [n, n]: not to be seen
    for head in range(facts.heads):
        kv = head * facts.kv_heads // facts.heads
        scores = q[:, head] @ k[:, kv].T * np.float32(dim**-0.5)
        scores[above] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
    u = (halves[1] if residual else g) + out.reshape(n, -1) @ read(f"{layer}.self_attn.o_proj").T
    b = norm(u, f"{layer}.post_attention_layernorm")
    gate = b @ read(f"{layer}.mlp.gate_proj").T
    y = u + (gate / (1 + np.exp(-gate)) * (b @ read(f"{layer}.mlp.up_proj").T)) @ read(f"{layer}.mlp.down_proj").T
    head_name = HEAD_WEIGHT if drafter.tokens is None else CUT
    best = (norm(y, FINAL_NORM) @ source.read(head_name).T).argmax(-1)
    found: NDArray[np.int64] = best if drafter.tokens is None else drafter.tokens[best]
    return found


UNSAID = ", which this layout does not have"
RAW = "the hidden state before the model's final norm"
SCALED = 1.5  # from this scale of embeddings on, it makes a difference whether a drafter was trained on it


@dataclass(frozen=True)
class Reading:
    """One of them.

    Attributes:
        words: what is other.
        tapped: which boundaries of the target are looked at, in order.
        flags: attributes of the architecture, by name; ``source`` is another checkpoint.
        mask: the token that stands for a guess of a block; None = as it was read.
        scale: what embeddings are multiplied by, as the target sees them.
    """

    words: str
    tapped: tuple[int, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    mask: int | None = None
    scale: float = 1.0


def as_read(drafter: Drafter) -> Reading:
    """Return the current reading."""
    arch = drafter.arch
    names = [name for name in ("hidden_first", "raw") if hasattr(arch, name)]
    return Reading("", drafter.tapped, {name: getattr(arch, name) for name in names})


def other_readings(drafter: Drafter, layers: int, scale: float) -> list[Reading]:
    """Return what a checkpoint may have meant; none for EAGLE's, which ``best_setting`` reads in numpy.

    Args:
        scale: what the target multiplies embeddings by.
    """
    arch, tapped = drafter.arch, drafter.tapped
    first = as_read(drafter)
    found = []
    if isinstance(arch, Mtp):
        for hidden_first, raw in product((False, True), (False, True)):
            order = "hidden state before the embedding" if hidden_first else "embedding before the hidden state"
            words = [f"the {order}"] if hidden_first != arch.hidden_first else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, tapped, {"hidden_first": hidden_first, "raw": raw}))
        if arch.norm_weight_is_offset:
            stored = f"its norms as they are stored, without the 1 that this model's add{UNSAID}"
            found.append(Reading(stored, tapped, {**first.flags, "source": _without_one(arch)}))
    if isinstance(arch, Assistant):
        for raw, last in product((False, True), (layers, layers - 1)):
            words = [f"the hidden state after layer {last} of {layers}"] if last != layers else []
            words += [RAW] if raw else []
            found.append(Reading(" and ".join(words) + UNSAID, (last,), {"raw": raw}))
    if isinstance(arch, DFlash):
        for shift, step in product((0, -1, 1), (1, -1)):
            others = tuple(at + shift for at in tapped[::step])
            if all(1 <= at <= layers for at in others):
                ids = [at - 1 for at in others]  # of a list that counts outputs of layers
                found.append(Reading(f"target_layer_ids: {ids} in its config.json", others))
        for mask in sorted(arch.masks - {arch.mask}):
            found.append(Reading(f"mask_token_id: {mask} in its config.json", tapped, mask=mask))
    if isinstance(arch, (Assistant, DFlash)) and scale >= SCALED:
        stored = f"embeddings as they are stored, not {scale:.3g} times that, as the model has them{UNSAID}"
        found.append(Reading(stored, tapped, first.flags, scale=1 / scale))
    same = first.tapped, first.flags, None, 1.0
    return [each for each in found if (each.tapped, each.flags, each.mask, each.scale) != same]


def _without_one(arch: Mtp) -> ExtendedCheckpoint:
    """Its checkpoint with norms of its own that multiply by what is stored: a converter has added the 1 already."""
    own = [name for name, shape in arch.tensors.items() if len(shape) == 1 and name.endswith("norm.weight")]
    own.remove(f"{TARGET_NORM}.weight")
    return ExtendedCheckpoint(arch.source, {name: held(arch.source.read(name) - np.float32(1)) for name in own})


FORMATS: tuple[Format, ...] = "fp32", "int8", "int4"  # that guesses are compared in
ROWS = 16  # of the embedding, by which its scale is known


@dataclass(frozen=True)
class Trials:
    """First guesses that a target accepts of a drafter that is written in other ways.

    Attributes:
        drafter: what was read.
        choice: how the bundle stores it.
        beside: what temporary files lie beside.
        target: the written target; its slot is overwritten.
        texts: that it wrote, with what the drafter looks at.
        threads: of passes.
    """

    drafter: Drafter
    choice: WeightChoice
    beside: Path
    target: Slot
    texts: Sequence[Text]
    threads: int | None

    def formats(self) -> dict[Format, float]:
        """By the formats that it could have been exported in, under the same ``--head-format``."""
        others = [form for form in FORMATS if form != self.choice.format]
        return {form: self._share(self._in(form)) for form in others}

    def hint(self, known: float) -> str:
        """Say what would help one whose first guesses are right at the rate ``known``; "" = nothing known."""
        return "; ".join(each for each in self._hints(known) if each)

    def _hints(self, known: float) -> list[str]:
        drafter, whole = self.drafter, WeightChoice.of("fp32", None, None)
        first = as_read(drafter)
        shares = self._shares(whole, [first, *other_readings(drafter, self.target.layers, self._scale())])
        base = shares.pop(first.words)
        best = max(shares, key=lambda words: shares[words], default="")
        found = [f"{shares[best]:.0%} would be right with {best}"] if best and shares[best] >= base + HELPS else []
        if self.choice.format != "fp32" and base >= max(known + HELPS, LEAST):
            found.append(self._format(known, base))
        return found

    def _format(self, known: float, base: float) -> str:
        """Return the smallest format that helps: ``base`` are right in float32."""
        finer = [("--format int8", self._in("int8"))] if self.choice.format != "int8" else []
        if self.choice.drafter_head in FOUR_BITS:
            finer.insert(0, ("--head-format int8", self._in(self.choice.format, "int8")))
        for option, choice in finer:
            if (share := self._share(choice)) >= max(known + HELPS, LEAST):
                return f"{share:.0%} would be right with {option}, {base:.0%} in fp32: it is the format that costs them"
        return f"{base:.0%} would be right with --format fp32: it is the format that costs them"

    def _in(self, form: Format, head: Format | None = None) -> WeightChoice:
        """As ``--format`` would have it, and ``--head-format`` if it is given."""
        if form not in BLOCKS:
            return WeightChoice.of(form, None, None)
        quantizer = self.choice.quantizer.name if self.choice.quantizer else None
        return WeightChoice.of(form, quantizer, head or self.choice.asked)

    def _share(self, choice: WeightChoice) -> float:
        first = as_read(self.drafter)
        return self._shares(choice, [first])[first.words]

    def _shares(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        """By words; it is written once for all readings that differ in what it is given alone."""
        arch, found = self.drafter.arch, dict[str, float]()
        rest = list(readings)
        while rest:
            flags = rest[0].flags
            alike, rest = [r for r in rest if r.flags == flags], [r for r in rest if r.flags != flags]
            said = {name: getattr(arch, name) for name in flags}
            try:
                vars(arch).update(flags)
                found |= self._written(choice, alike)
            finally:
                vars(arch).update(said)
        return found

    def _written(self, choice: WeightChoice, readings: Sequence[Reading]) -> dict[str, float]:
        target, found = self.target, dict[str, float]()
        with scratch(self.beside) as folder:
            part = write_drafter(folder, self.drafter, choice, target.model.graph.operators)
            slot = opened(folder, part, target, self.threads)
            for reading in readings:
                read = self.texts
                if reading.tapped != self.drafter.tapped:
                    read = tapped(target, read, reading.tapped)
                decoder = decoder_of(part)
                if reading.mask is not None:
                    decoder = decoder.model_copy(update={"mask": reading.mask})
                given = part.model_copy(update={"decoder": decoder})
                found[reading.words] = accepted(target, slot, given, read, 1, reading.scale).rates[0]
        return found

    def _scale(self) -> float:
        """Return what the target multiplies embeddings by, where the drafter is given them as they are."""
        of = self.drafter.arch.target
        if of is None:
            return 1.0
        stored = of.source.read(of.embedding, slice(0, ROWS))  # [rows, hidden]
        seen = self.target.embed(np.arange(len(stored)))  # the same, as the target sees them
        return float(np.linalg.norm(seen) / max(np.linalg.norm(stored), 1e-9))
