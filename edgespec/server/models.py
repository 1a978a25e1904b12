"""Model registry of a server: loads bundles on demand, and frees idle ones or those whose memory others need."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import complete
from edgespec.engine.embedding import why_no_embeddings
from edgespec.engine.loading import load
from edgespec.engine.methods import own_sampling
from edgespec.errors import InvalidRequest
from edgespec.planning.budget import parse_bytes
from edgespec.planning.footprint import LOADING, PROCESS, RUNNING, SERVER
from edgespec.planning.memory_budget import OFF, MemoryBudget, MemoryBusyError
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import LoadOptions
from edgespec.server.errors import Busy, Stopped
from edgespec.server.held import ASIDE, HeldBytes
from edgespec.server.jobs import Jobs
from edgespec.server.metrics import Metrics
from edgespec.server.reading import ModelInfo
from edgespec.server.scheduler import Limits
from edgespec.server.stored import Stored

LOOK = 0.1  # seconds between two checks for free memory
SWEEP = 2.0  # seconds between two checks for idle models


@dataclass(eq=False)
class _Loaded:
    """A bundle in memory, or on its way there or out of it; ``size``: bytes that it takes without a text."""

    size: int
    jobs: Jobs | None = None

    def bytes(self, wait: bool = True) -> int:
        """All that it takes; ``wait``: for a text that begins just now."""
        return self.size + (sum(self.jobs.engine.reservations.held(wait=wait)) if self.jobs else 0)


class Model:
    """One of the bundles.

    Args:
        name: as clients ask for it.
        folder: of the bundle.
        options: how it is loaded.
        tokens: maximum new tokens of a text.
        calls: notation of tool calls; None = that of the chat template.
        pictures: folder whose pictures requests may name; empty = none.
        sampling: default fields of ``SamplingParams`` for requests; they take precedence over the model's.

    Attributes:
        jobs: its requests; None = it is not loaded.
        users: requests that are about to be queued.
        used: when it was last asked for or busy, by ``time.monotonic``.
        loading: pending load that requests wait for.

    Raises:
        BundleError, InvalidRequest: no bundle, or options that do not go with it.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: LoadOptions,
        tokens: int,
        calls: str | None,
        pictures: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.manifest = manifest = options.seen(complete(read_manifest(folder)))
        self.run = options.resolve(manifest)
        own = replace(own_sampling(manifest.sampling), **(sampling or {}))
        plain = {key: value for key, value in asdict(own).items() if isinstance(value, (int, float, str))}
        vocab, eos = manifest.target.facts.vocab, tuple(manifest.tokenizer.eos)
        source = manifest.target.source
        text, most = (manifest.text, source.max_rows) if source and source.kind == "text" else (None, 0)
        self.known = ModelInfo(
            str(folder),
            name,
            vocab,
            self.run.context,
            eos,
            plain,
            tokens,
            calls=calls,
            text=text,
            most=most,
            senses=tuple(sense.part for sense in manifest.target.senses),
            pictures=pictures,
            codes=manifest.codes,
            embedding=manifest.embedding,
            adapters=tuple(options.adapters or ()),
        )
        self.jobs: Jobs | None = None
        self.users, self.used = 0, 0.0
        self.loading: asyncio.Future[None] | None = None

    def described(self, created: int, name: str) -> dict[str, Any]:
        """Return the entry of ``/v1/models`` with the fields of OpenAI's and Anthropic's APIs.

        Args:
            created: when the server began, in seconds since 1970.
            name: its own, or with one of its adapters.
        """
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "edgespec",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self.run.context,
            "max_tokens": self.known.tokens,
        }

    @property
    def about(self) -> dict[str, Any]:
        """Field ``edgespec`` of its entry in ``/v1/models``."""
        manifest, codes = self.manifest, self.manifest.codes
        embeds = why_no_embeddings(manifest, self.run.operators) is None
        scores = manifest.embedding is not None and manifest.embedding.scores
        return {
            "methods": list(manifest.methods),
            "context": self.run.context,
            "operators": self.run.operators,
            "chat": manifest.tokenizer.chat_template,
            "embeddings": embeds,
            "reranks": embeds or scores,
            "hears": manifest.hears,
            "sees": manifest.target.image is not None,
            "speaks": codes is not None and codes.sound is not None,
            "draws": codes is not None and codes.image is not None,
            "loaded": self.jobs is not None,
        }

    @property
    def busy(self) -> bool:
        """Whether it is loaded and has a request."""
        return self.jobs is not None and (self.users > 0 or self.jobs.busy)


class Models:
    """All models of a server, with one memory budget.

    Requests to different models run concurrently.  If a model needs memory that others use, idle ones are freed first,
    the least recently used one before the others.  Busy ones are waited for.

    Args:
        bundles: folders by name.
        options: how they are loaded; the budget covers all of them together.
        limits: of the server.
        shared: whether one client's cached prefixes may speed up another client's texts, which that client could
            notice.
        calls: notation of tool calls; None = that of each chat template.
        idle: seconds without a request before a model is freed; None = only when others need the memory.
        pictures: folder whose pictures requests may name; empty = none.

    Attributes:
        all: by name, in order.
        names: the same also by the names with their adapters, ``MODEL:ADAPTER``.

    Raises:
        BundleError, InvalidRequest: see ``Model``.
    """

    def __init__(
        self,
        bundles: Mapping[str, Path],
        options: LoadOptions | None = None,
        limits: Limits | None = None,
        *,
        shared: bool = False,
        calls: str | None = None,
        idle: float | None = None,
        pictures: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.options, self.limits, self.shared, self.idle = options or LoadOptions(), limits or Limits(), shared, idle
        self.all = {
            name: Model(name, folder, self.options, self.limits.tokens, calls, pictures, sampling)
            for name, folder in bundles.items()
        }
        self.names = {name: model for model in self.all.values() for name in model.known.names}
        self.held = HeldBytes(self.limits.body, self._free)
        self.stored, self.metrics = Stored(), Metrics(list(self.all), self._figure)
        self._lock = threading.Lock()  # of what is loaded and who uses it
        self._memory = threading.Lock()  # held while memory is given to a request or a bundle
        self._loaded: list[_Loaded] = []
        self._threads = ThreadPoolExecutor(len(self.all), "edgespec-load")
        self._stopping = False

    @property
    def running(self) -> int:
        """How many texts are being decoded."""
        return sum(jobs.scheduler.running for jobs in self._jobs())

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return sum(jobs.scheduler.waiting for jobs in self._jobs())

    @asynccontextmanager
    async def acquire(self, name: str) -> AsyncIterator[Jobs]:
        """Load a model, and keep it loaded until the request is queued.

        Raises:
            BudgetError: it does not fit the memory.
            Busy: busy models did not free enough memory in time.
            BundleError: it is damaged.
            Stopped: the server stops.
        """
        model = self.all[name]
        while (jobs := self._take(model)) is None:
            if model.loading is None:
                model.loading = asyncio.get_running_loop().run_in_executor(self._threads, self.open, name)
                model.loading.add_done_callback(lambda _: setattr(model, "loading", None))
            await asyncio.shield(model.loading)
        try:
            yield jobs
        finally:
            with self._lock:
                model.users -= 1
                model.used = time.monotonic()

    def open(self, name: str) -> None:
        """Load a model; raises the errors of ``acquire``."""
        model = self.all[name]
        loaded = _Loaded(0)
        others = partial(self._beside, loaded)
        memory_budget = MemoryBudget(model.manifest, model.run, self.options.budget)
        memory_budget.reserve(SERVER)
        memory_budget.others = others
        deadline = time.monotonic() + self.limits.seconds
        while not self._admitted(memory_budget, loaded):
            self.make_room(model)
            if self._stopping:
                raise Stopped("the server is stopping", "ask again in a moment")
            if time.monotonic() > deadline:
                raise Busy(f"no room for {name} beside the models that have requests", "ask again in a moment")
        try:
            engine = load(model.folder, self.options)
        except BaseException:
            self._loaded.remove(loaded)
            raise
        engine.memory_budget.reserve(SERVER)
        engine.memory_budget.others, engine.reservations.lock = others, self._memory
        jobs = Jobs(engine, name, self.limits, self.stored, self.metrics, partial(self.make_room, model), self.shared)
        with self._lock:
            loaded.jobs = model.jobs = jobs
            model.used = time.monotonic()
            if self._stopping:
                jobs.scheduler.stop()

    def make_room(self, model: Model) -> None:
        """Free the least recently used model but this one that has no request; all have: wait a moment."""
        with self._lock:
            idle = [one for one in self.all.values() if one is not model and one.jobs and not one.busy]
            freed = self._let_go(min(idle, key=lambda one: one.used)) if idle else None
        if freed is None:
            time.sleep(LOOK)
        else:
            self._close(freed)

    async def sweep(self) -> None:
        """Free idle models, until cancelled."""
        while self.idle is not None:
            await asyncio.sleep(min(SWEEP, self.idle / 4))
            now, freed = time.monotonic(), []
            with self._lock:
                for model in self.all.values():
                    if model.busy:
                        model.used = now
                    elif model.jobs and now - model.used > self.idle:
                        freed.append(self._let_go(model))
            for loaded in freed:
                await asyncio.to_thread(self._close, loaded)

    def stop(self, grace: float | None = None) -> None:
        """Take no more requests, and cut those that run after some seconds; see ``Scheduler.stop``."""
        with self._lock:
            self._stopping = True
        for jobs in self._jobs():
            jobs.stop(grace)

    def close(self) -> None:
        """Free all, once what runs has ended."""
        self.stop()
        self._threads.shutdown()
        for model in self.all.values():
            with self._lock:
                loaded = self._let_go(model) if model.jobs else None
            if loaded:
                self._close(loaded)

    def _figure(self, model: str, name: str) -> float:
        """Return one of ``FIGURES``."""
        if (jobs := self.all[model].jobs) is None:
            return 0
        scheduler, engine = jobs.scheduler, jobs.engine
        known = {"running_requests": scheduler.running, "waiting_requests": scheduler.waiting, "loaded": 1}
        return known[name] if name in known else engine.kv_bytes() if name == "kv_bytes" else engine.grammar_bytes

    def _jobs(self) -> list[Jobs]:
        return [jobs for model in self.all.values() if (jobs := model.jobs) is not None]

    def _take(self, model: Model) -> Jobs | None:
        with self._lock:
            if self._stopping:
                raise Stopped("the server is stopping", "ask again in a moment")
            if model.jobs is not None:
                model.users += 1
            return model.jobs

    def _admitted(self, memory_budget: MemoryBudget, loaded: _Loaded) -> bool:
        """Reserve the memory for a bundle, if it is free -> whether it was."""
        with self._memory:
            try:
                memory_budget.admit_bundle(self.options.context)
            except MemoryBusyError:
                return False
            loaded.size = memory_budget.loaded_bytes()
            self._loaded.append(loaded)
            return True

    def _beside(self, loaded: _Loaded) -> int:
        """Bytes of all others, and of requests."""
        return self.held.beyond + sum(one.bytes() for one in list(self._loaded) if one is not loaded)

    def _free(self) -> int | None:
        """Bytes of the budget that neither models nor their texts take; None = no budget was given.

        The event loop asks, so it waits for no text that begins.
        """
        if self.options.budget in (None, OFF):
            return None
        base = sum(part.all for part in (PROCESS, LOADING, RUNNING)) + SERVER - ASIDE
        return parse_bytes(self.options.budget) - base - sum(one.bytes(wait=False) for one in list(self._loaded))

    def _let_go(self, model: Model) -> _Loaded:
        """Detach a loaded model so that new requests cannot use it; the caller holds the lock, and closes it."""
        jobs, model.jobs = model.jobs, None
        return next(one for one in self._loaded if one.jobs is jobs)

    def _close(self, loaded: _Loaded) -> None:
        jobs, loaded.jobs = loaded.jobs, None
        assert jobs is not None
        jobs.close()
        jobs.engine.close()
        self._loaded.remove(loaded)


def named_bundles(folders: list[Path], names: tuple[str, ...] = ()) -> dict[str, Path]:
    """Name bundles by their folders, or as told.

    Raises:
        InvalidRequest: two of one name, or not as many names as bundles.
    """
    if names and len(names) != len(folders):
        raise InvalidRequest(f"{len(names)} names for {len(folders)} bundles: expected one for each, in their order")
    chosen = names or [folder.resolve().name for folder in folders]
    for name in chosen:
        if chosen.count(name) > 1:
            raise InvalidRequest(f"two bundles are called {name!r}", "give each a --name, in their order")
    return dict(zip(chosen, folders, strict=True))
