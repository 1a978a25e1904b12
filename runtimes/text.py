"""Text to tokens and back: encoding, streaming of valid UTF-8, stop strings, chat templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import BundleError, InvalidRequest

Message = dict[str, Any]  # {"role": ..., "content": ...}


class TextCodec:
    """The tokenizer of a model folder or bundle.

    Raises:
        BundleError: no tokenizer.json, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            if (folder / "tokenizer.model").is_file():
                raise BundleError(
                    f"{folder}: has only a sentencepiece tokenizer (tokenizer.model); expected tokenizer.json",
                    "convert it once: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                )
            raise BundleError(f"{folder}: has no tokenizer.json", "download the model's tokenizer files too")
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a plain Exception
            raise BundleError(f"{file}: not a readable tokenizer: {error}", "download it again") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.config = _read_json(folder / "tokenizer_config.json")
        self.chat_template = self._find_template(folder)

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
        """Token ids of a text; with ``special`` whatever the tokenizer puts around it (BOS)."""
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:  # lone surrogates: not text
            raise InvalidRequest(f"the prompt cannot be encoded: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def continuation(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Text that ``tokens`` would add after ``before``; incomplete characters as U+FFFD.  For display."""
        known = list(before[-8:])
        return self.decode([*known, *tokens])[len(self.decode(known)) :]

    def token_id(self, name: str | None) -> int | None:
        """Id of a token by its name; None if there is none of that name."""
        return None if name is None else self.tokenizer.token_to_id(name)

    def special(self, key: str) -> str | None:
        """The name of a special token of tokenizer_config.json, such as ``bos_token``."""
        value = self.config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Tokens of a conversation rendered by the model's own template, ready for the answer.

        Raises:
            InvalidRequest: no template, or one that refuses these messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template", "use plain prompts, or export a chat-tuned model with its template"
            )
        return self.encode(self._render(messages, tools), special=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        from datetime import datetime

        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        names = {key: self.special(key) or "" for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            template = environment.from_string(str(self.chat_template))
            return template.render(messages=list(messages), tools=tools, add_generation_prompt=True, **names)
        except Exception as error:  # a template is a program: it may fail in any way
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error

    def _find_template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named templates: the default one
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        return template if isinstance(template, str) and template else None


class StreamDecoder:
    """Text of a growing token list, given out as soon as it is complete UTF-8 and cannot begin a stop string.

    The window is the last tokens that gave text and those after them.  It starts between two characters: a decoder with
    byte fallback makes U+FFFD of every byte next to half a character.

    Args:
        codec: the tokenizer.
        prompt: the last tokens of the prompt: some tokenizers write a word's leading space by what stands before it.
        stop: strings that end the text; they are not part of it.

    Attributes:
        text: everything given out so far.
        stopped: the stop string that ended the text; None = none did.
    """

    _CONTEXT = 8  # tokens of the prompt that are enough context, if no character is cut
    _LONGEST = 16  # tokens that may wait for the rest of a character

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.codec = codec
        self.stop = [string for string in stop if string]
        self.text = ""
        self.stopped: str | None = None
        self._window = self._tail(list(prompt))
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._held = ""  # complete text that may begin a stop string

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens -> new text, possibly empty.  Once stopped, nothing more comes."""
        return "".join([self._push(token) for token in tokens])

    def _push(self, token: int) -> str:
        if self.stopped is not None:
            return ""
        before = self.codec.decode(self._window[: self._settled])
        self._window.append(token)
        after = self.codec.decode(self._window)
        if after.endswith("\ufffd") and len(self._window) - self._settled < self._LONGEST:
            return ""  # the middle of a character: wait for the rest, but not for ever
        fresh = after[len(before) :]
        if fresh:  # tokens without text stay: some decoders strip the space of the first word they see
            del self._window[: self._settled]
        self._settled = len(self._window)
        return self._give(self._held + fresh)

    def finish(self) -> str:
        """The text held back, at the end."""
        if self.stopped is not None:
            return ""
        rest = self.codec.decode(self._window)[len(self.codec.decode(self._window[: self._settled])) :]
        self._settled = len(self._window)
        given = self._give(self._held + rest)
        last, self._held = self._held, ""  # empty if a stop string was found
        self.text += last
        return given + last

    def _tail(self, prompt: list[int]) -> list[int]:
        """The end of the prompt, long enough to be written as in the whole."""
        whole, count = self.codec.decode(prompt), self._CONTEXT
        while count < len(prompt):
            part = self.codec.decode(prompt[-count:])
            if part and whole.endswith(part):
                break
            count *= 2
        return prompt[-count:]

    def _give(self, candidate: str) -> str:
        self._held = ""
        found = [(at, string) for string in self.stop if (at := candidate.find(string)) >= 0]
        if found:
            at, self.stopped = min(found)
            candidate = candidate[:at]
        else:
            keep = max((_overlap(candidate, string) for string in self.stop), default=0)
            if keep:
                candidate, self._held = candidate[:-keep], candidate[-keep:]
        self.text += candidate
        return candidate


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string``."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if string.startswith(text[-n:])), 0)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {}
