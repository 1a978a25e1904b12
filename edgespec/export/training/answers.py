"""Let a server of the same model generate training texts: prompts go to its ``/v1/completions``, and answers to a file.

Any server with OpenAI's interface will do (vLLM, SGLang, llama.cpp, ``edgespec serve``), so machines with GPUs can
write the texts that a drafter is trained on.  Prompts are sent as token ids, so the server's tokenizer changes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from edgespec.errors import TrainingError
from edgespec.runtimes.files.json_file import parse_json
from edgespec.runtimes.text.codec import TextCodec

AT_ONCE = 16  # requests
TRIES = 5  # of a request, where the server is busy or away
PAUSE = 1.0  # seconds before the second try; doubled for each further one
SECONDS = 600.0  # that an answer may take
FORM = ".jsonl files with `prompt`, `messages` or `turns` in each line"
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Server:
    """Where answers come from.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: the name that it has there; None = the first one that the server lists.
    """

    url: str
    model: str | None = None

    def client(self) -> httpx.Client:
        """Open a connection, with the key in the environment."""
        base = self.url.rstrip("/").removesuffix("/v1") + "/v1/"
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        return httpx.Client(base_url=base, headers=headers, timeout=SECONDS)


def read_prompts(files: Sequence[Path], codec: TextCodec) -> list[list[int]]:
    """Read prompts from .jsonl files -> token ids of each.

    A line has ``prompt``, which is sent as it is, or ``messages`` or Spec-Bench's ``turns`` (the first one), which
    become a chat by the model's template, ready for an answer.

    Raises:
        TrainingError: a file cannot be read, or has no prompts.
    """
    found = []
    for file in files:
        try:
            for line in filter(str.strip, file.read_text("utf-8-sig").splitlines()):
                found.append(_prompt(parse_json(line), codec))
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise TrainingError(f"{file}: cannot read prompts: {error}", f"give {FORM}") from error
    if not found:
        raise TrainingError("--answers-from: there are no prompts", f"give them by --data: {FORM}")
    return found


def _prompt(item: dict[str, Any], codec: TextCodec) -> list[int]:
    if "prompt" in item:
        return codec.encode(str(item["prompt"]))
    messages = item["messages"] if "messages" in item else [{"role": "user", "content": str(item["turns"][0])}]
    return codec.chat(messages)


class Answers:
    """Answers of a server to prompts, kept in a file, from which an interrupted run continues.

    Args:
        server: of the model that is trained for.
        prompts: token ids of each.
        file: a JSON object per answer: ``number`` of the prompt, and ``text``.
        tokens: of an answer, at most.
        greedy: the share of the prompts that is answered greedily; others are sampled at temperature 1.
        seed: of the sampling.
    """

    def __init__(
        self, server: Server, prompts: Sequence[Sequence[int]], file: Path, tokens: int, greedy: float, seed: int
    ) -> None:
        self.server, self.prompts, self.file, self.tokens = server, prompts, file, tokens
        self.greedy, self.seed = greedy, seed

    def collect(self, report: Callable[[int, int], None]) -> list[tuple[str, bool]]:
        """Ask for what is missing -> the text after each prompt, and whether the model ended it.

        Args:
            report: called with the number of known answers, and of all.

        Raises:
            TrainingError: the server cannot be reached, or refuses a prompt.  Answers that came are kept.
        """
        known = self._known()
        left = [number for number in range(len(self.prompts)) if number not in known]
        report(len(known), len(self.prompts))
        if left:
            with self.server.client() as client, ThreadPoolExecutor(AT_ONCE) as pool:
                model = self.server.model or self._listed(client)
                going: dict[Future[tuple[str, bool]], int] = {}
                try:
                    while left or going:
                        while left and len(going) < AT_ONCE:
                            number = left.pop(0)
                            going[pool.submit(self._ask, client, model, number)] = number
                        for done in wait(going, return_when=FIRST_COMPLETED).done:
                            number = going.pop(done)
                            known[number] = done.result()
                            self._keep(number, known[number])
                            report(len(known), len(self.prompts))
                finally:
                    pool.shutdown(cancel_futures=True)
        return [known[number] for number in range(len(self.prompts))]

    def _known(self) -> dict[int, tuple[str, bool]]:
        found = {}
        if self.file.is_file():
            for line in self.file.read_text("utf-8").split("\n")[:-1]:  # what a kill cut off has no end of line
                item = json.loads(line)
                found[int(item["number"])] = (str(item["text"]), bool(item["ended"]))
        return found

    def _keep(self, number: int, answer: tuple[str, bool]) -> None:
        line = json.dumps({"number": number, "text": answer[0], "ended": answer[1]}, ensure_ascii=False)
        try:
            with self.file.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")
        except OSError as error:
            raise TrainingError(f"{self.file}: cannot be written: {error.strerror}", "free some space") from error

    def _listed(self, client: httpx.Client) -> str:
        listed = self._sent(client, "GET", "models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._failed("it lists no models") from error

    def _ask(self, client: httpx.Client, model: str, number: int) -> tuple[str, bool]:
        # evenly spread, so that a few prompts have both
        greedy = int((number + 1) * self.greedy) > int(number * self.greedy)
        body = {
            "model": model,
            "prompt": list(self.prompts[number]),
            "max_tokens": self.tokens,
            "temperature": 0.0 if greedy else 1.0,
            "seed": self.seed + number,
        }
        found = self._sent(client, "POST", "completions", body)
        try:
            choice = found["choices"][0]
            return str(choice["text"]), choice["finish_reason"] == "stop"
        except (KeyError, IndexError, TypeError) as error:
            raise self._failed(f"its answer has no text: {json.dumps(found)[:200]}") from error

    def _sent(self, client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Send a request, and again where the server is busy or away -> its JSON."""
        why = ""
        for turn in range(TRIES):
            if turn:
                time.sleep(PAUSE * 2 ** (turn - 1))
            try:
                reply = client.request(method, path, json=body)
            except httpx.InvalidURL as error:
                raise self._failed(str(error)) from error
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
                continue
            if reply.status_code == 429 or reply.status_code >= 500:
                why = f"status {reply.status_code}: {reply.text[:200]}"
                continue
            if reply.status_code != 200:
                raise self._failed(f"status {reply.status_code}: {reply.text[:200]}")
            try:
                return reply.json()
            except ValueError as error:
                raise self._failed(f"not JSON: {reply.text[:200]}") from error
        raise self._failed(why)

    def _failed(self, why: str) -> TrainingError:
        return TrainingError(
            f"--answers-from {self.server.url}: {why}",
            "start an OpenAI-compatible server of this model with /v1/completions; the same command then continues",
        )
