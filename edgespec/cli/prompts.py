"""Where ``bench`` and ``verify`` take their prompts from, and ``ngram build`` its texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.json_file import parse_json

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.engine.inputs import Prompt
    from edgespec.runtimes.text.chat import Message

HINT = "one prompt a line, or .jsonl with `prompt` or `messages`"


def read_prompts(engine: Engine, file: Path | None, limit: int) -> list[Prompt]:
    """Prompts of a file, or those of the bundle's golden vectors.

    A .jsonl file has objects with ``prompt``, with ``messages``, which the model's template writes, or with
    Spec-Bench's ``turns``; any other file has a prompt per line.  A speech model gets a recording, and a prompt
    is a window of it; a decoder with an audio encoder also takes texts.

    Raises:
        InvalidRequest: the file cannot be read or has no prompts.
    """
    manifest = engine.bundle.manifest
    texts = manifest.speech is None and (file is None or file.suffix in (".txt", ".jsonl"))
    if manifest.hears and not texts:
        from edgespec.engine.hearing import windows

        if file is None:
            raise InvalidRequest("this bundle holds no recordings", "give one with --prompts talk.wav")
        return list(windows(engine, file)[:limit])
    if file is None:
        from edgespec.reports.proof import golden_of

        prompts: list[Prompt] = [prompt for prompt, _ in golden_of(engine)]
        if not prompts:
            raise InvalidRequest("this bundle holds no prompts", "give some with --prompts FILE")
        return prompts[:limit]
    found = _read(file, "prompts", HINT, str.splitlines)[:limit]
    return [one if isinstance(one, str) else engine.chat_prompt(one) for one in found]


def read_prompt_file(file: Path) -> list[str]:
    """Prompts of a file that are texts, as ``read_prompts`` has them.

    Raises:
        InvalidRequest: the file cannot be read, has no prompts, or has conversations.
    """
    return _texts(file, _read(file, "prompts", "one prompt a line, or .jsonl with `prompt`", str.splitlines))


def read_texts(file: Path) -> list[str]:
    """Texts of a file: those that ``read_prompts`` finds in a .jsonl file; any other file is one text.

    Raises:
        InvalidRequest: the file cannot be read or has no text.
    """
    return _texts(file, _read(file, "text", "a text file, or .jsonl with `prompt`", lambda text: [text]))


def _texts(file: Path, found: list[str | list[Message]]) -> list[str]:
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        raise InvalidRequest(f"{file}: has `messages`: expected texts alone here", "give each as `prompt`")
    return texts


def _read(file: Path, what: str, hint: str, split: Callable[[str], list[str]]) -> list[str | list[Message]]:
    """Texts and conversations of a file that are not blank; one that is not .jsonl is parted by ``split``."""
    texts: list[str | list[Message]]
    try:
        content = file.read_text("utf-8-sig")
        if file.suffix == ".jsonl":
            texts = [_of_json(parse_json(line)) for line in content.splitlines() if line.strip()]
        else:
            texts = [text for text in split(content) if text.strip()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{file}: cannot read {what}: {error}", hint) from error
    if not texts:
        raise InvalidRequest(f"{file}: has no {what}", hint)
    return texts


def _of_json(item: dict[str, Any]) -> str | list[Message]:
    if "messages" in item:
        return list(item["messages"])
    turns = item.get("turns")
    return str(turns[0] if isinstance(turns, list) else item["prompt"])
