"""Search while decoding for sub-layers to skip: SWIFT (Xia et al., arXiv 2410.06916).

Differences from the paper: the objective is predicted speed, not matchness at a fixed ratio, so the search includes the
ratio.  The initial set is scored first.  A set is judged on windows that slide along the text, and leads only after a
second one.  Instead of a Gaussian process, a linear model of each sub-layer's cost in acceptance predicts every set
from the results of others with the same parts.  If int8 weights have two planes, a sub-layer is read whole, read only
by its high plane, or skipped.  The search never sees the text: only sets and counts.

Results are kept in the user's cache folder, in one small JSON file for a bundle (by its weights), the operators and a
kind of text: ``CACHE/skip-sets/WEIGHTS-OPERATORS-KIND.json``.  It is sealed (``runtimes.files.sealed``): a file from
any other program is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.errors import InvalidRequest, first_line
from edgespec.formulas.cost import speedup
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.files.skip_sets import set_file

GAMMA = 8  # longest draft whose speed is predicted
_MODEL_EVERY = 3  # every third candidate is the model's; the paper's 25 suits a search of a thousand
_UNIFORM = 0.3  # share of the other candidates that are random rather than mutations of the best
_CONFIRM = 2  # windows before a set may lead
_AGAIN = 8  # candidates between two scores of the leading set: texts change
_PATIENCE, _SURE_PATIENCE, _SURE = 100, 24, 0.94  # candidates without a better set; fewer above this acceptance
_IN_SIGHT = 1.01  # minimum predicted speed-up of a set that is worth a search
_MOST = 1000  # candidates of one search
_MEMORY = 256.0  # guesses a record remembers; older ones fade
_TRUST = 8.0  # guesses that the model's acceptance counts as
_KEPT = 64  # records that are kept
_LOSS = {"attention": 0.03, "mlp": 0.06}  # prior loss of log acceptance: attention is about twice as skippable
_SPREAD = 0.06  # of that loss
_HIGH_LOSS, _HIGH_SPREAD = 0.003, 0.01  # the same for reading only the high plane

VERSION = 1
_KIND = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass
class Record:
    """Results of a set."""

    matched: float = 0.0  # guesses that were right
    seen: float = 0.0  # guesses that were scored
    windows: int = 0  # times it was scored

    def add(self, matched: int, seen: int) -> None:
        """Add a window; older ones count less."""
        keep = min(1.0, max(_MEMORY - seen, 0.0) / self.seen) if self.seen else 1.0
        self.matched, self.seen = keep * self.matched + matched, keep * self.seen + seen
        self.windows += 1

    def acceptance(self, prior: float) -> float:
        """Return the smoothed share of accepted tokens."""
        return (self.matched + _TRUST * prior) / (self.seen + _TRUST)


class OnlineSearch:
    """Proposes sets and keeps the one of the highest predicted speed.

    It starts from ``initial``, which is scored first.  Where that names high planes, they are a choice; those of the
    first and the last layer, which are never left out, and of the head stay as they are in it.

    ``cost``: set -> cost of a draft step over a plain one; ``verify``: n -> cost of a pass over n rows.
    """

    def __init__(
        self,
        layers: int,
        initial: SkipSet,
        cost: Callable[[SkipSet], float],
        verify: Callable[[int], float],
        seed: int = 0,
    ) -> None:
        self.layers, self.cost, self.verify = layers, cost, verify
        self.best = self.initial = initial
        self.records: dict[SkipSet, Record] = {}
        self.candidates = 0
        self.stopped = "" if layers > 2 else "there is no layer between the first and the last"
        self._random = np.random.default_rng(seed)
        self._since = 0  # candidates since the lead changed
        self._since_best = 0  # candidates since the leading set was scored
        self._challenger: SkipSet | None = None
        self.planes = bool(initial.high_attention or initial.high_mlp)
        count = self._variables
        prior = [(_LOSS["attention"], _SPREAD), (_LOSS["mlp"], _SPREAD)]
        prior += [(_HIGH_LOSS, _HIGH_SPREAD)] * 2 if self.planes else []
        self._prior_loss, spread = np.repeat(np.array(prior, np.float64), count // 2, 0).T  # [all] each
        self._prior_precision = np.diag(spread**-2.0)
        # of log acceptance: by sub-layer that is left out, then by one that is read by its high plane
        self._precision = self._prior_precision  # of the losses, [all] each way
        self._loss = self._prior_loss  # [all]

    # -- judging -----------------------------------------------------------------------------------------------------

    def acceptance(self, skip: SkipSet) -> float:
        """Estimate the acceptance of a set."""
        modelled = math.exp(-float(self._loss @ self._bits(skip)))
        return self.records.get(skip, Record()).acceptance(modelled)

    def speed(self, skip: SkipSet, acceptance: float | None = None) -> float:
        """Predict the speed over plain decoding with a set, at its best draft length."""
        rate = self.acceptance(skip) if acceptance is None else acceptance
        c = self.cost(skip)
        return max(speedup(rate, gamma, c, self.verify) for gamma in range(1, GAMMA + 1))

    # -- searching ---------------------------------------------------------------------------------------------------

    def ask(self) -> SkipSet:
        """Choose the set to score next."""
        for first in (self.initial, self.best):
            if first not in self.records or not self.records[first].windows:
                return first
        if self._challenger is not None:
            return self._challenger
        if self._since_best >= _AGAIN:
            return self.best
        self.candidates += 1
        self._since += 1
        self._since_best += 1
        for _ in range(8):  # something new, if it can be found
            if self.candidates % _MODEL_EVERY == 0:
                found = self._modelled()
            elif self._random.random() < _UNIFORM:
                found = self._uniform()
            else:
                found = self._mutated()
            if found != SkipSet() and found not in self.records:
                return found
        return self._uniform()

    def record_result(self, skip: SkipSet, matched: int, seen: int) -> bool:
        """Learn that ``matched`` of ``seen`` tokens with ``skip`` were right; return whether the lead changed."""
        self.records.setdefault(skip, Record()).add(matched, seen)
        self._fit()
        if skip == self.best:
            self._since_best = 0
        before = self.best
        lead, record = self.speed(self.best), self.records[skip]
        self._challenger = None
        if skip != self.best and self.speed(skip) > lead:
            if record.windows >= _CONFIRM:
                self.best = skip
            else:
                self._challenger = skip
        elif skip == self.best:  # it may have lost its lead to one that was confirmed before
            proven = [other for other, known in self.records.items() if known.windows >= _CONFIRM]
            self.best = max(proven, key=self.speed, default=self.best)
            if self.speed(self.best) <= lead:
                self.best = before
        self._forget()
        if self.best != before:
            self._since = 0
            return True
        self._look_for_the_end()
        return False

    def resume(self, records: dict[SkipSet, Record]) -> None:
        """Continue from the records of an earlier search; of two records of a set, keep the one with more evidence."""
        for skip, record in records.items():
            if record.seen > self.records.get(skip, Record()).seen:
                self.records[skip] = record
        self._fit()
        proven = [skip for skip, record in self.records.items() if record.windows >= _CONFIRM or skip == self.initial]
        self.best = max(proven, key=self.speed, default=self.best)
        self._forget()
        self._since, self._since_best = 0, _AGAIN  # the new text decides first whether it holds
        self.stopped = "" if self.layers > 2 else self.stopped

    def _look_for_the_end(self) -> None:
        known = self.records.get(self.best, Record())
        patience = _PATIENCE
        if known.windows >= _CONFIRM and self._since >= _SURE_PATIENCE and self.acceptance(self.best) >= _SURE:
            hoped = np.maximum(self._loss - np.sqrt(np.diag(np.linalg.inv(self._precision))), 0)
            in_sight = self._fastest(hoped)
            unknown = in_sight == SkipSet()
            promise = 0.0 if unknown else self.speed(in_sight, math.exp(-float(hoped @ self._bits(in_sight))))
            if promise <= _IN_SIGHT * self.speed(self.best):
                patience = _SURE_PATIENCE
        if self._challenger is None and (self._since >= patience or self.candidates >= _MOST):
            self.stopped = f"no better set among the last {self._since} candidates"

    def _forget(self) -> None:
        """Keep only the records that are fastest by the current estimate."""
        if len(self.records) <= _KEPT:
            return
        others = sorted((skip for skip in self.records if skip not in (self.best, self.initial)), key=self.speed)
        for slowest in others[: len(self.records) - _KEPT]:
            del self.records[slowest]

    # -- candidates --------------------------------------------------------------------------------------------------

    @property
    def _variables(self) -> int:
        """Return the sub-layers that may be skipped."""
        return max(0, 2 * (self.layers - 2))

    def _bits(self, skip: SkipSet) -> NDArray[np.bool_]:  # [all]: what the losses are of
        count, inner = self._variables, self.layers - 2
        bits = np.zeros(len(self._loss), bool)
        bits[[layer - 1 for layer in skip.attention]] = True
        bits[[inner + layer - 1 for layer in skip.mlp]] = True
        if self.planes:
            bits[[count + layer - 1 for layer in skip.high_attention if 0 < layer <= inner]] = True
            bits[[count + inner + layer - 1 for layer in skip.high_mlp if 0 < layer <= inner]] = True
        return bits

    def _set(self, bits: NDArray[np.bool_]) -> SkipSet:  # [all]; of what is left out, no plane is named
        count, inner, first = self._variables, self.layers - 2, self.initial
        left = bits[:count]
        high = bits[count:] & ~left if self.planes else np.zeros(count, bool)
        found = [tuple((np.flatnonzero(part) + 1).tolist()) for each in (left, high) for part in np.split(each, 2)]
        ends = [tuple(layer for layer in layers if not 0 < layer <= inner)
                for layers in (first.high_attention, first.high_mlp)]  # fmt: skip
        attention, mlp = (tuple(sorted(more + end)) for more, end in zip(found[2:], ends, strict=True))
        return SkipSet(found[0], found[1], attention, mlp, first.high_head)

    def _uniform(self) -> SkipSet:
        """Sample any set; first its size, because otherwise nearly all would have half of the sub-layers."""
        size = int(self._random.integers(1, max(2, int(0.75 * self._variables) + 1)))
        bits = self._bits(self.initial)
        bits[: self._variables] = False
        bits[self._random.choice(self._variables, size, replace=False)] = True
        return self._set(bits)

    def _mutated(self) -> SkipSet:
        """Change one to three choices of the leading set."""
        bits = self._bits(self.best)
        count = min(int(self._random.integers(1, 4)), self._variables)
        bits[self._random.choice(len(bits), count, replace=False)] ^= True
        return self._set(bits)

    def _fit(self) -> None:
        """Fit a Bayesian linear regression of the log acceptance on the skipped sub-layers."""
        precision = self._prior_precision.copy()
        moment = precision @ self._prior_loss
        for skip, record in self.records.items():
            if record.seen:
                x = self._bits(skip).astype(np.float64)
                rate = (record.matched + 0.5) / (record.seen + 0.5)
                weight = record.seen * rate / (1.05 - rate)  # one over the variance of the logarithm of a share
                precision += weight * np.outer(x, x)
                moment -= weight * x * math.log(rate)
        self._precision, self._loss = precision, np.maximum(np.linalg.solve(precision, moment), 0)

    def _modelled(self) -> SkipSet:
        """Find the fastest new set by a model sampled from the posterior (Thompson sampling)."""
        noise = self._random.standard_normal(len(self._loss))
        return self._fastest(np.maximum(self._loss + np.linalg.solve(np.linalg.cholesky(self._precision).T, noise), 0))

    def _fastest(self, loss: NDArray[np.float64]) -> SkipSet:  # [all]
        """Find the fastest new set if sub-layers cost these losses; none, if every likely set is known.

        Losses add up, so the best set of every size is close to the sub-layers with the smallest loss per saved time:
        only those sets are checked.
        """
        singles = [SkipSet((1,)), SkipSet((), (1,)), SkipSet(high_attention=(1,)), SkipSet(high_mlp=(1,))]
        saved = [1 - self.cost(each) for each in singles[: 4 if self.planes else 2]]
        order = np.argsort(loss / np.maximum(np.repeat(saved, self.layers - 2), 1e-3))
        bits, best, fastest = np.zeros(len(loss), bool), SkipSet(), 0.0
        for at in order:
            bits[at] = True
            skip = self._set(bits)
            speed = self.speed(skip, math.exp(-float(loss @ self._bits(skip))))
            if speed > fastest and skip not in self.records:
                best, fastest = skip, speed
        return best


# -- keeping it --------------------------------------------------------------------------------------------------------


class SkipStore:
    """Reads and writes what one search has learned: of a bundle, the operators that run, and a kind of text.

    Raises:
        InvalidRequest: a kind that cannot be part of a file's name.
    """

    def __init__(self, manifest: Manifest, operators: str, kind: str) -> None:
        if not _KIND.fullmatch(kind):
            raise InvalidRequest(
                f"stream kind {kind!r}: expected up to 32 lower-case letters, digits or dashes", "for example: code"
            )
        self.path = set_file(manifest, operators, kind)
        self.purpose = f"skip sets of {self.path.stem}"  # records for other bundles or kinds of text do not apply
        self.note = ""
        self._read = 0  # time of the file that was read or written last

    def load(self, search: OnlineSearch) -> bool:
        """Load stored records into ``search``; return whether any were new."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        if stat.st_mtime_ns == self._read:
            return False
        self._read = stat.st_mtime_ns
        try:
            data = read_sealed(self.path, self.purpose)
            if data["version"] != VERSION or data["layers"] != search.layers:
                raise ValueError("it is of another version or model")
            records = dict(_record(item, search.layers) for item in data["records"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.note = f"a stored skip set was ignored: {first_line(error)}"
            return False
        search.resume(records)
        return True

    def save(self, search: OnlineSearch) -> None:
        """Replace the file by the records of ``search``; ignore a folder that is not writable."""
        records = [
            {
                **{name: list(layers) for name, layers in _layers(skip).items() if layers or name in _LOSS},
                **({"high_head": True} if skip.high_head else {}),
                "matched": round(record.matched, 3),
                "seen": round(record.seen, 3),
                "windows": record.windows,
            }
            for skip, record in search.records.items()
        ]
        data = {"version": VERSION, "layers": search.layers, "records": records}
        try:
            write_sealed(self.path, self.purpose, data)
            self._read = self.path.stat().st_mtime_ns
        except OSError as error:
            self.note = f"skip sets cannot be kept: {error}"


def _layers(skip: SkipSet) -> dict[str, tuple[int, ...]]:
    """Return the sets of layers by name."""
    return {name: getattr(skip, name) for name in ("attention", "mlp", "high_attention", "high_mlp")}


def _record(item: Any, layers: int) -> tuple[SkipSet, Record]:
    """Read a set and its counts; a ValueError, KeyError or TypeError: it is not one."""
    found = {name: tuple(int(layer) for layer in item.get(name, ())) for name in _layers(SkipSet())}
    for name, some in found.items():
        first = 1 if name in _LOSS else 0  # never left out, but read by its high plane
        if some and (list(some) != sorted(set(some)) or some[0] < first or some[-1] >= layers - first):
            raise ValueError("it leaves out layers that cannot be")
    matched, seen, windows = float(item["matched"]), float(item["seen"]), int(item["windows"])
    if not 0 <= matched <= seen <= 1e6 or not 0 <= windows <= 10**6:
        raise ValueError("its counts make no sense")
    skip = replace(SkipSet(**found), high_head=item.get("high_head") is True)  # type: ignore[arg-type]  # no number
    return skip, Record(matched, seen, windows)
