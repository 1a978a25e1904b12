"""A bundle in memory: its model, the sessions over it, and which method a request gets."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.drafters.ngram_stores import NGramStore
from edgespec.drafters.proposer import proposer_name
from edgespec.drafters.registry import complete, native_alone, needing, searching
from edgespec.engine.input import Input
from edgespec.engine.inputs import Inputs, open_inputs
from edgespec.engine.known import Experience
from edgespec.engine.methods import MethodChoice, check_branch, check_device, choose_method, own_choice, own_sampling
from edgespec.engine.pass_record import PassRecord
from edgespec.engine.pool import ReservationTable, SessionPool
from edgespec.engine.prompt_cache import PromptCache
from edgespec.engine.sessions import Session
from edgespec.engine.sharing import FairLock, PrefillBudget
from edgespec.engine.strict_probe import stock_rows_exact
from edgespec.errors import InvalidRequest
from edgespec.planning.memory_budget import MemoryBudget
from edgespec.planning.profiles import find_profile
from edgespec.planning.streaming import SeenReads, remember_reads
from edgespec.runtimes.codes import CodeDecoder
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.files.attention import AttentionChoice, choose_attention
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.draft_adapter import DRAFT
from edgespec.runtimes.files.manifest import Manifest, Operators
from edgespec.runtimes.files.operators import OperatorChoice, choose_operators
from edgespec.runtimes.files.skip_sets import forget_sets
from edgespec.runtimes.opening import open_draft, open_slot, open_target, share_target
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.process import trim_memory
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.encoder import encoder_attention_name
from edgespec.runtimes.slots.expert_store import ExpertStore
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.guidance import Guidance
from edgespec.runtimes.text.translation import open_translation
from edgespec.version import __version__

LEAST_SEEN = 4  # times the experts of the cache must have been needed before their hits are recorded


class LoadedBundle:
    """The state that all requests to a bundle share.  Requests may come from several threads.

    ``graph``: which graph of the target; None = the one that can run every method.  ``share``: whose model to use.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: LoadOptions | None = None,
        *,
        graph: str | None = None,
        share: LoadedBundle | None = None,
    ) -> None:
        self.options = options = options or LoadOptions()
        whole = complete(bundle.manifest, options.adapter_folders.get(DRAFT))
        bundle = replace(bundle, manifest=options.seen(whole))
        self.run = run = options.resolve(bundle.manifest)  # the resolved options
        if options.precision == "high":
            bundle = replace(bundle, manifest=complete(bundle.manifest.at_high_precision()))
        self.bundle, manifest, target = bundle, bundle.manifest, bundle.manifest.target
        self._on_cpu = on_cpu = run.device == "cpu"
        self.operators: OperatorChoice = choose_operators(options.operators if on_cpu else "stock", target)
        self.attention = _attention(manifest, run.operators, options)
        self.strict, self.context, self.device = options.strict, run.context, run.device
        self.codec = TextCodec(bundle.path, checked=bundle.checked)
        self.store = _store(options, self.codec)
        self.eos = frozenset(manifest.tokenizer.eos)
        self.lock = FairLock()  # held while the model is used: buffers are shared by all sessions
        self.memory_budget: MemoryBudget = share.memory_budget if share else MemoryBudget(manifest, run, options.budget)
        self.memory_budget.choose_expert_cache(options.context)
        self.memory_budget.admit_bundle(options.context)
        model = share_target(share.model, self.strict) if share else self._open_target(graph)
        self._model: Model | None = model  # None: closed
        self._process = os.getpid()
        self._drafts: dict[str, Model] = {}
        self.approximations = _approximations(manifest, model, run.operators)
        self.inputs: Inputs = share.inputs.shared() if share else self._open_inputs(model)
        self._guidance: Guidance | None = None  # made for the first grammar
        self.sessions: SessionPool = SessionPool(self.new_session)
        self.guided_sessions: SessionPool | None = None  # see guiding.py
        self.reservations = ReservationTable(self.sessions, self.memory_budget, lambda: self.grammar_bytes)
        self.device_lost: str | None = None  # why passes no longer run on the device; None = they do
        self._off_device: LoadedBundle | None = None
        self._stock = on_cpu and self.operators.kind == "stock" and target.origin == "edgespec"
        self._rows_exact: bool | None = None
        if self._stock and self.strict and model.graph.padded:
            self._rows_exact = stock_rows_exact(bundle, model)
        elif share is None and on_cpu and not self.strict:
            model.pairs = False  # the graph with gates is also the strict one
        self._record = PassRecord(manifest, run)
        self.experience = Experience(find_profile(manifest, options), self._record)
        self.paces = PrefillBudget(), PrefillBudget()  # how fast the target and a draft read prompts
        # keys and values computed with one source are useless with another
        wanted = options.prompt_cache and on_cpu and not self.inputs.sourced and not manifest.is_encoder
        self.prompts = PromptCache(bundle, wanted, self.lock, self.paces, self.memory_budget.left)

    def _open_target(self, graph: str | None) -> Model:
        """Open the target's weights, with one of its graphs; None = the one that can run every method."""
        bundle, run, strict = self.bundle, self.run, self.strict
        name = graph or self.operators.graph(bundle.manifest.target, strict)
        kv, cache = self.attention.kv, self.memory_budget.expert_cache
        return open_target(bundle, self.options, run.device, name, strict, run.threads, kv, cache)

    def _open_inputs(self, model: Model) -> Inputs:
        """Make the inputs of requests; images and recordings need native operators."""
        rows = model.inserted if self.operators.kind == "native" and self._on_cpu else None
        keep, left = self.options.prompt_cache, self.memory_budget.left
        return open_inputs(self.bundle, self.codec, model, self.run.threads, rows, keep, left)

    # -- about this bundle ---------------------------------------------------------------------------------------------

    @property
    def methods(self) -> list[str]:
        """Methods this bundle can run."""
        return list(self.bundle.manifest.methods)

    @property
    def vector_width(self) -> int:
        """Numbers of an embedding."""
        part, hidden = self.bundle.manifest.embedding, self.bundle.manifest.target.facts.hidden
        return part.steps[-1].outputs if part and part.steps else hidden

    @cached_property
    def defaults(self) -> Settings:
        """Default settings: the sampling and guidance that the model recommends, if the bundle has them."""
        codes = self.bundle.manifest.codes
        scale = codes.image.guidance if codes is not None and codes.image is not None else None
        return Settings(sampling=own_sampling(self.bundle.manifest.sampling), guidance_scale=scale)

    @property
    def model(self) -> Model:
        """The target; an ``InvalidRequest``: it was closed."""
        if self._model is None:
            raise InvalidRequest("this engine is closed: expected an open one", "load the bundle again")
        return self._model

    def adapter_number(self, name: str | None) -> int:
        """Find the number of a loaded adapter, 0 for None; an ``InvalidRequest`` for one that is not loaded."""
        store = getattr(self.model, "adapters", None)  # a device's model has no such thing
        if name is not None and store is None:
            raise InvalidRequest(
                f"adapter {name!r}: this model was loaded without adapters", "load it with adapters={name: folder}"
            )
        return store.number(name) if store is not None else 0

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._model is None

    def require_open(self) -> None:
        """Raise ``InvalidRequest`` if it was closed, or loaded with threads before the process forked."""
        if self.model and self._process != os.getpid() and self.run.threads > 1:
            raise InvalidRequest(
                f"this process was forked after loading with {self.run.threads} threads, and they did not come along",
                "load the bundle in each process, or with threads=1",
            )

    def ends_by_itself(self, settings: Settings) -> bool:
        """Whether a request without a maximum length runs to the end of its text, or of the context.

        An answer and a text under a grammar have an end.  A plain continuation may have none.
        """
        if settings.max_new_tokens is not None or settings.ignore_eos or not self.eos:
            return False
        codes, bound = self.bundle.manifest.codes, settings.grammar is not None or self.inputs.sourced
        return bound or self.codec.chat_template is not None or bool(codes and codes.sound)

    def most_new(self, settings: Settings) -> int:
        """Count the new tokens that a request may have, where memory and context allow it."""
        open_ended = self.context if self.ends_by_itself(settings) else MAX_NEW_TOKENS
        return settings.max_new_tokens or open_ended

    def choose(self, method: str | None) -> MethodChoice:
        """Choose the method for a request, with the reason."""
        return self.choose_for(Settings(method=method))

    def choose_for(self, settings: Settings) -> MethodChoice:
        """Choose for whole settings: a chain's proposers, or a custom proposer.

        Raises ``InvalidRequest`` for a method that this bundle lacks, and for a method with a custom proposer.
        """
        if settings.drafts.branch:
            check_branch(self.bundle.manifest, settings.drafts.branch)
        if settings.proposer is not None:
            if settings.method is not None or settings.drafts.proposers:
                raise InvalidRequest("got a custom proposer and a method: expected one of them", "leave out the method")
            return own_choice(proposer_name(settings.proposer))
        stock = native_alone(self.bundle.manifest) if self.operators.kind == "stock" else ()
        elsewhere = () if self.device == "cpu" else (*searching(), *needing("drafter"))  # see check_device
        # a seeded text is the same before a calibration and after it
        profile = None if settings.sampling.seeded_rejection else self.experience.profile
        without = (*elsewhere, *stock)
        choice = choose_method(self.bundle.manifest, settings.method, settings.drafts, without, profile)
        if self.device != "cpu":
            check_device(self.device, choice)
        if lost := [name for name in choice.methods if name in stock]:
            raise InvalidRequest(
                f"the drafter of method {lost[0]} needs native operators, and this model runs on stock ones",
                "use another method, or native operators",
            )
        return choice

    @property
    def guidance(self) -> Guidance:
        """The compiler of grammars for this bundle; it reads the vocabulary once."""
        if self._guidance is None:
            manifest = self.bundle.manifest
            self._guidance = Guidance(self.codec, manifest.tokenizer.eos, manifest.target.facts.vocab)
        return self._guidance

    @cached_property
    def code_decoder(self) -> CodeDecoder:
        """The decoder of codes to a picture or sound; an ``InvalidRequest``: this is a text model."""
        return CodeDecoder(self.bundle, self.run.threads)

    def forget_skip_sets(self) -> int:
        """Delete the sets of layers to skip that were found for this bundle -> how many files there were.

        Running sessions keep their sets: call it after loading.
        """
        self.sessions.clear()
        return forget_sets(self.bundle.manifest)

    def rows_exact(self) -> bool:
        """Whether verified rows have the bits of plain decoding's on this machine; proven once, then known."""
        if self._rows_exact is None and self.strict and self._record.exact:
            self._rows_exact = True
        if self._rows_exact is None and self._model is not None:
            session = self.sessions.any()  # its text stays
            try:
                with self.lock:
                    session.attend(Input())
                    self._rows_exact = self.strict and rows_exact(session.target)
            finally:
                self.sessions.give_back(session)
            if self._rows_exact and self.operators.kind == "native":  # variables change ONNX Runtime's kernels
                self._record.keep_exact()
        return bool(self._rows_exact)

    @property
    def exact_rows(self) -> bool:
        """Whether methods must write exactly plain decoding's text: strict mode, on graphs made for it.

        For ONNX Runtime's operators on the CPU, and for foreign graphs, only the probe can tell; if it fails,
        near-ties may differ.
        """
        tried = self._stock or self.bundle.manifest.target.foreign
        return self.strict and (not tried or self.rows_exact())

    def unverified(self) -> list[str]:
        """Why it is unverified that this bundle runs, a sentence each; empty = it was checked."""
        library = native_library()
        if self.operators.kind == "native" and library.version not in ("", __version__):
            self.bundle.checked.note(
                f"the native operators are of version {library.version}, and this is {__version__}"
            )
        return self.bundle.checked.unverified()

    # -- memory, and losing it ---------------------------------------------------------------------------------------

    @property
    def usable(self) -> LoadedBundle:
        """This one, or the one on the CPU once its device is lost."""
        return self if self.device_lost is None else self.off_device(self.device_lost)

    def off_device(self, reason: str) -> LoadedBundle:
        """Load the same bundle on the CPU, otherwise as this one; requests go there from now on."""
        with self.lock:
            self.device_lost = reason
            if self._off_device is None:
                options = replace(self.options, device="cpu", device_precision=None, context=self.context, check=False)
                self._off_device = LoadedBundle(self.bundle, options)
                self.sessions.clear()
            return self._off_device

    def kv_bytes(self) -> int:
        """Bytes of KV allocated by all slots, those of batches as far as they were written."""
        return self.reservations.kv_bytes()

    @property
    def grammar_bytes(self) -> int:
        """Bytes of compiled grammars that are kept."""
        return self._guidance.kept_bytes if self._guidance else 0

    def forget_grammars(self) -> None:
        """Free the compiled grammars that no request uses."""
        if self._guidance:
            self._guidance.forget()

    def new_session(self, target: Slot | None = None, make: Callable[..., Session] = Session) -> Session:
        """Make a session over a slot; None = a new one.  ``make``: its class."""
        path, manifest, known = self.bundle.path, self.bundle.manifest, self.experience
        target = target or open_slot(self.model, context=self.context)
        return make(path, manifest, target, self._draft_model, self.inputs, known, self.store)

    def open_slot(self, reserve: int = 256, given: Input | None = None) -> Slot:
        """Open a slot of the target that no session has, for measurements; of an encoder-decoder over an input."""
        slot = open_slot(self.model, context=self.context, reserve=reserve)
        self.inputs.attend({"target": slot}, given or Input())
        return slot

    def close(self) -> None:
        """Free the model and its memory at once; see ``Engine.close``."""
        with self.lock:
            self._remember_reads()
            self.reservations.close()
            self.sessions.close()
            if self.guided_sessions is not None:
                self.guided_sessions.close()
            self._model = None
            self._drafts.clear()
            self.inputs.close()
            if self._off_device is not None:
                self._off_device.close()
        trim_memory()

    @property
    def experts(self) -> ExpertStore | None:
        """The weights that are read from the disk; None: there are none, or the engine is closed."""
        return self._model.experts if isinstance(self._model, Model) else None

    def _remember_reads(self) -> None:
        """Record how many of the streamed experts that plain passes needed were in the cache."""
        model = self._model
        if not isinstance(model, Model) or (store := model.experts) is None or store.layers:
            return
        counts = store.counts(1)
        if counts.distinct >= LEAST_SEEN * store.slots:
            waited = counts.waited / model.threads
            rate = counts.bytes / waited if waited else None
            remember_reads(self.bundle.manifest, SeenReads(store.share, counts.hit_rate, rate))

    def _draft_model(self, name: str) -> Model:
        if name not in self._drafts:
            self._drafts[name] = model = open_draft(self.bundle, name, self.options, self.operators)
            self.inputs.prepare_draft(name, model)
            if name == "draft" and self.bundle.manifest.translation is not None:
                model.translation = open_translation(self.bundle, self.codec)
        return self._drafts[name]


def _attention(manifest: Manifest, operators: Operators, options: LoadOptions) -> AttentionChoice:
    """Choose the formats of keys and values, and of the keys of self-drafts."""
    if manifest.is_encoder and options.attention is None:
        options = replace(options, attention=encoder_attention_name(manifest.target))
    found = choose_attention(manifest.target, operators, options.attention, options.draft_attention)
    if found.draft and not set(needing("layers")) & manifest.methods.keys():
        raise InvalidRequest(
            f"draft attention {found.draft} is for self-speculation, which this bundle was not made for",
            "export it with `--method self-spec`",
        )
    return found


def _store(options: LoadOptions, codec: TextCodec) -> NGramStore | None:
    """Open the n-gram store; None = none was given."""
    if options.ngram_store is None:
        return None
    store = NGramStore(Path(options.ngram_store), check=options.check)
    store.require(codec.vocabulary_sha256(), codec.vocab_size)
    return store


def _approximations(manifest: Manifest, model: Model, operators: Operators) -> list[str]:
    """List the differences from the source model with every method."""
    target = manifest.target
    weights = "the high 4 bits of int8 weights" if target.high_alone else f"{target.format} weights"
    found = [] if target.format == "fp32" else [weights, "8-bit activations"]
    found += manifest.provenance.get("approximations", [])
    if isinstance(model, DeviceModel):
        found += model.approximations
    elif operators == "native":
        found += model.kv.approximations
    return found
