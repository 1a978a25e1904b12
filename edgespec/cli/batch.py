"""``edgespec run --input FILE --output FILE``: a file of prompts, a file of answers."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from edgespec.cli.common import emit_json, progress
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.json_file import parse_json

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result

Item = TypeVar("Item")
HINT = 'give one object per line, as in {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
AT_ONCE = 64  # prompts of one batch call: their longest one decides how many fit the memory together


@dataclass(frozen=True)
class Line:
    """A prompt of the input."""

    number: int  # of the line, from 0; blank lines are not counted
    id: Any  # id in the line; None = none
    tokens: list[int]  # of the prompt; empty where ``error`` says why
    seed: int | None  # of sampling; None = that of the settings
    key: str  # a digest of the line and of what decides the answer
    error: EdgespecError | None = None  # why it cannot be answered


def read_input(source: Path) -> list[tuple[int, str]]:
    """Read the lines of a JSONL file that are not blank, each with its number, from 1.

    Raises:
        InvalidRequest: it cannot be read, or is empty.
    """
    try:
        content = sys.stdin.buffer.read() if str(source) == "-" else source.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"{source}: cannot be read: {error.strerror}", HINT) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source}: cannot be read: {error}", "convert it to UTF-8") from error
    # not splitlines: JSON strings may hold U+2028 and other ends of lines as they are
    found = [(at, line.strip()) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise InvalidRequest(f"{source}: has no prompts", HINT)
    return found


def answer_file(
    engine: Engine, asked: list[tuple[int, str]], source: Path, output: Path, settings: Settings, as_json: bool
) -> None:
    """Answer every prompt of a JSONL file into another one, in order; what was answered before is kept.

    Args:
        engine: of the bundle.
        asked: of ``read_input``, an object each: ``prompt`` or ``messages``, and where wanted ``id`` and ``seed``.
        source: where they were read.
        output: one object per line: ``index``, ``id``, ``key``, ``text``, ``finish``, ``tokens``, ``prompt_tokens``,
            ``method_used``, ``exact``; or ``error``; the others continue.
        settings: of all answers.
        as_json: print the sum as JSON.

    Raises:
        InvalidRequest: an output of other prompts or other settings, or one that cannot be written.
    """
    if str(output) == "-":
        raise InvalidRequest("--output -: expected a file, because a restart skips its finished answers", "name a file")
    same = f"{engine.bundle.manifest.model_dump_json()}{settings.changed(batch=1)}"  # a batch changes no text
    decides = hashlib.sha256(same.encode()).digest()
    lines = [_line(engine, number, at, line, decides) for number, (at, line) in enumerate(asked)]
    try:
        done, failed = _resume(output, [line.key for line in lines])
        count = {"prompts": len(lines), "answered_before": done, "answered": 0, "failed": failed, "tokens": 0}
        with output.open("a", encoding="utf-8") as file, progress() as report:

            def write(made: list[dict[str, Any]]) -> None:
                (found,) = made
                file.write(json.dumps(found) + "\n")
                file.flush()
                count["failed" if "error" in found else "answered"] += 1
                count["tokens"] += found.get("tokens", 0)
                report("answers", found["index"] + 1, len(lines), f"{count['tokens']} tokens")

            order: InOrder[dict[str, Any]] = InOrder([1] * (len(lines) - done), write)
            for line in lines[done:]:
                if line.error is not None:
                    order.take(line.number - done, _failed(line, line.error))
            good = [line for line in lines[done:] if line.error is None]
            for at in range(0, len(good), AT_ONCE):
                part = good[at : at + AT_ONCE]

                def take(number: int, result: Result, part: list[Line] = part) -> None:
                    order.take(part[number].number - done, _answered(part[number], result))

                engine.generate_batch(
                    [line.tokens for line in part],
                    settings,
                    seeds=[settings.sampling.seed if line.seed is None else line.seed for line in part],
                    on_result=take,
                )
    except OSError as error:
        raise InvalidRequest(f"{output}: cannot be written: {error.strerror}", "name another file") from error
    if as_json:
        emit_json({"input": str(source), "output": str(output)} | count)
    else:
        click.echo(
            f"{output}: {count['answered']} answers, {count['answered_before']} were there before, "
            f"{count['failed']} of {count['prompts']} prompts failed; {count['tokens']} tokens",
            err=True,
        )
    if count["failed"]:
        told = InvalidRequest(f"{count['failed']} of {count['prompts']} prompts failed", f"see `error` in {output}")
        click.echo(f"error: {told}", err=True)
        sys.exit(1)  # the object that a program reads has been printed


class InOrder(Generic[Item]):
    """Hands over groups of items in their order, each as soon as it and those before it are whole.

    Args:
        sizes: of the groups.
        hand: takes a group.
    """

    def __init__(self, sizes: Sequence[int], hand: Callable[[list[Item]], None]) -> None:
        self._hand, self.taken = hand, 0
        self._groups = deque(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
        self._waiting: dict[int, Item] = {}
        self._flush()

    def take(self, number: int, item: Item) -> None:
        """Take an item by its number among all."""
        self._waiting[number] = item
        self.taken += 1
        self._flush()

    def _flush(self) -> None:
        while self._groups and all(number in self._waiting for number in self._groups[0]):
            self._hand([self._waiting.pop(number) for number in self._groups.popleft()])


def _answered(line: Line, result: Result) -> dict[str, Any]:
    return {
        "index": line.number,
        "id": line.id,
        "key": line.key,
        "text": result.text,
        "finish": result.finish,
        "tokens": len(result.tokens),
        "prompt_tokens": len(line.tokens),
        "method_used": result.method_used,
        "exact": result.exact,
    }


def _failed(line: Line, error: EdgespecError) -> dict[str, Any]:
    what = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"index": line.number, "id": line.id, "key": line.key, "error": what}


def _line(engine: Engine, number: int, at: int, text: str, decides: bytes) -> Line:
    """Encode a prompt; ``at`` is its line in the file, from 1."""
    key = hashlib.sha256(decides + text.encode()).hexdigest()[:16]
    name = None
    try:
        item = parse_json(text)
        if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
            raise InvalidRequest(f"line {at}: expected `prompt` or `messages`", HINT)
        name, seed = item.get("id"), item.get("seed")
        if not (seed is None or isinstance(seed, int)) or isinstance(seed, bool):
            raise InvalidRequest(f"line {at}: seed is {seed!r}: expected a whole number")
        if "messages" in item:
            tokens = engine.codec.chat(engine.codec.adapted(item["messages"]), nulls=True)
        elif isinstance(item["prompt"], str) and item["prompt"].strip():
            tokens = engine.codec.encode(item["prompt"])
        else:
            raise InvalidRequest(f"line {at}: the prompt is {item['prompt']!r}: expected text")
        if len(tokens) >= engine.context:
            raise InvalidRequest(f"line {at}: {len(tokens)} tokens, the context has {engine.context}")
        return Line(number, name, tokens, seed, key)
    except ValueError as error:
        return Line(number, name, [], None, key, InvalidRequest(f"line {at}: no JSON: {error}", HINT))
    except EdgespecError as error:
        return Line(number, name, [], None, key, error)


def _resume(output: Path, keys: list[str]) -> tuple[int, int]:
    """Count the existing answers and the failed ones; an incomplete last line is removed.

    Raises:
        InvalidRequest: they are answers to something else.
    """
    if not output.exists():
        return 0, 0
    with output.open("rb+") as file:
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        try:
            found = [json.loads(line) for line in lines]
            same = [line["key"] for line in found] == keys[: len(found)]
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise InvalidRequest(
                f"{output}: holds answers to other prompts, or of another bundle or settings", "name another file"
            )
        file.truncate(len(whole))
        os.fsync(file.fileno())
    return len(found), sum("error" in line for line in found)
