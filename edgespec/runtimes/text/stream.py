"""Text of tokens as they come: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stops import StopStrings


class StreamDecoder:
    """Decodes a growing token list; returns text once it is complete UTF-8 and cannot begin a stop string.

    The window is the last tokens that gave text and those after them.  That is enough for the space of the next
    word, and for characters that span several tokens.

    Args:
        codec: the tokenizer.
        prompt: the last tokens of the prompt, because some tokenizers need them to decode a word's leading space.
        stop: strings that end the text; they are not part of it.
        markers: special tokens that are part of it.

    Attributes:
        text: all text returned so far.
        stopped: the stop string that ended the text; None = none did.
    """

    _CONTEXT = 8  # tokens of the prompt that are enough context, if no character is cut
    _HALF = 3  # maximum bytes of an incomplete character, each perhaps decoded as U+FFFD

    def __init__(
        self, codec: TextCodec, prompt: Sequence[int] = (), stop: Sequence[str] = (), markers: Sequence[str] = ()
    ) -> None:
        self.codec = codec
        self._decode = partial(codec.decode, shown=frozenset(codec.special_ids(markers).values() if markers else ()))
        self._stops = StopStrings(stop) if stop else None
        self.text = ""
        self.stopped: str | None = None
        self._window = self._tail(list(prompt))
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._out = len(self._decode(self._window))  # characters of the window's text that are out
        self._held = ""  # complete text that may begin a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens -> new text, possibly empty.  Once stopped, nothing more comes."""
        given = ""
        for token in tokens:
            if self.stopped is not None:
                break
            self._window.append(token)
            text = self._decode(self._window)
            half = len(text) - len(text.rstrip("\ufffd"))  # characters that may be the beginning of another
            whole = len(text) - min(half, self._HALF)
            fresh = text[self._out : whole]
            self._out = min(max(self._out, whole), len(text))  # a prompt may end within a character
            if whole == len(text):
                if fresh.strip(" "):  # others stay: some decoders strip the spaces before the first word they see
                    del self._window[: self._settled]
                    self._out = len(self._decode(self._window))
                self._settled = len(self._window)
            given += self._give(self._held + fresh)
        return given

    def finish(self) -> str:
        """Return the text held back, at the end."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._window)
        rest, self._out = text[self._out :], len(text)
        self._settled = len(self._window)
        given = self._give(self._held + rest)
        last, self._held = self._held, ""  # empty if a stop string was found
        self.text += last
        return given + last

    def _tail(self, prompt: list[int]) -> list[int]:
        """Return the end of ``prompt``, long enough to be written as in the whole."""
        whole, count = self._decode(prompt), self._CONTEXT
        while count < len(prompt):
            part = self._decode(prompt[-count:])
            if part and whole.endswith(part):
                break
            count *= 2
        return prompt[-count:]

    def _give(self, candidate: str) -> str:
        self._held = ""
        if self._stops and (found := self._stops.find(candidate)):
            at, self.stopped = found
            candidate = candidate[:at]
        elif self._stops and (keep := self._stops.beginning(candidate)):
            candidate, self._held = candidate[:-keep], candidate[-keep:]
        self.text += candidate
        return candidate
