"""Encode source texts of an encoder-decoder, with the tokens around them in each language."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.seq2seq_format import SOURCE_TOKENIZER, Place, TextForm
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.languages import choose_language, names_of


class SourceTexts:
    """Encodes the encoder's input and the beginning of the decoder's text.

    Args:
        folder: of the bundle.
        form: the tokens around texts.
        codec: of the decoder's texts; sources use the same tokenizer, unless the bundle has a separate one for them.
        checked: see ``TextCodec``.
    """

    def __init__(self, folder: Path, form: TextForm, codec: TextCodec, checked: Checked | None = None) -> None:
        self.form, own = form, (folder / SOURCE_TOKENIZER).is_file()
        self.codec = TextCodec(folder, checked=checked, file=SOURCE_TOKENIZER) if own else codec

    def encode(self, text: str, origin: str | None = None, target: str | None = None) -> list[int]:
        """Return the token ids of a source.

        Args:
            text: the text to translate, summarize and so on.
            origin: its language; None = the model's default.
            target: the language of the answer; None = the model's default.

        Raises:
            InvalidRequest: the model lacks the language, or requires one and got none.
        """
        words = self.codec.encode(self._prefix(origin, target) + text, special=False)
        return self._filled(self.form.source, words, origin, target)

    def begin(self, origin: str | None = None, target: str | None = None) -> list[int]:
        """Return the tokens that the decoder's text begins with; see ``encode`` for arguments and errors."""
        return self._filled(self.form.prefix_tokens, [], origin, target)

    def _filled(
        self, places: Sequence[int | Place], words: list[int], origin: str | None, target: str | None
    ) -> list[int]:
        found: list[int] = []
        for place in places:
            if place == "text":
                found += words
            elif isinstance(place, int):
                found.append(place)
            else:
                found.append(self._language(place, origin if place == "from" else target))
        return found

    def _language(self, place: Place, wanted: str | None) -> int:
        form = self.form
        wanted = wanted or (form.default_from if place == "from" else form.default_to)
        if wanted is None:
            some = ", ".join(sorted(form.languages)[:8])
            raise InvalidRequest(
                f"this model must be told the language that it translates {place}",
                f"`--{place} CODE`, in Python {'source' if place == 'from' else 'target'}_language; it has: {some}"
                + (f" and {len(form.languages) - 8} more" if len(form.languages) > 8 else ""),
            )
        return form.languages[choose_language(wanted, form.languages)]

    def _prefix(self, origin: str | None, target: str | None) -> str:
        """Return the words before the source that name the languages; reject languages that cannot be named.

        A model that detects its input language, such as one that translates to English only, needs no ``origin``.
        """
        form = self.form
        if origin is None and target is None:
            return ""
        pairs = {name: name.split("_") for name in form.prefixes if name.startswith("translation_")}
        for name, parts in pairs.items():  # translation_en_to_de
            if len(parts) == 4 and _same(origin, parts[1]) and _same(target, parts[3]):
                return form.prefixes[name]
        if pairs:
            known = ", ".join(f"{parts[1]} to {parts[3]}" for parts in pairs.values() if len(parts) == 4)
            raise InvalidRequest(f"this model does not translate {origin} to {target}; it knows: {known}")
        if not form.needs("to") and target is not None and not (form.default_to and _same(target, form.default_to)):
            instead = f"; it writes {form.default_to}" if form.default_to else ": it has no languages to choose from"
            raise InvalidRequest(f"this model cannot be told to write {target}{instead}")
        fixed = form.default_from if not form.languages else None
        if origin is not None and fixed and not _same(origin, fixed):
            raise InvalidRequest(f"this model reads {fixed}, not {origin}")
        return ""


def _same(one: str | None, other: str) -> bool:
    """Whether both may be the same language; None may be any."""
    return one is None or not names_of(one).isdisjoint(names_of(other))
