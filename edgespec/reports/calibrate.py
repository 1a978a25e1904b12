"""Measure passes, drafts, prefills and whole methods of a bundle on this device, within a time limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from statistics import median
from time import perf_counter

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.drafters.registry import AR, has_exits, searching
from edgespec.engine.engine import Engine
from edgespec.engine.input import Input
from edgespec.engine.known import Experience
from edgespec.engine.result import Result
from edgespec.engine.sessions import Session
from edgespec.errors import first_line
from edgespec.formulas.cost import Clock, K, medians, spread, time_turns
from edgespec.planning import profiles
from edgespec.planning.budget import available_memory
from edgespec.planning.memory_budget import OFF
from edgespec.planning.profiles import Profile, Trial, manifest_hash, prompts_digest, this_machine
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.reports.measuring import pass_over, turned
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.slot import Slot

LEARN = 2  # texts that control learns from, before those that are timed
NEW, FEWEST_NEW = 56, 16  # tokens of a text; rounds of the last 64 are known one by one
TEXTS = 2  # times that every prompt is written at most


def pass_times(results: Iterable[Result]) -> dict[int, float]:
    """Return the median milliseconds of passes by their number of rows."""
    times: dict[int, list[float]] = {}
    for seen in (seen for result in results for seen in result.stats.recent):
        times.setdefault(1 + seen.drafted, []).append(seen.verify_ms)
    return medians(times)


def mean_round(results: Sequence[Result], passes: Mapping[int, float]) -> tuple[float, float, float]:
    """Return (drafts, pass, rest) of a mean round, in milliseconds; ``passes``: milliseconds by number of rows.

    All rounds with the same number of rows count as their median, because the system may interrupt single rounds.
    """
    drafts: dict[int, list[float]] = {}
    for seen in (seen for result in results for seen in result.stats.recent):
        drafts.setdefault(1 + seen.drafted, []).append(seen.draft_ms)
    rounds = sum(result.stats.rounds for result in results)
    drafted = sum(len(taken) * median(taken) for taken in drafts.values())
    verified = sum(len(taken) * passes[rows] for rows, taken in drafts.items())
    rest = median(result.stats.other_ms / result.stats.rounds for result in results)
    return drafted / rounds, verified / rounds, rest


def make_trial(results: Sequence[Result], passes: Mapping[int, float], plain: float) -> Trial:
    """Sum up the timed texts of one method; ``plain``: milliseconds per token of plain decoding."""
    rows, drafted_at, accepted_at, deep = Counter[int](), Counter[int](), Counter[int](), 0.0
    for stats in (result.stats for result in results):
        depth = stats.prompt_tokens
        for seen in stats.recent:
            rows[1 + seen.drafted] += 1
            deep += depth
            depth += seen.tokens
        drafted_at.update(dict(enumerate(stats.drafted_at)))
        accepted_at.update(dict(enumerate(stats.accepted_at)))
    names = ("rounds", "tokens", "drafted", "accepted")
    sums = {name: sum(getattr(result.stats, name) for result in results) for name in names}
    draft_ms, verify_ms, other_ms = mean_round(results, passes)
    return Trial(
        **sums,
        rows=dict(sorted(rows.items())),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=other_ms,
        speedup=plain * sums["tokens"] / sums["rounds"] / (draft_ms + verify_ms + other_ms),
        depth=deep / sums["rounds"],
        drafted_at=[drafted_at[at] for at in range(len(drafted_at))],
        accepted_at=[accepted_at[at] for at in range(len(drafted_at))],
    )


def make_trials(results: Mapping[str, Sequence[Result]], apart: bool) -> dict[str, Trial]:
    """Make the trials of a profile; ``apart``: plain decoding has a separate graph.

    Passes with the same number of rows over the same graph are the same for all methods: together they are timed best.
    Those of early exits are not, because layers have run before.
    """
    own = {name for name in results if has_exits(name) or (apart and name == AR)}
    shared = pass_times(result for name, made in results.items() if name not in own for result in made)
    passes = {name: pass_times(made) if name in own else shared for name, made in results.items()}
    rounds, tokens = (sum(getattr(result.stats, name) for result in results[AR]) for name in ("rounds", "tokens"))
    token = sum(mean_round(results[AR], passes[AR])) * rounds / tokens
    return {name: make_trial(made, passes[name], token) for name, made in results.items()}


def _length(seconds: float, step_ms: float, runs: int, room: int) -> int:
    """Choose the length of texts so that some fit into the time: those to learn from, and two timed ones."""
    fitting = int(1000 * seconds / ((LEARN + 2) * runs * max(step_ms, 1e-3)))
    return max(1, min(NEW, max(FEWEST_NEW, fitting), room - 1))


SECONDS = 15.0  # for all parts together, without loading
SHARES = {"passes": 0.33, "prefill": 0.10, "drafts": 0.07, "trials": 0.50}  # in this order
ROWS = (1, 2, 3, 5, 9, 17)
DEPTHS = (64, 512, 2048, 8192, 32768, 131072)
FEWEST_DEPTHS = 2  # always timed, because the time that grows with depth is a line
ON_DEVICE = 512  # deepest on a device whose memory must be filled by a real prefill
KV_SHARE = 0.25  # of the memory that is free: keys and values of the deepest pass take no more
PREFILL = 128  # tokens of a timed prefill
TRIES = 3  # of passes on a busy machine: the steadiest count
Prompts = Sequence[Sequence[int]]
Progress = Callable[[str, int, int, str], None]  # stage, done, of, detail


def calibrate(
    bundle: Bundle,
    options: LoadOptions | None = None,  # no budget is kept
    *,
    seconds: float = SECONDS,
    prompts: Prompts = (),  # what methods are tried on, as token ids; empty = the bundle's own
    trials: bool = True,  # whether whole methods are tried
    process: int = 0,  # resident bytes of a process before a bundle is opened (``process_bytes``)
    progress: Progress = lambda *_: None,
    clock: Clock = perf_counter,
) -> Profile:
    """Measure a bundle on this machine with these load options.

    The seconds are divided among the parts; each of them makes at least its minimum number of turns.

    Raises:
        EdgespecError: the bundle cannot be run in this way.
    """
    made = Calibrator(bundle, options, seconds, prompts, progress, clock)
    with made.engine, made.plain:
        return made.run(process, trials)


@dataclass
class Calibrator:
    """The parts of a calibration, in order; see ``calibrate`` for the fields."""

    bundle: Bundle
    options: LoadOptions | None = None
    seconds: float = SECONDS
    prompts: Prompts = ()
    progress: Progress = lambda *_: None
    clock: Clock = perf_counter

    def __post_init__(self) -> None:
        # fields of the profile
        self.passes: dict[int, dict[int, float]] = {}
        self.one_row: dict[int, float] = {}
        self.prefill: dict[int, float] = {}
        self.drafts: dict[bool, dict[str, dict[int, float]]] = {False: {}, True: {}}  # by whether it is the first step
        self.notes: list[str] = []
        self.spread = 1.0
        self.engine = Engine(self.bundle, replace(self.options or LoadOptions(), budget=OFF, prompt_cache=False))
        self.engine.experience = Experience()  # what an earlier calibration found does not count
        self.plain = self.engine.plain()
        unusable = () if self.engine.device == "cpu" else searching()
        self.methods = [name for name in self.engine.methods if name not in unusable]

    def run(self, process: int, trials: bool) -> Profile:
        """Measure everything."""
        self.begun, watch = self.clock(), profiles.Watch()
        engine, manifest = self.engine, self.bundle.manifest
        slot = engine.open_slot()
        exact = rows_exact(slot) and (not engine.strict or engine.rows_exact())
        self._passes(slot, self._depths())
        self._prefill(slot)
        del slot  # its cache may be as long as the context: one at a time
        self._drafts()
        step_ms = next(iter(self.one_row.values()))
        tried = self._trials(step_ms) if trials else {}
        target, kind = manifest.target, engine.operators.kind
        weights = read_bytes(target, kind)
        return Profile(
            machine=this_machine(engine.device),
            bundle=manifest_hash(manifest),
            name=self.bundle.path.resolve().name,
            facts=target.facts,
            format=target.format,
            head_format=target.head_format,
            weight_bytes=weights,
            kv_bytes=kv_token_bytes(target, kind, engine.attention.name),
            operators=kind,
            device=engine.device,
            threads=engine.model.threads,
            attention=engine.attention.name,
            strict=engine.run.strict,
            context=engine.context,
            passes=self.passes,
            plain=self.one_row,
            drafts=self.drafts[False],
            first_drafts=self.drafts[True],
            trials=tried,
            prompts=prompts_digest(self.prompts),
            prefill=self.prefill,
            bandwidth=weights / (step_ms / 1000),
            spread=self.spread,
            others=watch.others() or 0.0,
            rows_exact=exact,
            process_bytes=process,
            seconds=self.clock() - self.begun,
            notes=self.notes,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _depths(self) -> list[int]:
        """Choose the tokens before the timed passes: up to the context, as far as memory allows."""
        most = self.engine.context - max(ROWS) - 1
        if self.engine.device != "cpu":
            most = min(most, ON_DEVICE)
        else:
            token = kv_token_bytes(self.bundle.manifest.target, self.engine.operators.kind, self.engine.attention.name)
            room = int(KV_SHARE * available_memory().available / token)
            if room < most:
                self.notes.append(f"no passes beyond depth {room}: their keys and values would fill the memory")
            most = min(most, room)
        most = max(1, most)
        found = [depth for depth in DEPTHS if depth < most]
        # the end of the context itself, unless that is next to the depth before
        return [*found, most] if not found or most > 1.5 * found[-1] else found

    def _passes(self, slot: Slot, depths: list[int]) -> None:
        """Measure milliseconds by depth and rows, for passes as in rounds, and for the fastest plain step by depth."""
        apart = self.plain.model is not self.engine.model
        other = self.plain.open_slot() if apart else None
        sizes = [rows for rows in ROWS if rows <= self.engine.context - 1]
        for depth, seconds in self._each("passes", depths, FEWEST_DEPTHS):
            runs = {rows: pass_over(slot, rows) for rows in sizes}
            slot.stand_in(depth)
            if other is not None:
                other.stand_in(depth)
                runs[0] = pass_over(other, 1)
            times = self._steadiest(runs, seconds)
            self.one_row[depth] = times.pop(0, times[1])
            self.passes[depth] = times
        if len(self.passes) < len(depths):
            self.notes.append(f"no passes beyond depth {max(self.passes)}: the time was up")

    def _each(self, part: str, depths: Sequence[int], fewest: int) -> Iterator[tuple[int, float]]:
        """Iterate over depths until a part's time is over, at least ``fewest``; each with its time limit in seconds."""
        seconds, begun = self._seconds(part), self.clock()
        for number, depth in enumerate(depths):
            if number >= fewest and self.clock() - begun > seconds:
                break
            self.progress(part, number, len(depths), f"depth {depth}")
            yield depth, seconds / len(depths)
        self.progress(part, len(depths), len(depths), "done")

    def _steadiest(self, runs: Mapping[K, Callable[[], object]], seconds: float) -> dict[K, float]:
        """Return the median time of each run in the steadiest of several tries, because other programs may run."""
        best, least = {}, float("inf")
        for _ in range(TRIES):
            times = time_turns(runs, seconds, self.clock)
            found = median(map(spread, times.values()))
            if found < least:
                best, least = times, found
            if least < profiles.BUSY:
                break
        self.spread = max(self.spread, least)
        return medians(best)

    def _drafts(self) -> None:
        """Time one draft step of every method that has one, and a round's first, at the first and at the last depth."""
        wanted = sorted({min(self.passes), max(self.passes)})
        session = self.engine.sessions.any()
        try:
            session.attend(Input())
            drafters = [drafter for name in self.methods if (drafter := self._drafter(session, name))]
            steps = {(one.name, False): one.benchmark_step for one in drafters}
            steps |= {
                (one.name, True): partial(one.benchmark_step, first=True)
                for one in drafters
                if one.benchmark_step(first=True)
            }
            slots = [slot for one in drafters if isinstance(slot := getattr(one, "model", None), Slot)]
            for depth, seconds in self._each("drafts", wanted, len(wanted)):
                session.target.stand_in(depth)
                for slot in slots:  # of draft models
                    slot.stand_in(min(depth, slot.context - 2))
                times = medians(time_turns(steps, seconds, self.clock))
                for (name, first), ms in times.items():
                    self.drafts[first].setdefault(name, {})[depth] = ms
        finally:
            self.engine.sessions.drop(session)  # its drafters have seen nothing real

    def _drafter(self, session: Session, method: str) -> Drafter | None:
        """Build a method's drafter without control; None = it has no draft step here."""
        try:
            drafter = session.drafter(self.engine.choose(method), DraftOptions())
            return drafter if drafter.benchmark_step() else None
        except Exception as error:  # as in a request: it costs the method, not the rest
            self.notes.append(f"{method} was not measured: {first_line(error)}")
            return None

    def _prefill(self, slot: Slot) -> None:
        """Measure prefill in tokens per second, by depth."""
        wanted = [depth for depth in self.passes if depth <= self.engine.context - PREFILL] or [0]
        size = min(PREFILL, self.engine.context - 1 - wanted[0])
        tokens = [0] * size
        for depth, seconds in self._each("prefill", wanted, 1):
            # a slot that holds something else is cropped, so that each begins where it should
            run, warm = {depth: lambda: slot.prefill(tokens)}, 0 if self.prefill else 1
            times = time_turns(run, seconds, self.clock, prepare=slot.stand_in, least=1, warm=warm)
            self.prefill[depth] = 1000 * size / median(times[depth])

    def _trials(self, step_ms: float) -> dict[str, Trial]:
        """Decode the bundle's own prompts, if it has some, plainly and with every method, interleaved.

        Control learns from the first ones.  No text begins when the time is over, once each was timed on one.  What a
        plain step takes decides how much is written.
        """
        room, golden = self.engine.context - 2, [vector.prompt for vector in self.bundle.manifest.golden]
        prompts = [list(prompt) for prompt in self.prompts or golden if 0 < len(prompt) <= room]
        if not prompts:
            self.notes.append("no method was tried: there are no prompts that fit")
            return {}
        names = [AR, *(name for name in self.methods if name != AR)]
        seconds = self._seconds("trials")
        new = _length(seconds, step_ms, len(names), self.engine.context - max(map(len, prompts)))
        # a text about a source has an end
        settings = Settings(max_new_tokens=new, ignore_eos=self.engine.inputs.sources is None)
        results: dict[str, list[Result]] = {name: [] for name in names}
        begun = self.clock()
        for number in range(LEARN + max(1, TEXTS * len(prompts) - LEARN)):
            if number > LEARN and self.clock() - begun > seconds:
                break
            for name in filter(results.__contains__, turned(names, number)):
                self.progress("trials", number, TEXTS * len(prompts), name)
                where = self.plain if name == AR else self.engine
                result = where.generate(prompts[number % len(prompts)], settings.changed(method=name))
                if result.stats.dropped_reason:
                    self.notes.append(f"{name} failed: {result.stats.dropped_reason}")
                    del results[name]
                elif number >= LEARN:
                    results[name].append(result)
        return make_trials(results, apart=self.plain.model is not self.engine.model)

    def _seconds(self, part: str) -> float:
        """Return the time of a part: its share of the remaining time, so later parts compensate for a slow one."""
        left = max(0.0, self.seconds - (self.clock() - self.begun))
        names = list(SHARES)
        return left * SHARES[part] / sum(SHARES[name] for name in names[names.index(part) :])
