"""A bundle in memory: its model, the sessions over it, and which method a request gets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.decoding.text import INSERTED
from edgespec.drafters.ngram_stores import NGramStore
from edgespec.drafters.proposer import proposer_name
from edgespec.drafters.registry import complete, native_alone, needing, searching
from edgespec.engine.captions import reader_of
from edgespec.engine.encoding import Encoding, Source
from edgespec.engine.images import Images
from edgespec.engine.known import Experience
from edgespec.engine.methods import MethodChoice, check_branch, check_device, choose_method, own_choice, own_sampling
from edgespec.engine.pool import Places, SessionPool
from edgespec.engine.prompt_cache import PromptCache
from edgespec.engine.sessions import Session
from edgespec.engine.sharing import FairLock, PrefillBudget
from edgespec.engine.stock_rows import stock_rows_exact
from edgespec.errors import InvalidRequest
from edgespec.planning.allowance import Allowance
from edgespec.planning.profiles import find_profile
from edgespec.runtimes.codes import CodeDecoder
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.files.attention import AttentionChoice, choose_attention
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.operators import OperatorChoice, choose_operators
from edgespec.runtimes.files.skip_sets import forget_sets
from edgespec.runtimes.opening import open_draft, open_slot, open_target, share_target
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.process import trim_memory
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.inserted import Inserted
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.guidance import Guidance
from edgespec.runtimes.text.sources import SourceTexts
from edgespec.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
        self.bundle = bundle = replace(bundle, manifest=options.seen(complete(bundle.manifest)))
        manifest, target = bundle.manifest, bundle.manifest.target
        self.run = run = options.resolve(manifest)  # the resolved options
        if options.precision == "high":
            self.bundle = bundle = replace(bundle, manifest=complete(manifest.at_high_precision()))
            manifest, target = bundle.manifest, bundle.manifest.target
        on_cpu = run.device == "cpu"
        self.operators: OperatorChoice = choose_operators(options.operators if on_cpu else "stock", target)
        # formats of keys and values, and of the keys of self-drafts
        self.attention: AttentionChoice = choose_attention(
            target, run.operators, options.attention, options.draft_attention
        )
        if self.attention.draft and not set(needing("layers")) & manifest.methods.keys():
            raise InvalidRequest(
                f"draft attention {self.attention.draft} is for self-speculation, which this bundle was not made for",
                "export it with `--method self-spec`",
            )
        self.strict, self.context, self.device = options.strict, run.context, run.device
        self.codec = TextCodec(bundle.path, checked=bundle.checked)
        self.store: NGramStore | None = None  # of texts read earlier, for method ngram
        if options.ngram_store is not None:
            self.store = NGramStore(Path(options.ngram_store), check=options.check)
            self.store.require(self.codec.vocabulary_sha256(), self.codec.vocab_size)
        self.eos = frozenset(manifest.tokenizer.eos)
        self.lock = FairLock()  # held while the model is used: buffers are shared by all sessions
        self.allowance: Allowance = share.allowance if share else Allowance(manifest, run, options.budget)
        self.allowance.admit_bundle(options.context)
        if share is not None:
            model = share_target(share.model, self.strict)
        else:
            name = graph or self.operators.graph(target, self.strict)
            precision, kv = options.device_precision, self.attention.kv
            model = open_target(bundle, run.device, precision, name, self.strict, run.threads, kv)
        self._model: Model | None = model  # None: closed
        self._process = os.getpid()
        self._drafts: dict[str, Model] = {}
        weights = "the high 4 bits of int8 weights" if target.high_alone else f"{target.format} weights"
        # differences from the source model with every method
        self.approximations = [] if target.format == "fp32" else [weights, "8-bit activations"]
        self.approximations += manifest.provenance.get("approximations", [])
        if isinstance(model, DeviceModel):
            self.approximations += model.approximations
        elif run.operators == "native":
            self.approximations += model.kv.approximations
        self.sessions: SessionPool = SessionPool(self.new_session)
        self.guided_sessions: SessionPool | None = None  # see guiding.py
        self.places = Places(self.sessions)
        self.device_lost: str | None = None  # why passes no longer run on the device; None = they do
        self._off_device: LoadedBundle | None = None
        self.encoding: Encoding | None = None  # encoders and memories; None = decoder-only
        self.sources: SourceTexts | None = None  # how its texts become tokens; None = it reads features
        if target.source is not None:
            self.encoding = Encoding(bundle, run.threads, share.encoding if share else None)
            if manifest.text is not None and target.source.kind == "text":
                self.sources = SourceTexts(bundle.path, manifest.text, self.codec, bundle.checked)
        self._rows_exact: bool | None = None
        self._stock = on_cpu and self.operators.kind == "stock" and target.origin == "edgespec"
        if self._stock and self.strict and model.graph.padded:
            self._rows_exact = stock_rows_exact(bundle, model)
        elif share is None and on_cpu and not self.strict:
            model.pairs = False  # the graph with gates is also the strict one
        self.experience = Experience(find_profile(manifest, options))
        self.paces = PrefillBudget(), PrefillBudget()  # how fast the target and a draft read prompts
        # keys and values computed with one source are useless with another
        wanted = options.prompt_cache and on_cpu and self.encoding is None
        self.prompts = PromptCache(bundle, wanted, self.lock, self.paces, self.allowance.left)
        self.images: Images | None = share.images if share else None  # None: it reads only text, at least here
        if share is None and self.operators.kind == "native" and on_cpu:
            self.images = reader_of(bundle, run.threads, model.inserted, options.prompt_cache, self.allowance.left)
        self._shared = share is not None

    # -- about this bundle ---------------------------------------------------------------------------------------------

    @property
    def methods(self) -> list[str]:
        """Methods this bundle can run."""
        return list(self.bundle.manifest.methods)

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
        codes, bound = self.bundle.manifest.codes, settings.grammar is not None or self.encoding is not None
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

    @cached_property
    def guidance(self) -> Guidance:
        """The compiler of grammars for this bundle; it reads the vocabulary once."""
        manifest = self.bundle.manifest
        return Guidance(self.codec, manifest.tokenizer.eos, manifest.target.facts.vocab)

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
        """Whether verified rows have the bits of plain decoding's on this machine; probed once, then known."""
        if self._rows_exact is None and self._model is not None:
            session = self.sessions.any()  # its text stays
            try:
                with self.lock:
                    session.attend(None)
                    self._rows_exact = self.strict and rows_exact(session.target)
            finally:
                self.sessions.give_back(session)
        return bool(self._rows_exact)

    @property
    def exact_rows(self) -> bool:
        """Whether methods must write exactly plain decoding's text: strict mode, on graphs made for it.

        For ONNX Runtime's operators on the CPU, and for graphs of optimum, only the probe can tell; if it fails,
        near-ties may differ.
        """
        tried = self._stock or self.bundle.manifest.target.origin != "edgespec"
        return self.strict and (not tried or self.rows_exact())

    def unproven(self) -> list[str]:
        """Why it is unproven that this bundle runs, a sentence each; empty = it was checked."""
        library = native_library()
        if self.operators.kind == "native" and library.version not in ("", __version__):
            self.bundle.checked.note(
                f"the native operators are of version {library.version}, and this is {__version__}"
            )
        return self.bundle.checked.unproven()

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
        return self.places.kv_bytes()

    @property
    def grammar_bytes(self) -> int:
        """Bytes of compiled grammars that are kept."""
        guidance = self.__dict__.get("guidance")  # it is made when the first grammar comes
        return guidance.kept_bytes if guidance else 0

    def forget_grammars(self) -> None:
        """Free the compiled grammars that no request uses."""
        if guidance := self.__dict__.get("guidance"):
            guidance.forget()

    def new_session(self, target: Slot | None = None) -> Session:
        """Make a session over a slot; None = a new one."""
        path, manifest, known = self.bundle.path, self.bundle.manifest, self.experience
        session = Session(path, manifest, self.model, self._draft_model, self.context, known, self.store, target)
        if self.encoding is not None:
            session.attend_by(self.encoding.attend)
        return session

    def source(self, content: Sequence[int] | NDArray[np.float32], settings: Settings) -> Source:
        """Make a source from the encoder's input, with the first tokens of the text for the languages of the settings.

        Raises:
            InvalidRequest: invalid input for the encoder, or a language that the model lacks.
        """
        assert self.encoding is not None
        text, begin = self.bundle.manifest.text, settings.begin
        if begin is None and self.sources is not None:
            begin = tuple(self.sources.begin(settings.source_language, settings.target_language))
        if begin is None and (speech := self.bundle.manifest.speech) is not None:
            begin = speech.begin()
        if begin is None:
            begin = tuple(token for token in text.begin if isinstance(token, int)) if text else ()
        source = Source.of(content, begin)
        self.encoding.check(source)
        return source

    def hold_images(self, prompt: Sequence[int] | Source) -> list[Inserted]:
        """Keep the images of a prompt until ``images.rows.let_go``; raises as ``reader`` and ``Images.hold``."""
        if isinstance(prompt, Source) or max(prompt, default=0) < INSERTED:
            return []
        return self.reader().hold(prompt)

    @contextmanager
    def seeing(self, prompt: Sequence[int] | Source) -> Iterator[None]:
        """Keep the images of a prompt for the duration of the block."""
        images = self.hold_images(prompt)
        try:
            yield
        finally:
            if images:
                self.reader().rows.let_go(images)

    def reader(self) -> Images:
        """Return the reader of images or recordings; an ``InvalidRequest``: there is none."""
        if self.images is not None:
            return self.images
        if self.bundle.manifest.target.tower is not None:
            raise InvalidRequest(
                "only native operators on the CPU read images, sound and captions",
                "use `--operators native --device cpu`",
            )
        raise InvalidRequest(
            "this bundle's model reads only text, and got an image or a recording",
            "export one that reads images, such as SmolVLM2, or recordings, such as Qwen3-ASR",
        )

    def open_slot(self, reserve: int = 256, prompt: Sequence[int] | Source | None = None) -> Slot:
        """Open a slot of the target that no session has, for measurements; of an encoder-decoder over a source."""
        slot = open_slot(self.model, context=self.context, reserve=reserve)
        if self.encoding is not None:
            self.encoding.attend("target", slot, prompt if isinstance(prompt, Source) else None)
        return slot

    def close(self) -> None:
        """Free the model and its memory at once; see ``Engine.close``."""
        with self.lock:
            self.places.close()
            self.sessions.close()
            if self.guided_sessions is not None:
                self.guided_sessions.close()
            self._model = None
            self._drafts.clear()
            if self.encoding is not None:
                self.encoding.close()
            if self.images is not None and not self._shared:
                self.images.close()
            if self._off_device is not None:
                self._off_device.close()
        trim_memory()

    def _draft_model(self, name: str) -> Model:
        if name not in self._drafts:
            self._drafts[name] = model = open_draft(self.bundle, name, self.options, self.operators)
            target, own = self.bundle.manifest.target, model.part
            if target.sense is not None and target.sense.words.id < model.facts.vocab:
                model.inserted.instead = target.sense.words.id
            if self.images is not None and own.sense is not None and "inserted" in model.given:
                model.inserted = self.images.beside(name)
        return self._drafts[name]
