"""Manifest entries of the texts of an encoder-decoder: languages, surrounding tokens, generation rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from edgespec.runtimes.files.bounds import Count, Token, Tokens
from edgespec.runtimes.files.facts import Part

Place = Literal["text", "from", "to"]
Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Words = Annotated[str, StringConstraints(max_length=1 << 12)]
SOURCE_TOKENIZER = "source_tokenizer.json"  # of a model whose sources have a separate tokenizer


class WritingRules(Part):
    """Rules of generation_config.json for all texts and methods; lengths include the first tokens of the text.

    For an encoder-decoder they are in ``TextForm``, for a decoder in the manifest.

    Fields have its names.  ``suppress_tokens``: tokens that never come, ``begin_suppress_tokens``: nor as the first;
    ``bad_words_ids``: sequences that never come; ``no_repeat_ngram_size``: no n-gram of this length comes twice (0 =
    off); ``min_length``: tokens before the text may end, and ``min_new_tokens``: the same without what it begins with;
    ``max_length``: where it is full, with ``forced_eos_token_id`` as its last.
    The others are defaults of beam search.
    """

    suppress_tokens: Tokens = Field(default_factory=list)
    begin_suppress_tokens: Tokens = Field(default_factory=list)
    bad_words_ids: Annotated[list[Tokens], Field(max_length=1 << 16)] = Field(default_factory=list)
    no_repeat_ngram_size: Count = 0
    min_length: Count = 0
    min_new_tokens: Count = 0
    max_length: Count | None = None
    forced_eos_token_id: Token | None = None
    beams: Annotated[int, Field(ge=1, le=64)] = 1
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    early_stopping: bool | Literal["never"] = False


class TextForm(Part):
    """Texts of an encoder-decoder.

    ``source``: the encoder's input, and ``prefix_tokens``: the first tokens of the output.  Both mark the places of the
    text and of the source and target languages.  ``languages``: token of each, by the model's own code; ``prefixes``:
    words before a source, by task (T5); ``default_from`` and ``default_to``: the languages if a request names none, or
    the only pair.
    """

    source: Annotated[list[Token | Place], Field(max_length=64)]
    prefix_tokens: Annotated[list[Token | Literal["from", "to"]], Field(max_length=64)]
    languages: Annotated[dict[Name, Token], Field(max_length=1 << 12)] = Field(default_factory=dict)
    prefixes: Annotated[dict[Name, Words], Field(max_length=1 << 10)] = Field(default_factory=dict)
    default_from: Name | None = None
    default_to: Name | None = None
    rules: WritingRules = Field(default_factory=WritingRules)

    @model_validator(mode="after")
    def _fits(self) -> TextForm:
        if self.source.count("text") != 1:
            raise ValueError("source: expected one place of the text")
        if not self.languages and {"from", "to"} & {*self.source, *self.prefix_tokens}:
            raise ValueError("source, prefix_tokens: a place of a language without languages")
        return self

    def needs(self, which: Literal["from", "to"]) -> bool:
        """Whether a token selects that language."""
        return which in self.source or which in self.prefix_tokens
