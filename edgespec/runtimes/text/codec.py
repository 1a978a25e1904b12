"""Convert text to tokens and back, and conversations to tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

from edgespec.decoding.text import INSERTED
from edgespec.errors import BundleError, EdgespecError, InvalidRequest, first_line
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.text.byte_tokens import REPLACEMENT, ByteTokens, bytes_of
from edgespec.runtimes.text.chat import Message, choose_template, find_templates, render
from edgespec.runtimes.text.chat_forms import ChatForm
from edgespec.runtimes.text.control_tokens import ChatText, ControlTokens
from edgespec.runtimes.text.sandbox_process import try_tokenizer
from edgespec.runtimes.text.special import NAMED, SPECIAL_TOKENS_FILE, read_object, special_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """The tokenizer of a model folder or bundle.

    Args:
        folder: where its files are.
        tokenizer: one converted from other files; None = read tokenizer.json.
        checked: digests of the bundle, which include tokenizer.json.
        file: name of the tokenizer's file, if it is another one.

    Attributes:
        tokenizer: the library's tokenizer.
        converted: it was converted from other files, so the folder has no tokenizer.json.
        templates: chat templates by name.

    Raises:
        BundleError: no tokenizer.json, or one that cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None = None,
        checked: Checked | None = None,
        file: str = TOKENIZER_FILE,
    ) -> None:
        self.converted = tokenizer is not None
        with _library(BundleError, f"{folder / file}: not a readable tokenizer", "download it again"):
            self.tokenizer: Tokenizer = tokenizer or _open(folder, file, checked or Checked())
            if tokenizer is not None:
                _whole_texts(tokenizer)
            self._bytes = ByteTokens.of(self.tokenizer)
        self.config = read_object(folder / "tokenizer_config.json")
        self._special = read_object(folder / SPECIAL_TOKENS_FILE)
        self.templates = find_templates(folder, self.config)

    @property
    def chat_template(self) -> str | None:
        """The template of conversations; None = the model has none."""
        return self.templates.get("default")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def vocabulary_sha256(self) -> str:
        """SHA-256 of all tokens with their ids, as hex digits: equal where token ids mean the same."""
        tokens = sorted(self.tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: (item[1], item[0]))
        listed = "".join(f"{number} {len(token)} {token}" for token, number in tokens)
        return hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text; ``special`` adds BOS and other tokens around it."""
        _check(text)
        with _library(InvalidRequest, "the prompt cannot be encoded"):
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    @cached_property
    def ends(self) -> int:
        """How many special tokens the tokenizer puts after a text."""
        with _library(BundleError, "the tokenizer cannot be used", "download it again"):
            mask = list(self.tokenizer.encode("a").special_tokens_mask)
        return next((at for at, special in enumerate(reversed(mask)) if not special), 0)

    def encode_short(self, text: str, longest: int) -> list[int]:
        """Return the token ids of a text without its end, at most ``longest`` with what the tokenizer puts around."""
        _check(text)
        with _library(InvalidRequest, "the text cannot be encoded"):
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
            encoding.truncate(max(0, longest - self.tokenizer.num_special_tokens_to_add(False)))
            return list(self.tokenizer.post_process(encoding).ids)

    def encode_pair(self, first: str, second: str, longest: int, most: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and where the second one begins by the tokenizer's types.

        Args:
            first, second: the texts.
            longest: tokens of the pair; the second text loses its end.
            most: tokens of the second text; None = any number.

        Raises:
            InvalidRequest: the first text leaves no room for the second.
        """
        _check(first + second)
        with _library(InvalidRequest, "the texts cannot be encoded"):
            one, other = (self.tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
            room = longest - len(one.ids) - self.tokenizer.num_special_tokens_to_add(True)
            if room < 1:
                raise InvalidRequest(
                    f"a query of {len(one.ids)} tokens leaves no room for a document in {longest}",
                    "ask a shorter question",
                )
            other.truncate(room if most is None else min(room, most))
            pair = self.tokenizer.post_process(one, other)
        return list(pair.ids), next((at for at, kind in enumerate(pair.type_ids) if kind), len(pair.ids))

    def decode(self, tokens: Sequence[int], shown: Set[int] = frozenset()) -> str:
        """Return the text of token ids; bytes that do not form a character become U+FFFD.

        Args:
            tokens: ids; those of rows of images are left out.
            shown: those of special tokens that are text here; others are left out.
        """
        if max(tokens, default=0) >= INSERTED:
            tokens = [token for token in tokens if token < INSERTED]
        if shown and not shown.isdisjoint(tokens):
            return "".join(self._pieces(tokens, shown))
        try:  # twice for each token that is written: no context manager
            text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
            return self._bytes.decode(tokens) if self._bytes is not None and "\ufffd" in text else text
        except BaseException as error:
            _refuse(error, BundleError, "the tokenizer cannot decode what the model wrote", "download it again")

    def _pieces(self, tokens: Sequence[int], shown: Set[int]) -> Iterator[str]:
        """Write special tokens by their names, and the others as text."""
        begin = 0
        for at, token in enumerate(tokens):
            if token in shown:
                yield from (self.decode(tokens[begin:at]), str(self.tokenizer.id_to_token(token)))
                begin = at + 1
        yield self.decode(tokens[begin:])

    def special_ids(self, names: Sequence[str]) -> dict[str, int]:
        """Find the ids of those of ``names`` that are special tokens, which ``decode`` leaves out."""
        known = self.tokenizer.get_added_tokens_decoder() if names else {}
        return {token.content: number for number, token in known.items() if token.special and token.content in names}

    def continuation(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that ``tokens`` would add after ``before``, for display; incomplete characters are U+FFFD."""
        known = list(before[-8:])
        return self.decode([*known, *tokens])[len(self.decode(known)) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; none for a special token."""
        name = self.tokenizer.id_to_token(token)
        if name is None or REPLACEMENT not in (text := self.decode([token])):
            return b"" if name is None else text.encode()
        return bytes_of(name) or text.encode()

    def token_name(self, token: int) -> str:
        """Return the name of a token in the vocabulary."""
        return self.tokenizer.id_to_token(token) or f"token_id:{token}"

    def token_id(self, name: str | None) -> int | None:
        """Return the id of a token by its name; None if it does not exist."""
        return None if name is None else self.tokenizer.token_to_id(name)

    def special(self, key: str) -> str | None:
        """Return the text of the special token that the configuration names by ``key``, such as ``bos_token``."""
        return special_name(self.config, self._special, key)

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **how: Any) -> list[int]:
        """Return the tokens of ``write_chat``, ready for the answer; special tokens in messages are text."""
        return self.encode_chat(self.render_chat(messages, tools, **how))

    def write_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **how: Any) -> str:
        """Render a conversation with the model's own template; see ``chat.render`` for the arguments."""
        return render(choose_template(self.templates, tools), messages, tools, names=self._names, **how)

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, also: Sequence[str] = (), **how: Any
    ) -> ChatText:
        """Render a conversation as ``write_chat`` does, for ``encode_chat``.

        Args:
            messages, tools, **how: see ``write_chat``.
            also: texts that only the template may write, such as the placeholder of an image.
        """
        with _library(InvalidRequest, "the prompt cannot be encoded"):
            messages, tools, mark = self.control.hide(messages, tools, also)
        return ChatText.of(self.write_chat(messages, tools, **how), mark)

    def encode_chat(self, written: ChatText) -> list[int]:
        """Return the token ids of a rendered template; special tokens from messages are text."""
        _check(written.marked)
        with _library(InvalidRequest, "the prompt cannot be encoded"):
            return self.control.encode(written)

    def adapted(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Message]:
        """Write a history in the forms that the model's template expects; render it with ``nulls``."""
        return ChatForm.of(choose_template(self.templates, tools), self._names).write(messages)

    @cached_property
    def control(self) -> ControlTokens:
        """The special tokens that only the template may write."""
        return ControlTokens(self.tokenizer, self.templates.values())

    @property
    def _names(self) -> dict[str, str]:
        return {key: name for key in NAMED if (name := self.special(key)) is not None}


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python represents invalid bytes this way
        raise InvalidRequest(
            f"the prompt cannot be encoded: character {error.start}, {text[error.start]!r}, is no text",
            "expected UTF-8",
        ) from error


_used: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()  # those in use, by the digest of their files


def _open(folder: Path, name: str, checked: Checked) -> Tokenizer:
    """Open the tokenizer in the file ``name`` of ``folder``, after a trial in a separate process.

    One that is in use is shared, and nothing changes it: an export and its golden vectors open the same file, which
    takes up to two seconds and 100 MB.
    """
    import tokenizers

    file = folder / name
    if not file.is_file():
        raise BundleError(f"{folder}: has no {name}", "download the model's tokenizer files too")
    digest = checked.digest(file)
    known = cache_folder() / "tokenizers" / f"{digest}-{tokenizers.__version__}"
    try:
        read_sealed(known, known.name)
    except (OSError, ValueError):  # not tried yet, or the record is not ours
        try_tokenizer(str(file.resolve()))
        with suppress(OSError):  # no cache: it is tried again next time
            write_sealed(known, known.name, {})
    if (found := _used.get(digest)) is None:
        found = tokenizers.Tokenizer.from_file(str(file))
        _whole_texts(found)
        _used[digest] = found
    return found


def _whole_texts(tokenizer: Tokenizer) -> None:
    tokenizer.no_padding()
    tokenizer.no_truncation()


@contextmanager
def _library(kind: type[EdgespecError], what: str, hint: str | None = None) -> Iterator[None]:
    """Raise exceptions of the tokenizers library as ``kind``: plain ones, and panics, which do not derive from them."""
    try:
        yield
    except EdgespecError:
        raise
    except BaseException as error:
        _refuse(error, kind, what, hint)


def _refuse(error: BaseException, kind: type[EdgespecError], what: str, hint: str | None) -> NoReturn:
    """Raise as ``kind`` what the tokenizers library raises: plain Exceptions, and panics, which are none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    raise kind(f"{what}: {first_line(error)}", hint) from error
