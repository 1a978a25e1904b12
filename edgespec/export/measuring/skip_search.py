"""Search the sub-layers that a self-draft should skip, for the highest predicted speed rather than acceptance.

There are 2L choices, with separate ones for attention and MLP of each layer (Draft & Verify, arXiv 2309.08168): run it,
skip it, or, if int8 weights have two planes, read the high plane.  One more choice is for the LM head.  The objective
is the speed-up that the cost formula predicts from measured numbers: acceptance over the full model's KV
(acceptance.py), the draft step's cost and the verify curve on this machine.  Tree-structured Parzen estimators (optuna)
propose sets.  Sets that skip one sub-layer are scored first, and the greedy sets they suggest warm-start the search.
With planes, all of them start from the high planes of everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import StrictInt, TypeAdapter

from edgespec.decoding.target import Pass, SkipSet
from edgespec.errors import ExportError
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer
from edgespec.formulas.cost import WORTH, CostModel, measure_all, speedup, spread
from edgespec.planning import profiles as quiet
from edgespec.planning.profiles import busy_words
from edgespec.runtimes.files.json_file import read_json
from edgespec.runtimes.slots.slot import Slot

_LAYERS = TypeAdapter(list[StrictInt])


def read_skip_set(path: Path, layers: int) -> SkipSet:
    """Read ``{"attention": [...], "mlp": [...]}``, or a collection of such sets with one that fits.

    Args:
        path: the JSON file; ``FILE:NAME`` picks a set of a collection.

    Raises:
        ExportError: not such a file, several sets to choose from, or layers the model does not have.
    """
    name, file = None, path
    if not file.is_file() and ":" in path.name:
        stem, _, name = str(path).rpartition(":")
        file = Path(stem)
    data = read_json(file, ExportError, 'expected {"attention": [...], "mlp": [...]}')
    if isinstance(data, dict) and "attention" not in data and "mlp" not in data:
        if name is None and len(data) == 1:
            name = next(iter(data))
        if name not in data:
            raise ExportError(
                f"{file}: holds several skip sets", f"pick one as {file.name}:NAME: {', '.join(map(str, data))}"
            )
        data = data[name]
    try:
        sets = [sorted({*_LAYERS.validate_python(data.get(kind, []))}) for kind in ("attention", "mlp")]
    except (AttributeError, ValueError) as error:
        raise ExportError(f'{file}: expected {{"attention": [...], "mlp": [...]}} of layer numbers') from error
    beyond = [layer for kind in sets for layer in kind if not 0 <= layer < layers]
    if beyond:
        raise ExportError(
            f"{file}: names layer {beyond[0]}, but the model has layers 0 to {layers - 1}",
            "use a set made for this model",
        )
    if not sets[0] and not sets[1]:
        raise ExportError(
            f"{file}: the skip set is empty: the draft would be the target itself", "leave --skip-set out to search one"
        )
    return SkipSet(tuple(sets[0]), tuple(sets[1]))


Progress = Callable[[int, int, str], None]  # done, of, what
TRIES = 3  # of timing passes on a busy machine
HIGH = ("high_attention", "high_mlp", "high_head")  # savings from reading only the high planes
_CUT = "cut_head_"
LEAST_ROWS = 4096  # of a cut LM head
SINGLE_GAMMA = 2  # chains of this length rank single sub-layers
PATIENCE = 8  # proposals in a row without progress that end a search, if no set is faster than plain decoding


@dataclass(frozen=True)
class StepCosts:
    """Measured times of passes on this machine, in milliseconds."""

    plain: float  # one row, everything runs
    attention: float  # what leaving out one attention saves; 0 where the graph has no gates
    mlp: float  # what leaving out one MLP saves
    verify: dict[int, float]  # {rows: milliseconds} of the passes per round, as the decoding loop runs them
    spread: float = 1.0  # of times of equal passes, the upper quartile over the lower
    others: float = 0.0  # share of the processors that other programs took during timing; 0 = not known
    # time saved by reading only the high planes of one attention; 0 without planes
    high_attention: float = 0.0
    high_mlp: float = 0.0  # the same of one MLP
    high_head: float = 0.0  # the same of the LM head
    # {tokens: time that its high plane saves beyond that if it scores only these}
    cut_head: dict[int, float] = field(default_factory=dict)

    @property
    def busy(self) -> str:
        """Why these times may be unreliable, as a message; empty = the machine was quiet."""
        return busy_words(self.spread, self.others)

    def draft_ms(self, skip: SkipSet) -> float:
        """Time of one draft step."""
        saved = len(skip.attention) * self.attention + len(skip.mlp) * self.mlp
        saved += len(skip.high_attention) * self.high_attention + len(skip.high_mlp) * self.high_mlp
        saved += skip.high_head * self.high_head + self.cut_head.get(skip.head_rows, 0.0)
        return max(self.plain - saved, 0.02 * self.plain)

    def model(self, draft_ms: float) -> CostModel:
        """Return the cost model of a draft step of that time."""
        return CostModel(self.verify, draft_ms / self.verify[1])

    def speedups(self, acceptance: Acceptance, draft_ms: float) -> dict[int, float]:
        """Predicted speed over the fastest plain decoding, by gamma."""
        cost, padding = self.model(draft_ms), self.plain / self.verify[1]
        rates = acceptance.rates
        return {g: padding * speedup(rates, g, cost.c, cost.v) for g in range(1, len(rates) + 1)}

    def as_dict(self) -> dict[str, Any]:
        """As JSON: what the manifest keeps."""
        verify = {str(rows): ms for rows, ms in self.verify.items()}
        more = {f"{name}_ms": ms for name in HIGH if (ms := getattr(self, name))}
        more |= {f"{_CUT}{rows}_ms": ms for rows, ms in self.cut_head.items()}
        return {"plain_ms": self.plain, "attention_ms": self.attention, "mlp_ms": self.mlp, "verify_ms": verify,
                "spread": self.spread, "others": self.others} | more  # fmt: skip


_STEP_COSTS = TypeAdapter(StepCosts)


def measure_steps(slot: Slot, gamma: int, larger: Sequence[int] = (), repeats: int = 5) -> StepCosts:
    """Time passes on this machine, at the depth the slot is at; ``larger``: rows of further passes to time.

    On a busy machine they are timed again, and the steadiest try counts.
    """
    tries = []
    for _ in range(TRIES):
        tries.append(_time_steps(slot, gamma, larger, repeats))
        if not tries[-1].busy:
            break
    return min(tries, key=lambda one: (one.others >= quiet.OTHERS, one.spread))


def _time_steps(slot: Slot, gamma: int, larger: Sequence[int], repeats: int) -> StepCosts:
    layers, token = tuple(range(slot.layers)), np.zeros(1, np.int64)
    sets: list[SkipSet | None] = [None]
    if slot.model.graph.gated:
        sets += [SkipSet(attention=layers), SkipSet(mlp=layers)]
    planes = SkipSet(high_attention=layers), SkipSet(high_mlp=layers)
    rows = cut_sizes(slot.vocab_size) if slot.planes else []
    if slot.planes:
        sets += [*planes, SkipSet(high_head=True), *(SkipSet(high_head=True, head_rows=size) for size in rows)]
    watch = quiet.Watch()
    drafts = measure_all(lambda i: slot.run(Pass(token, draft=True, skip=sets[i])), range(len(sets)), repeats)
    sizes = sorted({1, 2, 3, 4, 6, gamma + 1, *larger})
    passes = measure_all(lambda n: slot.forward(np.arange(n) % slot.vocab_size), sizes, repeats)
    others = watch.others()
    steps, verify = ({size: median(taken) for size, taken in times.items()} for times in (drafts, passes))
    saved = {skip: max(0.0, steps[0] - steps[i]) for i, skip in enumerate(sets) if skip is not None}
    high = [saved.get(one, 0.0) for one in (*planes, SkipSet(high_head=True))]
    return StepCosts(
        plain=steps[0],
        attention=saved.get(SkipSet(attention=layers), 0.0) / slot.layers,
        mlp=saved.get(SkipSet(mlp=layers), 0.0) / slot.layers,
        verify=verify,
        spread=median(map(spread, (*drafts.values(), *passes.values()))),
        others=others or 0.0,
        high_attention=high[0] / slot.layers,
        high_mlp=high[1] / slot.layers,
        high_head=high[2],
        cut_head={size: max(0.0, saved[SkipSet(high_head=True, head_rows=size)] - high[2]) for size in rows},
    )


def cut_sizes(vocab: int) -> list[int]:
    """List candidate sizes of a self-draft's LM head, which scores only the first tokens of the vocabulary.

    Tokenizers learn frequent tokens first; the loss is measured.
    """
    return [vocab // share // 32 * 32 for share in (2, 4, 8) if vocab // share >= LEAST_ROWS]


@dataclass(frozen=True)
class Candidate:
    """A scored skip set."""

    skip: SkipSet
    acceptance: Acceptance
    draft_cost: float
    gamma: int
    speedup: float


class SkipSearch:
    """Scores skip sets and searches for the fastest.

    Args:
        slot: the full model, gated.
        seed: makes the search reproducible, given the same costs.
        store: a file that keeps finished trials, so that an interrupted search can continue; None = memory only.
        planes: whether sub-layers may be read by their high planes.
    """

    def __init__(
        self,
        slot: Slot,
        scorer: ChainScorer,
        costs: StepCosts,
        seed: int = 0,
        store: Path | None = None,
        planes: bool = False,
    ) -> None:
        self.slot, self.scorer, self.costs, self.seed, self.store = slot, scorer, costs, seed, store
        self.layers, self.planes = slot.layers, planes
        self.start = SkipSet.all_high(slot.layers) if planes else SkipSet()
        self.stopped: int | None = None  # proposals tried before ``run`` stopped early; None = it did not
        self._scored: dict[tuple[SkipSet, int | None], Candidate] = {}

    def score(self, skip: SkipSet, gamma: int | None = None) -> Candidate:
        """Return acceptance and predicted speed of one set; ``gamma`` limits the chains, which is cheaper."""
        if (skip, gamma) not in self._scored:
            acceptance = self.scorer.score(self.slot, skip, gamma)
            draft_ms = self.costs.draft_ms(skip)
            gains = self.costs.speedups(acceptance, draft_ms)
            best = max(gains, key=lambda g: gains[g])
            found = Candidate(skip, acceptance, draft_ms / self.costs.plain, best, gains[best])
            self._scored[skip, gamma] = found
        return self._scored[skip, gamma]

    def run(self, trials: int, progress: Progress | None = None) -> Candidate:
        """Search; ``trials`` counts the proposals after the 2L single sub-layers.

        It stops early if no set is faster than plain decoding, and ``PATIENCE`` proposals in a row bring no progress.
        """
        import optuna

        report = progress or (lambda done, of, what: None)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize", study_name="skip", storage=self._storage(optuna), load_if_exists=True
        )
        if saved := study.user_attrs.get("costs"):  # an interrupted search continues with the costs it started from
            self.costs = _STEP_COSTS.validate_python(saved)
        else:
            study.set_user_attr("costs", _STEP_COSTS.dump_python(self.costs, mode="json"))
        values = self._singles(study, trials, report)
        starts = self._warm_starts(sorted(values, key=lambda skip: -values[skip]))
        finished = [trial for trial in study.trials if trial.value is not None]
        values |= {self._set(trial.params): trial.value for trial in finished if trial.value}
        tried = [trial.value or 0.0 for trial in finished]
        for number in range(len(finished), trials):
            if max(values.values()) < WORTH and hopeless(tried, len(starts)):
                self.stopped = number
                total = 2 * self.layers + trials
                report(total, total, f"nothing pays: best {max(values.values()):.2f}x after {number} of {trials}")
                break
            # a sampler per trial: the search goes the same way whether or not it was interrupted
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `multivariate`
                study.sampler = optuna.samplers.TPESampler(
                    seed=self.seed + number, multivariate=True, n_startup_trials=8
                )
            if number < len(starts):
                study.enqueue_trial(self._bits(starts[number]))
            trial = study.ask()
            skip = self._set({name: trial.suggest_int(name, 0, most) for name, most in self._names().items()})
            value = 0.0 if skip == SkipSet() else self.score(skip).speedup
            study.tell(trial, value)
            values[skip] = value
            tried.append(value)
            report(2 * self.layers + number + 1, 2 * self.layers + trials, f"best {max(values.values()):.2f}x")
        return self.score(max(values, key=lambda skip: values[skip]))

    def with_cut_head(self, found: Candidate) -> Candidate:
        """Let the LM head score as few tokens as is fastest, where its high plane is read."""
        sizes = self.costs.cut_head if found.skip.high_head else ()
        return max([found, *(self.score(replace(found.skip, head_rows=size)) for size in sizes)],
                   key=lambda one: one.speedup)  # fmt: skip

    def _singles(self, study: Any, trials: int, report: Progress) -> dict[SkipSet, float]:
        """Predict the speed of skipping one sub-layer, for each, and of the common start."""
        layers = [(i,) for i in range(self.layers)]
        alone = [SkipSet(attention=layer) for layer in layers] + [SkipSet(mlp=layer) for layer in layers]
        singles = [self._without(skip) for skip in alone]
        starts = [self.start] if self.planes else []
        speeds: list[float] = study.user_attrs.get("speeds") or []
        if not speeds:
            speeds = [self.score(skip).speedup for skip in starts]
            for count, skip in enumerate(singles, 1):
                speeds.append(self.score(skip, SINGLE_GAMMA).speedup)
                report(count, len(singles) + trials, "single sub-layers")
            study.set_user_attr("speeds", speeds)
        return dict(zip([*starts, *singles], speeds, strict=True))

    def _warm_starts(self, ranked: list[SkipSet]) -> list[SkipSet]:
        """Unions of the best single sub-layers, of growing size."""
        sets = [skip for skip in ranked if len(skip)]
        sizes = sorted({max(2, round(share * len(sets))) for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)})
        return [self._without(_union(sets[:size])) for size in sizes]

    def _without(self, skip: SkipSet) -> SkipSet:
        """Leave sub-layers out of what all begin from."""
        return _disjoint(replace(self.start, attention=skip.attention, mlp=skip.mlp))

    def _names(self) -> dict[str, int]:
        """Name the choices, with the highest number of each: 0 is all of it, the last nothing, between them a plane."""
        names = [f"{kind}.{i}" for kind in ("attention", "mlp") for i in range(self.layers)]
        return dict.fromkeys(names, 1 + self.planes) | ({"head": 1} if self.planes else {})

    def _bits(self, skip: SkipSet) -> dict[str, int]:
        found = dict.fromkeys(self._names(), 0) | ({"head": int(skip.high_head)} if self.planes else {})
        found |= {f"attention.{i}": 1 for i in skip.high_attention} | {f"mlp.{i}": 1 for i in skip.high_mlp}
        last = 1 + self.planes
        return found | {f"attention.{i}": last for i in skip.attention} | {f"mlp.{i}": last for i in skip.mlp}

    def _set(self, bits: dict[str, Any]) -> SkipSet:
        def layers(kind: str, choice: int) -> tuple[int, ...]:
            return tuple(i for i in range(self.layers) if bits.get(f"{kind}.{i}") == choice)

        last = 1 + self.planes
        skip = SkipSet(layers("attention", last), layers("mlp", last))
        if not self.planes:
            return skip
        high = layers("attention", 1), layers("mlp", 1)
        return replace(skip, high_attention=high[0], high_mlp=high[1], high_head=bool(bits.get("head")))

    def _storage(self, optuna: Any) -> Any:
        if self.store is None:
            return None
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.store.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(str(self.store)))


def hopeless(tried: Sequence[float], starts: int) -> bool:
    """Whether a search may stop because the last ``PATIENCE`` proposals brought no progress.

    Args:
        tried: predicted speeds of all proposals, in their order.
        starts: how many of them combined the best single sub-layers.
    """
    before, last = tried[:-PATIENCE], tried[-PATIENCE:]
    return len(before) >= starts and bool(before) and max(last) <= max(before)


def _union(sets: list[SkipSet]) -> SkipSet:
    attention = sorted({i for s in sets for i in s.attention})
    return SkipSet(tuple(attention), tuple(sorted({i for s in sets for i in s.mlp})))


def _disjoint(skip: SkipSet) -> SkipSet:
    """Name no plane of what is left out."""
    high = (sorted(set(skip.high_attention) - set(skip.attention)), sorted(set(skip.high_mlp) - set(skip.mlp)))
    return replace(skip, high_attention=tuple(high[0]), high_mlp=tuple(high[1]))
