"""Keep special tokens in messages as text.

A chat template writes messages between the special tokens of its model.  A message that contains the text of such a
token must not become one: it could end its own turn and begin one of the system.  So before a template sees a
conversation, ``ControlTokens.hide`` puts a mark into each of them.  ``ControlTokens.encode`` removes the marks again
and encodes the marked tokens as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.call_formats import FORMATS, HARMONY, THOUGHTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OWN = frozenset(
    [tag for tags in THOUGHTS.values() for tag in (*tags, tags[0].removesuffix("thought"))]
    + [marker for name, form in FORMATS.items() if name != HARMONY for marker in form.markers]
)
"""What the model itself writes around thoughts and calls: it stays as it is in messages of the assistant."""
_BARS = re.compile(r"<[|\uff5c].*|.*[|\uff5c]>", re.DOTALL)
_MARKS = range(0xE000, 0xF900)  # characters for private use


@dataclass(frozen=True)
class ChatText:
    """The text of a rendered template.

    Attributes:
        marked: the text, with a mark inside each special token that came from a message.
        mark: a character; empty if no message contained such a token.
    """

    marked: str
    mark: str = ""

    @classmethod
    def of(cls, text: str, mark: str) -> ChatText:
        """Make one from a template's output, in which the mark may be escaped, as in JSON and Python."""
        return cls(text.replace(f"\\u{ord(mark):04x}", mark), mark) if mark else cls(text)

    @property
    def text(self) -> str:
        """The text without marks."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def changed(self, change: Callable[[str], str]) -> ChatText:
        """Change the marked text."""
        return replace(self, marked=change(self.marked))


class ControlTokens:
    """The control tokens of a tokenizer.

    These are its special tokens, and those of its other added tokens that a chat template writes or that look like
    ``<|name|>``.  Other added tokens, such as runs of line ends, are text.

    Args:
        tokenizer: the library's tokenizer.
        templates: the model's chat templates.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[str]) -> None:
        self._tokenizer, written = tokenizer, "\n".join(templates)
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        known = tokenizer.get_added_tokens_decoder().values()
        self.words = frozenset(
            token.content
            for token in known
            if len(token.content.strip()) > 1
            and not token.content.isalnum()
            and (token.special or _BARS.fullmatch(token.content) or token.content in written)
        )
        normalized = [token.content for token in known if token.normalized and token.content in self.words]
        self._normalizer = tokenizer.normalizer if normalized else None

    @cached_property
    def _everyone(self) -> re.Pattern[str]:
        return _pattern(self.words)

    @cached_property
    def _assistant(self) -> re.Pattern[str]:
        return _pattern(self.words - OWN)

    def hide(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, also: Sequence[str] = ()
    ) -> tuple[Sequence[Any], Sequence[Any] | None, str]:
        """Put a mark into each control token in a conversation.

        Args:
            messages: plain data.
            tools: plain data.
            also: texts that are also control tokens, such as the place of an image.

        Returns:
            both, and the mark; empty if there is no such token.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            return messages, tools, ""  # not a conversation: its reader reports that
        everyone, assistant = self._everyone, self._assistant
        if not self.words.issuperset(also):
            everyone, assistant = _pattern(self.words.union(also)), _pattern((self.words - OWN).union(also))
        found = [
            self._has(assistant if message.get("role") == "assistant" else everyone, _texts(message))
            for message in messages
        ]
        if not any(found) and not self._has(everyone, _texts(tools)):
            return [dict(message) for message in messages], tools, ""
        said = "\n".join([*_texts(list(messages)), *_texts(tools)])
        free = (chr(code) for code in _MARKS if chr(code) not in said and f"\\u{code:04x}" not in said)
        if not (mark := next(free, "")):
            raise InvalidRequest("a conversation that has all characters for private use: expected some of them free")

        def marked(pattern: re.Pattern[str]) -> Callable[[str], str]:
            return lambda text: self._marked(pattern, text, mark)

        hidden = [
            {key: _mapped(value, marked(assistant if message.get("role") == "assistant" else everyone))
             for key, value in message.items()}
            for message in messages
        ]  # fmt: skip
        return hidden, _mapped(tools, marked(everyone)), mark

    def _has(self, pattern: re.Pattern[str], texts: Iterable[str]) -> bool:
        return any(pattern.search(text) or self._appears(pattern, text) for text in texts)

    def _appears(self, pattern: re.Pattern[str], text: str) -> bool:
        """Whether normalization produces a control token, as from ``<|end|>`` in full-width characters."""
        return self._normalizer is not None and bool(pattern.search(self._normalizer.normalize_str(text)))

    def _marked(self, pattern: re.Pattern[str], text: str, mark: str) -> str:
        made = pattern.sub(lambda match: f"{match[0][0]}{mark}{match[0][1:]}", text)
        return mark.join(text) + mark if self._appears(pattern, made) else made

    def encode(self, written: ChatText) -> list[int]:
        """Encode a rendered template: its own control tokens as such, those from messages as text.

        The text between two control tokens of the template is encoded as a whole, as the tokenizer does it.
        """
        text, mark = written.marked, written.mark
        found = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = list(found.ids)
        if not mark or mark not in text:
            return tokens
        ids: list[int] = []
        begin = first = 0  # a character, and a token
        ends = [(at, *place) for at, place in enumerate(found.offsets) if self._is_added(tokens[at], text, place)]
        for at, start, end in [*ends, (len(tokens), len(text), len(text))]:
            between = text[begin:start]
            ids += self._as_text(between.replace(mark, ""), begin == 0) if mark in between else tokens[first:at]
            ids += tokens[at : at + 1]
            begin, first = end, at + 1
        return ids

    def _is_added(self, token: int, text: str, place: tuple[int, int]) -> bool:
        content = self._added.get(token)
        return content is not None and text[slice(*place)].strip() == content.strip()

    def _as_text(self, text: str, first: bool) -> list[int]:
        """Encode a text between two added tokens; ``first``: the sequence starts with it."""
        from tokenizers import PreTokenizedString

        tokenizer, before = self._tokenizer, "" if first else "x"
        pieces = PreTokenizedString(before + text)
        if before:  # tokenizers may treat what comes first in another way
            pieces.split(lambda _, piece: [piece[:1], piece[1:]])
        if tokenizer.normalizer is not None:
            pieces.normalize(tokenizer.normalizer.normalize)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize(pieces)
        model, known, ids = tokenizer.model, dict[str, list[int]](), list[int]()
        for piece, (_, end), _ in pieces.get_splits():
            if piece and end > len(before):
                if piece not in known:
                    known[piece] = [token.id for token in model.tokenize(piece)]
                ids += known[piece]
        return ids


def _texts(value: Any) -> Iterator[str]:
    """Iterate over all texts in plain data, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Make a pattern that finds any of ``words``, and the beginning of one at the end of a text.

    The words form a tree by their characters, so thousands of them are tried at once.  The next text may complete a
    word that begins at the end of this one.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branch(tree, 0)) if tree else re.compile(r"(?!)")


def _branch(node: dict[str, Any], depth: int) -> str:
    made = [re.escape(char) + _branch(after, depth + 1) for char, after in node.items() if char]
    if not made:
        return ""
    ends = ["" if "" in node else r"\Z"] if depth else []
    return f"(?:{'|'.join(made + ends)})" if len(made) + len(ends) > 1 else made[0]
