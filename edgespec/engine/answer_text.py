"""The answer of a request: its tokens, the text that they make, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.loop import Round
from edgespec.decoding.settings import Settings
from edgespec.engine.result import Chunk, Finish
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder


class AnswerText:
    """Turns the rounds of a request into text.

    Attributes:
        tokens: the new token ids, the one that ended the text among them.
        logprobs: the log-probability of each, where the request asks for them.
        finish: why it ended; None = it has not.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], settings: Settings) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = [] if settings.logprobs else None
        self.finish: Finish | None = None
        self._decoder = StreamDecoder(codec, prompt, settings.stop, settings.markers)

    def take(self, item: Round) -> Chunk:
        """Add a round's tokens; a stop string in the middle of it drops the tokens after."""
        pieces: list[str] = []
        self.finish = item.finish
        for at, token in enumerate(item.tokens):
            self.tokens.append(token)
            if self.logprobs is not None and item.logprobs is not None:
                self.logprobs.append(item.logprobs[at])
            ended = item.finish == "eos" and at == len(item.tokens) - 1
            pieces.append("" if ended else self._decoder.push([token]))  # EOS is not text, even if it is a word
            if self._decoder.stopped is not None:
                self.finish = "stop"
                break
        return Chunk("".join(pieces), item, tuple(pieces))

    def end(self) -> str:
        """Return the text that was held back, as it might have begun a stop string."""
        return self._decoder.finish()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._decoder.text

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None = none did."""
        return self._decoder.stopped
