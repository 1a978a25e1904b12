"""A loaded bundle: generate, stream, chat."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.decoding.settings import Settings, SettingsChanges
from edgespec.decoding.stats import Stats
from edgespec.engine.batch import Batches
from edgespec.engine.conversation import Conversation
from edgespec.engine.embedding import embed
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.request import Stream, check_cancel
from edgespec.engine.result import Chunk, Result
from edgespec.engine.saved import restore_session, save_session
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.text.chat import Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from edgespec.runtimes.files.manifest import Pooling

Prompt = str | Sequence[int]
STATS_EVERY = 16  # rounds


class Engine(LoadedBundle):
    """A loaded bundle that answers.  ``with edgespec.load(...) as engine:`` closes it at the end.

    Requests may come from several threads; each keeps its own KV slot while it runs.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: LoadOptions | None = None,
        *,
        graph: str | None = None,
        share: LoadedBundle | None = None,
    ) -> None:
        super().__init__(bundle, options, graph=graph, share=share)
        self._batches = Batches()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = STATS_EVERY,
        **changes: Unpack[SettingsChanges],
    ) -> Stream:
        """Start a request.

        Args:
            prompt: text, or token ids.
            settings: what to set; None = ``defaults``, which has the model's own sampling.
            cancel: set it to end the request after the round at hand.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end; they change
                afterwards, so copy what is to be kept (``as_dict``).
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Raises:
            InvalidRequest: an empty or too long prompt, an unknown method, nonsense settings.
        """
        settings = (settings or self.defaults).changed(**changes)
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
        **changes: Unpack[SettingsChanges],
    ) -> Result:
        """Complete a prompt; arguments as for ``stream``, and ``on_chunk`` is called with every piece."""
        stream = self.stream(prompt, settings, cancel=cancel, on_stats=on_stats, stats_every=stats_every, **changes)
        for chunk in stream:
            if on_chunk:
                on_chunk(chunk)
        return stream.result

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        cancel: threading.Event | None = None,
        on_result: Callable[[int, Result], None] | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> list[Result]:
        """Complete several prompts, ``Settings.batch`` at a time; results in the order of the prompts.

        On native operators the passes of all that run are one, so that the weights are read once; every text is that
        of the request alone.  On stock operators they take turns, a round each, and gain nothing.

        Args:
            prompts: texts, or token ids.
            settings: of all of them; None = ``defaults``.
            seeds: one for each prompt; None = the seed of the settings for all.
            cancel: set it to end all of them after the round at hand; what was not begun has no tokens.
            on_result: called with the number of each prompt whose answer is complete, and the result, as they end.
            **changes: as for ``stream``.

        Raises:
            InvalidRequest: as for ``stream``, or seeds that are not one for each prompt.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise InvalidRequest(
                f"generate_batch got {type(prompts).__name__}: expected a list of prompts",
                "use generate for one prompt",
            )
        check_cancel(cancel)
        encoded = [self._encode(prompt) for prompt in prompts]
        common = (settings or self.defaults).changed(**changes)
        if seeds is not None and len(seeds) != len(encoded):
            raise InvalidRequest(f"{len(seeds)} seeds for {len(encoded)} prompts: expected one for each prompt")
        each = [common] * len(encoded) if seeds is None else [common.changed(seed=seed) for seed in seeds]
        return self._batches.run(self, encoded, each, cancel, on_result)

    def chat(
        self,
        messages: Sequence[Message],
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Result:
        """Answer a conversation, rendered by the model's own template.  Earlier turns still in a slot are reused.

        Args:
            messages: dicts with role and content.
            settings: what to set; None = ``defaults``.
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
        """Begin a conversation of several turns, which keeps the messages; arguments as for ``chat``."""
        return Conversation(
            self.codec,
            self.stream,
            messages,
            settings or self.defaults,
            tools=tools,
            template_options=template_options,
            save=self.save_session,
            context=self.context,
        )

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        cancel: threading.Event | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts: the hidden states of each one's tokens behind the final norm, pooled -> float32 [n, dimensions].

        A row has length one, and the same bits whatever else is embedded or decoded.

        Args:
            texts: each a text, or token ids.
            pooling: ``mean`` of all tokens or the ``last`` one; None = as the model says, else mean.
            dimensions: only so many first numbers, for models that were trained for it (arXiv 2205.13147); None = all.
            cancel: set it to end with an error after the chunk at hand.

        Raises:
            BudgetError: the longest text does not fit the memory.
            InvalidRequest: a bundle that gives no hidden states (the hint says what to do), an empty or too long text.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise InvalidRequest(f"embed got {type(texts).__name__}: expected a list of texts")
        return embed(self, [self._encode(text) for text in texts], pooling, dimensions, cancel)

    # -- session files -----------------------------------------------------------------------------------------------

    def save_session(self, file: str | os.PathLike[str], prompt: Prompt, messages: Sequence[Message] = ()) -> None:
        """Write what passes left of a text, so that another process need not compute it again.

        Args:
            file: a session file; one that is there is replaced, whole or not at all.  It holds the text in a form that
                can be read back: only its owner may read it.
            prompt: text, or token ids; what no slot holds of it yet is computed first, without an answer.
            messages: of the conversation that it is, if it is one.

        Raises:
            BudgetError, InvalidRequest: as for ``stream``.
            SessionError: it cannot be written, or a device holds it.
        """
        save_session(
            self.usable, Path(file), self.codec.encode(prompt) if isinstance(prompt, str) else prompt, messages
        )

    def restore_session(self, file: str | os.PathLike[str]) -> list[Message]:
        """Take up a session file; a request whose prompt begins as its text computes nothing of that again.

        Returns:
            the messages of its conversation; ``conversation`` goes on with them.

        Raises:
            BudgetError: it does not fit the memory.
            SessionError: none, damaged, or made with another bundle or other settings.
        """
        return restore_session(self.usable, Path(file))

    # -- the whole ---------------------------------------------------------------------------------------------------

    def plain(self) -> Engine:
        """Load the bundle's fastest plain decoding: its graph without gates and padding, or this model.

        Native operators have one graph, whose plain decoding is the fastest; so has a device.
        """
        self.require_open()
        native = self.operators.kind == "native"
        options = replace(
            self.options, strict=False, operators=self.operators.kind, draft_attention=None, prompt_cache=False
        )
        shared = native or not self.strict or self.device != "cpu"
        return Engine(self.bundle, options, graph="native" if native else "plain", share=self if shared else None)

    def close(self) -> None:
        """Free the model and all that lies on it, at once; a round at hand ends first.

        Requests that are running end with an error at their next round, as does whatever is asked for later; results
        of earlier ones stay.  What is to be kept of prompts is written first.
        """
        self.prompts.finish()
        self.usable.prompts.finish()
        with self.lock:
            self._batches.close()
            super().close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
            return self.codec.encode(prompt)
        try:
            if not isinstance(prompt, (bytes, bytearray)):
                return [index(token) for token in prompt]
        except TypeError:
            pass
        raise InvalidRequest(f"the prompt is {type(prompt).__name__}: expected text, or token ids")
