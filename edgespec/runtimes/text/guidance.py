"""Texts that follow a JSON schema, a regular expression or a grammar, by the llguidance library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Grammar
from edgespec.decoding.target import common_prefix
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.codec import TextCodec

MOST = 1 << 20  # characters of a grammar
KEPT_BYTES = 32 << 20  # of compiled grammars that no request uses
# what compiled grammars took: 122 to 210 bytes a character, schemas of 3 to 93 kB (llguidance 1.9); the rest is a guess
EACH_BYTES, CHARACTER_BYTES = 1 << 18, 224
# JSON as models write it; where spaces and line ends were free, a small model could write them forever
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Guidance:
    """Makes constraints for the texts of one bundle.

    Args:
        codec: its tokenizer.
        eos: tokens that end its texts.
        vocab: logits of a row, which may be more than the tokenizer has tokens.

    Raises:
        InvalidRequest: a tokenizer without an end, or of a kind that llguidance cannot read.
    """

    def __init__(self, codec: TextCodec, eos: Sequence[int], vocab: int) -> None:
        from llguidance import LLTokenizer

        if not eos:
            raise InvalidRequest("a text that must follow a grammar has to end, and this bundle has no EOS token")
        self.vocab = vocab
        try:
            self._tokenizer = LLTokenizer(codec.tokenizer.to_str(), n_vocab=vocab, eos_token=min(eos))
        except ValueError as error:
            raise InvalidRequest(f"this bundle's tokenizer cannot be guided: {error}") from error
        self._kept: dict[Grammar, Any] = {}  # matchers at the beginning of a text; the last asked for is last
        self._lock = Lock()

    @staticmethod
    def nbytes(grammar: Grammar) -> int:
        """Bytes that a compiled grammar takes, about."""
        return EACH_BYTES + CHARACTER_BYTES * len(grammar.text)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept for requests to come, about."""
        return sum(map(self.nbytes, list(self._kept)))

    def forget(self) -> None:
        """Free them; requests that run have their own."""
        with self._lock:
            self._kept.clear()

    def require(self, grammar: Grammar) -> None:
        """Refuse a grammar that ``constraint`` would refuse."""
        self._compiled(grammar)

    def constraint(self, grammar: Grammar, prompt: int) -> GuidedText:
        """Make the constraint that ``grammar`` puts on what follows ``prompt`` tokens.

        Raises:
            InvalidRequest: a grammar that is none, or that llguidance does not know; the message says where.
        """
        return GuidedText(self._compiled(grammar).deep_copy(), prompt, self)

    def agreeing(self, mask: NDArray[np.bool_], forced: bytes) -> NDArray[np.bool_]:  # [vocab], [vocab]
        """Remove from ``mask`` the tokens that contradict ``forced``, the bytes that must come next.

        Where a lone token writes them, as the space of ``"age": 5`` in a small SentencePiece vocabulary, llguidance
        names the tokens behind it instead.
        """
        kept = np.zeros_like(mask)
        for token in mask.nonzero()[0]:
            written = self._written[token]
            kept[token] = written.startswith(forced) or forced.startswith(written)
        if not kept.any():
            kept[:] = [len(written) > 0 and forced.startswith(written) for written in self._written]
        return kept

    @cached_property
    def _written(self) -> list[bytes]:
        """What each token writes, as llguidance names bytes that must come: a special token by its number."""
        known = self._tokenizer
        return [
            b"\xff[%d]" % token if known.is_special_token(token) else bytes(known.decode_bytes([token]))
            for token in range(self.vocab)
        ]

    def _compiled(self, grammar: Grammar) -> Any:
        """Return a matcher of ``grammar`` at the beginning of a text; some are kept, as requests repeat grammars."""
        with self._lock:
            made = self._kept.pop(grammar, None)
        made = made or self._compile(grammar)
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > 1 and self.kept_bytes > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return made

    def _compile(self, grammar: Grammar) -> Any:
        """Compile ``grammar`` into a matcher at the beginning of a text."""
        from llguidance import LLMatcher

        if len(grammar.text) > MOST:
            raise InvalidRequest(f"a grammar of {len(grammar.text)} characters: expected at most {MOST}")
        try:
            matcher = LLMatcher(self._tokenizer, _translated(grammar), log_level=0)  # it would write on stderr
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise InvalidRequest(f"{grammar.kind}: {problem}", "see docs/guides/structured-output.md")
        return matcher


def _translated(grammar: Grammar) -> str:
    """Translate ``grammar`` into llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_FORM))
    make = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return str(make(grammar.text))


class GuidedText:
    """A constraint (``decoding.sampling``): follows whatever prefix it is asked for, from the last one.

    ``matcher`` is llguidance's, at the beginning of the text, before which there are ``prompt`` tokens.
    """

    scored = False

    def __init__(self, matcher: Any, prompt: int, guidance: Guidance) -> None:
        self._matcher, self._prompt, self._guidance = matcher, prompt, guidance
        self._at: list[int] = []  # tokens that the matcher has consumed

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_] | None:
        """See Constraint; behind a token that may not be there anything is: nobody will look."""
        return self._mask() if self._go_to(prefix) else None

    def _mask(self) -> NDArray[np.bool_]:  # [vocab]
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(packed, count=self._guidance.vocab, bitorder="little").astype(np.bool_)
        forced = b"" if self._matcher.is_stopped() else bytes(self._matcher.compute_ff_bytes())
        return self._guidance.agreeing(mask, forced) if forced else mask

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint."""
        if not self._go_to(prefix) or self._matcher.is_stopped():
            return []
        found = [int(token) for token in self._matcher.compute_ff_tokens()]
        self._check()
        return found[:most]

    def _go_to(self, prefix: Sequence[int]) -> bool:
        """Move the matcher; False = the grammar does not allow this prefix."""
        text = list(prefix[self._prompt :])
        same = common_prefix(self._at, text)
        if back := len(self._at) - same:
            self._matcher.rollback(back)
            del self._at[same:]
        for token in text[same:]:
            if self._matcher.is_stopped():
                return False
            if not self._matcher.try_consume_tokens([token]):
                if self._mask()[token]:  # else a text would go on without its grammar
                    raise InvalidRequest(f"the grammar cannot be followed: token {token} is allowed, and then refused")
                return False
            self._at.append(token)
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {self._matcher.get_error()}")
