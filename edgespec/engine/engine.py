"""A loaded bundle: generate, stream, chat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.drafters.ngram_store.store import NGramStore
from edgespec.drafters.proposer import proposer_name
from edgespec.drafters.skip_search.store import forget_sets
from edgespec.engine.admission import make_allowance
from edgespec.engine.batch import Batches
from edgespec.engine.conversation import Conversation
from edgespec.engine.methods import MethodChoice, check_branch, check_device, choose_method, own_choice
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk, Result
from edgespec.engine.sessions import Session, SessionPool, Times
from edgespec.errors import InvalidRequest
from edgespec.planning.expectations import predictions, ratios
from edgespec.planning.memory.allowance import OFF, Allowance
from edgespec.planning.profile.cache import find_profile
from edgespec.planning.profile.record import Profile
from edgespec.planning.speed.prediction import Speed
from edgespec.runtimes.devices.model import DeviceModel
from edgespec.runtimes.devices.trust import LONGEST
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.attention import AttentionChoice, choose_attention
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Precision
from edgespec.runtimes.files.operators import OperatorChoice, WantedOperators, choose_operators
from edgespec.runtimes.opening import open_draft, open_target, share_target
from edgespec.runtimes.ort.session import default_threads
from edgespec.runtimes.slots.probe import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.codec import TextCodec

Prompt = str | Sequence[int]
STATS_EVERY = 16  # rounds


class Engine:
    """A loaded bundle.  Requests may come from several threads; each keeps its own KV slot while it runs.

    Attributes:
        bundle: the opened bundle.
        codec: its tokenizer.
        operators: stock or native, and why.
        attention: how keys and values are kept, and what self-drafts read.
        strict: whether a row has the same bits in every pass, so that speculation writes exactly plain decoding's text.
        context: most tokens of a sequence, prompt included.
        store: n-grams of texts read earlier, for method ngram; None = none.
        device: where passes run.
        device_lost: why they no longer do; None = they do.

    Args (beyond those of ``load``):
        graph: which graph of the target; None = the one that can run every method.
        share: use this engine's session rather than a new one.
        ngram_store: the opened store.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        context: int | None = None,
        strict: bool = True,
        operators: WantedOperators = "auto",
        device: DeviceName = "cpu",
        device_precision: Precision | None = None,
        attention: str | None = None,
        draft_attention: str | None = None,
        graph: str | None = None,
        share: Engine | None = None,
        ngram_store: NGramStore | None = None,
        budget: str | int | None = OFF,
    ) -> None:
        manifest = bundle.manifest
        facts = manifest.target.facts
        if context is not None and not 1 < context <= facts.context:
            raise InvalidRequest(f"context {context}: expected 2 to {facts.context}, what the bundle was exported for")
        self.bundle, self.strict = bundle, strict
        self.device: DeviceName = device
        self.device_lost: str | None = None  # why requests no longer go there
        self._off_device: Engine | None = None
        self._threads, self._device_precision = threads, device_precision
        if device == "cpu" and device_precision is not None:
            raise InvalidRequest(f"device precision {device_precision}: device cpu has none", "leave it out")
        self.context = context or (facts.context if device == "cpu" else min(facts.context, LONGEST))
        self.codec = TextCodec(bundle.path)
        self.store = ngram_store
        if ngram_store is not None:
            ngram_store.require(self.codec.vocabulary_sha256(), self.codec.vocab_size)
        self.eos = frozenset(manifest.tokenizer.eos)
        self.lock = threading.RLock()
        self._wanted = operators
        if device != "cpu":
            operators = "stock"
        self.operators: OperatorChoice = share.operators if share else choose_operators(operators, manifest.target)
        self.attention: AttentionChoice = (
            share.attention
            if share
            else choose_attention(manifest.target, self.operators.kind, attention, draft_attention)
        )
        if self.attention.draft and not {"self-spec", "swift"} & manifest.methods.keys():
            raise InvalidRequest(
                f"draft attention {self.attention.draft} is for self-speculation, which this bundle was not made for",
                "export it with `--method self-spec`",
            )
        self.allowance: Allowance = (
            share.allowance if share else make_allowance(self, threads or default_threads(), budget)
        )
        self.allowance.admit_bundle(context)
        start = time.perf_counter()
        graph = graph or self.operators.graph(manifest.target, strict)
        self.model: Model = (
            share_target(share.model, strict)
            if share
            else open_target(bundle, device, device_precision, graph, strict, threads, self.attention.kv)
        )
        self.load_ms = 1000 * (time.perf_counter() - start)
        self._draft: Model | None = None
        self.sessions: SessionPool = SessionPool(self.new_session)
        self._batches = Batches(self)
        self._rows_exact: bool | None = None
        self._times: Times = {}

    # -- requests ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = STATS_EVERY,
        **changes: Any,
    ) -> Stream:
        """Start a request.

        Args:
            prompt: text, or token ids.
            settings: what to set.
            cancel: set it to end the request after the round at hand.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end; they change
                afterwards, so copy what is to be kept (``as_dict``).
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Raises:
            InvalidRequest: an empty or too long prompt, an unknown method, nonsense settings.
        """
        settings = (settings or Settings()).changed(**changes)
        if stats_every < 1:
            raise InvalidRequest(f"stats_every {stats_every}: expected at least one round")
        return Stream(self.usable, self._encode(prompt), settings, cancel, on_stats, stats_every)

    def generate(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = STATS_EVERY,
        **changes: Any,
    ) -> Result:
        """Complete a prompt; arguments as for ``stream``, and ``on_chunk`` is called with every piece."""
        stream = self.stream(prompt, settings, cancel=cancel, on_stats=on_stats, stats_every=stats_every, **changes)
        for chunk in stream:
            if on_chunk:
                on_chunk(chunk)
        return stream.result

    def generate_batch(
        self, prompts: Sequence[Prompt], settings: Settings | None = None, **changes: Any
    ) -> list[Result]:
        """Complete several prompts, ``Settings.batch`` at a time; results in the order of the prompts.

        On native operators the passes of all that run are one, so that the weights are read once; every text is that
        of the request alone.  On stock operators they take turns, a round each, and gain nothing.
        """
        if isinstance(prompts, str):
            raise InvalidRequest(
                "generate_batch got one text: expected a list of prompts", "use generate for one prompt"
            )
        encoded = [self._encode(prompt) for prompt in prompts]
        return self._batches.run(encoded, (settings or Settings()).changed(**changes))

    def chat(
        self,
        messages: Sequence[Message],
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Result:
        """Answer a conversation, rendered by the model's own template.  Earlier turns still in a slot are reused.

        Args:
            messages: dicts with role and content.
            settings: what to set.
            tools: JSON schemas of functions that the model may call.
            template_options: what else the template knows, such as ``{"enable_thinking": False}``.
            **changes: as for ``stream``.
        """
        return self.generate(self.codec.chat(messages, tools, options=template_options), settings, **changes)

    def conversation(
        self,
        messages: Sequence[Message] = (),
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """A conversation of several turns, which keeps the messages; arguments as for ``chat``."""
        return Conversation(self, messages, settings, tools=tools, template_options=template_options)

    # -- what this bundle is -------------------------------------------------------------------------------------------

    @property
    def methods(self) -> list[str]:
        """Methods this bundle can run."""
        return list(self.bundle.manifest.methods)

    @property
    def approximations(self) -> list[str]:
        """What differs from the source model whatever the method."""
        form = self.bundle.manifest.target.format
        found = [] if form == "fp32" else [f"{form} weights", "8-bit activations"]
        if isinstance(self.model, DeviceModel):
            return found + self.model.approximations
        return found + (self.model.kv.approximations if self.operators.kind == "native" else [])

    def choose(self, method: str | None) -> MethodChoice:
        """The method for a request, with the reason."""
        return self.choose_for(Settings(method=method))

    def choose_for(self, settings: Settings) -> MethodChoice:
        """The same for whole settings: a chain's proposers, or a proposer of the caller's own.

        Raises:
            InvalidRequest: a method or a proposer that this bundle does not have, or both a method and one's own.
        """
        check_branch(self.bundle.manifest, settings.drafts.branch)
        if settings.proposer is None:
            # a text that depends on how much is guessed must not depend on whether somebody has calibrated since
            known = None if settings.sampling.seeded_rejection else self.predictions
            without = () if self.device == "cpu" else ("swift",)  # see check_device
            choice = choose_method(self.bundle.manifest, settings.method, settings.drafts, known, without)
            check_device(self.device, choice)
            return choice
        if settings.method is not None or settings.drafts.proposers:
            raise InvalidRequest(
                "got a proposer of your own and a method: expected one of them", "leave out the method"
            )
        return own_choice(proposer_name(settings.proposer))

    @cached_property
    def profile(self) -> Profile | None:
        """What ``edgespec calibrate`` found of this device with this bundle, run as here; None = nobody has."""
        attention = self.attention.name if self.operators.kind == "native" else None
        manifest, threads = self.bundle.manifest, self._threads or default_threads()
        return find_profile(manifest, self.operators.kind, threads, self.device, attention, self.strict)

    @cached_property
    def predictions(self) -> dict[str, Speed]:
        """Predicted speeds by method, as this engine runs."""
        return predictions(
            self.bundle.manifest,
            self.operators.kind,
            self._threads or default_threads(),
            self.context,
            device=self.device,
            attention=self.attention.name if self.operators.kind == "native" else None,
            strict=self.strict,
            profile=self.profile,
        )

    def forget_skip_sets(self) -> int:
        """Delete the skip sets that swift has found for this bundle and kept; returns how many files there were.

        Running sessions go on with what they have: do it after loading.
        """
        self.sessions.clear()
        return forget_sets(self.bundle.manifest)

    def rows_exact(self) -> bool:
        """Whether verified rows have the bits of plain decoding's on this machine; probed once, then known."""
        if self._rows_exact is None:
            session = self.sessions.take([])
            try:
                with self.lock:
                    self._rows_exact = self.strict and rows_exact(session.target)
            finally:
                self.sessions.give_back(session)
        return self._rows_exact

    @property
    def exact_rows(self) -> bool:
        """Whether methods must write plain decoding's very text: strict mode, on graphs that were made for it.

        Of a graph that optimum made only the probe can say it; where it does not, near-ties may differ.
        """
        return self.strict and (self.bundle.manifest.target.origin == "edgespec" or self.rows_exact())

    @property
    def usable(self) -> Engine:
        """This engine, or the one on the CPU once its device is lost."""
        return self if self.device_lost is None else self.off_device(self.device_lost)

    def off_device(self, reason: str) -> Engine:
        """The same bundle on the CPU; requests go there from now on."""
        with self.lock:
            self.device_lost = reason
            if self._off_device is None:
                how: dict[str, Any] = {"threads": self._threads, "context": self.context, "strict": self.strict}
                self._off_device = Engine(self.bundle, **how, ngram_store=self.store)
                self.sessions.clear()
            return self._off_device

    def kv_bytes(self) -> int:
        """Bytes of KV allocated by all slots."""
        return self.sessions.kv_bytes() + self._batches.kv_bytes

    def close(self) -> None:
        """Forget all slots; the sessions go with the engine."""
        self.sessions.clear()
        self._batches.clear()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = self.codec.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if isinstance(prompt, str) and not prompt.strip():
            raise InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
        return tokens

    def new_session(self, target: Slot | None = None) -> Session:
        """A session over a slot; None = a new one."""
        bundle = self.bundle
        return Session(
            bundle.path,
            bundle.manifest,
            self.model,
            self._draft_model,
            self.context,
            self._times,
            self.store,
            target,
            ratios(self.profile),
        )

    def _draft_model(self) -> Model:
        if self._draft is None:
            how = self._device_precision, self._wanted, self.operators, self.model.threads
            self._draft = open_draft(self.bundle, self.device, *how)
        return self._draft
