"""Constrain texts to a JSON schema, a regular expression or a grammar, with the llguidance library."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cached_property
from random import Random
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Grammar
from edgespec.decoding.target import common_prefix
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.schemas import closed, objects

MOST = 1 << 20  # characters of a grammar
KEPT_BYTES = 32 << 20  # of compiled grammars that no request uses
# what compiled grammars took: 122 to 210 bytes a character, schemas of 3 to 93 kB (llguidance 1.9); the rest is a guess
EACH_BYTES, CHARACTER_BYTES = 1 << 18, 224
# states of a lexer, which llguidance makes while texts are written, and keeps: 200 to 500 bytes each.  With Qwen2.5's
# vocabulary, a schema of 7 fields needs fewer than 500, one of 120 fields 4,000, and strings of 5,000 characters 16,000
FEW_STATES, MANY_STATES, STATE_BYTES = 4096, 32768, 512
LEAST_PROGRESS = 8  # minimum tokens between two rebuilds of a text's states
LARGE_KNOWN = 256  # grammars that are remembered to need many states
TRIED_TOKENS, TRIED_SECONDS = 48, 0.2  # limits for trying a grammar on a text
NOT_VERBOSE, FULL = "<non-verbose/>", "too many states"  # in llguidance's messages
WHY = {  # its reasons for stopping
    "NoExtensionBias": "it leads to where nothing is allowed",
    "NoExtension": "it leads to where nothing is allowed",
    "LexerTooComplex": "it is too complex",
    "ParserTooComplex": "it is too complex",
}
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
        self._large: dict[Grammar, None] = {}  # grammars that need more than a few states
        self._lock = Lock()

    def nbytes(self, grammar: Grammar) -> int:
        """Bytes of a compiled grammar after texts have followed it."""
        states = MANY_STATES if self.is_large(grammar) else FEW_STATES
        return EACH_BYTES + CHARACTER_BYTES * len(grammar.text) + STATE_BYTES * states

    def is_large(self, grammar: Grammar) -> bool:
        """Whether a grammar is known to need many states."""
        return grammar in self._large

    def mark_large(self, grammar: Grammar) -> None:
        """Record that a grammar needs many states: each of its texts compiles it, and frees it at its end."""
        with self._lock:
            self._kept.pop(grammar, None)
            self._large[grammar] = None
            while len(self._large) > LARGE_KNOWN:
                del self._large[next(iter(self._large))]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept for later requests, approximately."""
        return sum(map(self.nbytes, list(self._kept)))

    def forget(self) -> None:
        """Free them; running requests have their own."""
        with self._lock:
            self._kept.clear()

    def require(self, grammar: Grammar) -> None:
        """Raise the error that ``constraint`` would raise for a grammar."""
        self.compiled(grammar)

    def try_out(self, grammar: Grammar) -> None:
        """Check that a grammar can be followed, by generating a few tokens that it allows.

        Raises:
            InvalidRequest: it cannot be compiled, leads to where nothing is allowed, or needs too many states.
        """
        random, until = Random(0), time.monotonic() + TRIED_SECONDS
        for _ in range(3):
            text, written = self.constraint(grammar, 0), list[int]()
            while len(written) < TRIED_TOKENS and time.monotonic() < until:
                forced = text.forced(written, TRIED_TOKENS)
                if forced:
                    written += forced
                    continue
                mask = text.allowed(written)
                allowed = np.flatnonzero(mask) if mask is not None else np.zeros(0, np.int64)
                if text.ended or not len(allowed):
                    break
                # ends of strings, lists and objects are few among many tokens, and lead further
                short = [token for token in allowed[:4096] if len(self._written[token]) == 1][:64]
                written.append(int(random.choice(short if short and random.random() < 0.5 else allowed)))
            text.allowed(written)

    def constraint(self, grammar: Grammar, prompt: int) -> GuidedText:
        """Make the constraint of ``grammar`` for the text after ``prompt`` tokens.

        Raises:
            InvalidRequest: an invalid grammar, or one that llguidance does not support; the message names the place.
        """
        return GuidedText(grammar, prompt, self)

    def agreeing(self, mask: NDArray[np.bool_], forced: bytes) -> NDArray[np.bool_]:  # [vocab], [vocab]
        """Remove from ``mask`` the tokens that contradict ``forced``, the bytes that must come next.

        If a single token writes them, as the space of ``"age": 5`` in a small SentencePiece vocabulary, llguidance
        names the tokens after it instead.
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
        """Return the bytes of each token, as llguidance names forced bytes: a special token by its number."""
        known = self._tokenizer
        return [
            b"\xff[%d]" % token if known.is_special_token(token) else bytes(known.decode_bytes([token]))
            for token in range(self.vocab)
        ]

    def compiled(self, grammar: Grammar) -> Any:
        """Return a matcher of ``grammar`` at the beginning of a text; some are kept, because requests repeat grammars.

        Copies of a matcher share its states, so those of large grammars are not kept.
        """
        if self.is_large(grammar):
            return self._compile(grammar, MANY_STATES)
        with self._lock:
            made = self._kept.pop(grammar, None)
        made = made or self._compile(grammar, FEW_STATES)
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > 1 and self.kept_bytes > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return made.deep_copy()

    def _compile(self, grammar: Grammar, states: int) -> Any:
        """Compile ``grammar`` into a matcher at the beginning of a text; its lexer has at most ``states`` states."""
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.text) > MOST:
            raise InvalidRequest(f"a grammar of {len(grammar.text)} characters: expected at most {MOST}")
        try:
            limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)  # else they hold the whole grammar
            # it would write on stderr
            matcher = LLMatcher(self._tokenizer, _translated(grammar), log_level=0, limits=limits)
            problem = matcher.get_error()
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem:
            problem = problem.replace(NOT_VERBOSE, "").strip()
            raise InvalidRequest(f"{grammar.kind}: {problem[:2000]}", "see docs/guides/structured-output.md")
        return matcher


def _translated(grammar: Grammar) -> str:
    """Translate ``grammar`` into llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        made = json.dumps(prepared(schema)) if isinstance(schema, dict) else grammar.text
        return str(LLMatcher.grammar_from_json_schema(made, defaults=JSON_FORM))
    make = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return str(make(grammar.text))


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a JSON schema with closed objects, and check that no pattern matches a named property.

    Raises:
        InvalidRequest: it cannot be followed; the message says why.
    """
    made = closed(schema)
    for node in objects(made):
        for pattern in node.get("patternProperties", {}):
            if fitting := [name for name in node.get("properties", {}) if _fits(name, pattern)]:
                raise InvalidRequest(
                    f"json_schema: the pattern {pattern[:80]!r} of patternProperties also fits the property "
                    f"{fitting[0][:80]!r}: expected patterns that fit no named property",
                    "say all about a property in properties",
                )
    return made


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern of JSON Schema fits a name, as llguidance reads it: in linear time."""
    from llguidance import LLMatcher

    both = {"type": "string", "const": name, "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(both)))


def _why(problem: str) -> str:
    """Explain what stopped a matcher, without the state of its parser."""
    first = problem.replace(NOT_VERBOSE, "").strip().partition("\n")[0]
    return WHY.get(first, first[:500]) or "no text is allowed here"


class GuidedText:
    """A constraint (``decoding.sampling``): follows any prefix, starting from the last one.

    Args:
        grammar: that the text follows.
        prompt: tokens before the text.
        guidance: compiles the grammar.
    """

    scored = False

    def __init__(self, grammar: Grammar, prompt: int, guidance: Guidance) -> None:
        self._grammar, self._prompt, self._guidance = grammar, prompt, guidance
        self._matcher = guidance.compiled(grammar)  # llguidance's
        self._shared = not guidance.is_large(grammar)  # whether other texts use the same states
        self._at: list[int] = []  # tokens that the matcher has consumed
        self._renewed = -LEAST_PROGRESS  # number of tokens when the states were last rebuilt

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_] | None:
        """See Constraint; positions after a disallowed token are unconstrained, because they are never read."""
        return self._mask() if self._go_to(prefix) else None

    def _mask(self) -> NDArray[np.bool_]:  # [vocab]
        packed = np.frombuffer(self._ask("compute_bitmask"), np.uint8)
        mask = np.unpackbits(packed, count=self._guidance.vocab, bitorder="little").astype(np.bool_)
        forced = b"" if self._matcher.is_stopped() else bytes(self._ask("compute_ff_bytes"))
        return self._guidance.agreeing(mask, forced) if forced else mask

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint."""
        if not self._go_to(prefix) or self._matcher.is_stopped():
            return []
        found = [int(token) for token in self._ask("compute_ff_tokens")]
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
            if not self._ask("try_consume_tokens", [token]):
                if self._mask()[token]:  # otherwise the rest of the text would ignore its grammar
                    raise InvalidRequest(f"the grammar cannot be followed: token {token} is allowed, and then refused")
                return False
            self._at.append(token)
        return True

    def _ask(self, name: str, *given: Any) -> Any:
        """Query the matcher; rebuild one that has too many states, with few at first.

        Raises:
            InvalidRequest: the grammar leads to where nothing is allowed, or every few tokens need too many states.
        """
        while True:
            found = getattr(self._matcher, name)(*given)
            if not self._matcher.is_error():
                return found
            problem = self._matcher.get_error()
            if FULL not in problem or not (self._shared or len(self._at) - self._renewed >= LEAST_PROGRESS):
                raise InvalidRequest(f"the grammar cannot be followed: {_why(problem)}")
            self._renewed = self._renewed if self._shared else len(self._at)
            self._shared = False
            self._guidance.mark_large(self._grammar)
            self._matcher = self._guidance.compiled(self._grammar)
            if self._at and self._matcher.try_consume_tokens(self._at) < len(self._at):
                raise InvalidRequest(f"the grammar cannot be followed: {_why(self._matcher.get_error())}")
