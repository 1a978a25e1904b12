"""Texts to embed or to score, as the token ids that a model reads: with its prompts, and in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.decoding.loop import check_tokens
from edgespec.errors import ContextFull, InvalidRequest, unknown_name
from edgespec.runtimes.files.embedding import EmbeddingPart
from edgespec.runtimes.text.codec import TextCodec

QUERY = "query", "s2p_query", "search_query", "retrieval.query", "Retrieval-query"
DOCUMENT = "document", "passage", "search_document", "retrieval.passage", "Retrieval-document"
"""Names of prompts for both sides of a search, as models and other APIs call them."""


def most_tokens(part: EmbeddingPart | None, context: int) -> int:
    """Count the tokens that a text may have; a decoder's cache keeps room for one more."""
    return context if part is not None and part.encoder else context - 1


def check_text(tokens: Sequence[int], part: EmbeddingPart | None, vocab: int, context: int) -> None:
    """Refuse token ids that cannot be embedded.

    Raises:
        ContextFull: too many.
        InvalidRequest: none, or one outside the vocabulary.
    """
    if not len(tokens):
        raise InvalidRequest("expected a text of at least one token, got none")
    if len(tokens) > (most := most_tokens(part, context)):
        raise ContextFull(
            f"a text has {len(tokens)} tokens, and this model reads at most {most}", "shorten it, or ask to `truncate`"
        )
    check_tokens(tokens, vocab)


class Pair(NamedTuple):
    """A pair of texts: its token ids, and where the second text begins, as the tokenizer's types of tokens say."""

    tokens: list[int]
    second: int


class Prompted:
    """Encodes texts with a prompt.

    Args:
        codec: of the model.
        part: how it embeds; None = without prompts.
        name: of a prompt; None = the default one, "" = none.
        context: of the model.
        truncate: texts that are too long lose their end.

    Attributes:
        skip: tokens of the prompt that pooling does not count.

    Raises:
        InvalidRequest: the model has no such prompt.
    """

    def __init__(
        self, codec: TextCodec, part: EmbeddingPart | None, name: str | None, context: int, truncate: bool = False
    ) -> None:
        self._codec, self._longest, self._truncate = codec, most_tokens(part, context), truncate
        self._prompt = find_prompt(part, name)
        self.skip = 0
        if self._prompt and part is not None and not part.include_prompt:
            self.skip = len(codec.encode(self._prompt)) - codec.ends

    def tokens(self, text: str) -> list[int]:
        """Encode a text with the prompt; raises InvalidRequest for an empty one."""
        if not text.strip():
            raise InvalidRequest("a text to embed is empty", "give at least one word")
        text = f"{self._prompt}{text}"
        return self._codec.encode_short(text, self._longest) if self._truncate else self._codec.encode(text)


def find_prompt(part: EmbeddingPart | None, name: str | None) -> str:
    """Return what is put before texts; see ``Prompted``."""
    prompts = part.prompts if part else {}
    name = (part.default_prompt if part else None) if name is None else name
    if not name:
        return ""
    if not prompts:
        raise InvalidRequest(f"prompt {name!r}: this model has no prompts", "leave it out")
    if name not in prompts:
        raise unknown_name("prompt", name, prompts)
    return prompts[name]


def prompt_for(part: EmbeddingPart | None, names: Sequence[str]) -> str | None:
    """Return the first of these prompts that a model has; None = its default one."""
    return next((name for name in names if part and name in part.prompts), None)


def other_name(part: EmbeddingPart | None, name: str | None) -> str | None:
    """Return the model's prompt for the ``input_type`` or ``task`` of another API; None = its default one."""
    for names in (QUERY, DOCUMENT):
        if name is not None and name in names:
            return prompt_for(part, (name, *names))
    return name if part and name in part.prompts else None


def encode_pairs(
    codec: TextCodec, query: str, documents: Sequence[str], longest: int, most: int | None = None
) -> list[Pair]:
    """Encode a query with each document; a document that is too long loses its end.

    Args:
        codec: of the model.
        query: the first text of each pair.
        documents: the second ones.
        longest: tokens that a pair may have.
        most: tokens that a document may have; None = any number.

    Raises:
        InvalidRequest: a query that leaves no room for a document.
    """
    return [Pair(*codec.encode_pair(query, document, longest, most)) for document in documents]
