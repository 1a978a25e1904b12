"""Turns of one conversation, rendered with the template of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.decoding.settings import Settings, SettingsChanges
from edgespec.decoding.target import common_prefix
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.chat import Message

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Conversation:
    """A conversation with a loaded bundle; ``engine.conversation()`` makes one.

    Every turn renders and tokenizes all messages.  The longest prefix in common with a KV slot is not computed again
    (``Stats.reused_tokens``).  That is the whole conversation so far, unless the template rewrites earlier answers or
    their text has other tokens than those generated.

    When the context is full, the oldest turns are dropped from the prompt, enough to free half of it, so that the next
    turns compute little again.  The messages before the first question, such as a system message, stay.

    Attributes:
        messages: all messages; append other messages here, such as the result of a tool.
        tools: JSON schemas of functions that the model may call.
        options: more variables for the template, such as ``enable_thinking``.
        settings: for every turn.
        left_out: messages that the model no longer sees; ``messages`` still has them.
    """

    def __init__(
        self,
        write: Callable[..., list[int]],
        start: Callable[..., Stream],
        messages: Sequence[Message] = (),
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        save: Callable[..., None],
        context: int,
    ) -> None:
        self._write, self._start, self._save = write, start, save
        self.settings = settings or Settings()
        self.messages = [dict(message) for message in messages]
        self.tools, self.options = tools, dict(template_options or {})
        self.left_out, self._context = 0, context
        self._prompt: list[int] = []

    def __repr__(self) -> str:
        return f"<Conversation, {len(self.messages)} messages>"

    def ask(self, content: Any = None, **changes: Unpack[SettingsChanges]) -> Result:
        """Ask a question, and keep the answer.

        Args:
            content: see ``stream``.
            **changes: fields of ``Settings``, set for this turn.

        Raises:
            InvalidRequest: see ``stream``.
        """
        stream = self.stream(content, **changes)
        for _ in stream:
            pass
        self.take(stream.result)
        return stream.result

    def stream(self, content: Any = None, **changes: Unpack[SettingsChanges]) -> Stream:
        """Start to answer a question; give the result to ``take`` at the end.

        Args:
            content: the text of the user, or parts (``Engine.chat_prompt``); None = answer the last message.
            **changes: fields of ``Settings``, set for this turn.

        Raises:
            InvalidRequest: the template refuses the messages, or the question does not fit; it is not kept then.
        """
        asked = [*self.messages, {"role": "user", "content": content}] if content is not None else list(self.messages)
        settings = self.settings.changed(**changes)
        left_out, prompt = self._fitting(asked, settings.max_new_tokens or self._context)
        stream = self._start(prompt, settings)
        self.messages, self._prompt, self.left_out = asked, prompt, left_out
        return stream

    def _fitting(self, asked: Sequence[Message], new: int) -> tuple[int, list[int]]:
        """How many messages after the first ones to leave out, and the prompt without them."""
        first, turns = _first(asked), [at for at, message in enumerate(asked) if message.get("role") == "user"]
        left_out = self.left_out if first + self.left_out in turns else 0  # messages may have been taken away
        prompt = self._chat(asked, left_out)
        if len(prompt) + min(new, self._context // 4) > self._context:
            for left_out in [turn - first for turn in turns if turn - first > left_out]:
                prompt = self._chat(asked, left_out)
                if len(prompt) <= self._context // 2:
                    break
        return left_out, prompt

    def _chat(self, messages: Sequence[Message], left_out: int, **how: Any) -> list[int]:
        first = _first(messages)
        seen = [*messages[:first], *messages[first + left_out :]]
        return self._write(seen, self.tools, options=self.options, **how)

    def take(self, result: Result) -> None:
        """Add the answer to the messages.

        Some tokenizers write the space before an answer as part of its first word, and some templates add it.  Of the
        text with and without spaces around it, the version that reproduces more of the tokens is kept.

        Args:
            result: the result of the stream that ``stream`` started.
        """
        written = [*self._prompt, *result.tokens]
        texts = list(dict.fromkeys((result.text, result.text.lstrip(), result.text.strip())))
        if len(texts) > 1:
            texts.sort(
                key=lambda text: -common_prefix(self._rendered([*self.messages, _answer(text)]), written)
            )  # stable
        self.messages.append(_answer(texts[0]))

    def undo(self) -> str | None:
        """Remove the last question and everything after it; returns the question, or None."""
        asked = [at for at, message in enumerate(self.messages) if message.get("role") == "user"]
        if not asked:
            return None
        question: str = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return question

    def tokens(self) -> int:
        """Count the tokens of the messages that the model sees."""
        return len(self._rendered(self.messages))

    def save(self, file: str | os.PathLike[str]) -> None:
        """Save the messages and their KV state, as ``Engine.save_session`` does.

        Args:
            file: a session file; an existing one is replaced.

        ``engine.conversation(engine.restore_session(file))`` continues from it.  Before the first question this
        saves the system message, which is then computed once per device.
        """
        self._save(file, self._rendered(self.messages), self.messages)

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of these messages without the oldest turns; empty if the template refuses them."""
        try:
            return self._chat(messages, self.left_out, generation_prompt=False)
        except InvalidRequest:
            return []


def _first(messages: Sequence[Message]) -> int:
    """Where the first question is."""
    return next((at for at, message in enumerate(messages) if message.get("role") == "user"), len(messages))


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
