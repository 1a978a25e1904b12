"""Small servers for engines that have none, so that `edgespec judge` can ask them.

    python benchmarks/adapters.py transformers TARGET [--draft DRAFT] [--lookup N] --port 8000
    python benchmarks/adapters.py openvino TARGET [--draft DRAFT] [--lookup N] --port 8000
    python benchmarks/adapters.py genai TARGET --port 8000
    python benchmarks/adapters.py ctranslate2 TARGET --port 8000

It needs the engine and Python's standard library.  Requests that come together are one batch of the engine (--batch).
A server is one of completions alone: prompts are texts, and no field but the common ones has a meaning.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

WAIT = 0.03  # seconds for others of a batch


@dataclass
class Written:
    """A text, its tokens, and the log-probabilities of the likeliest ones in each place; empty = not known."""

    text: str
    prompt_tokens: int
    tokens: int
    pieces: list[str] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Asked:
    """Settings of a batch."""

    most: int
    temperature: float
    likeliest: int


class Engine(Protocol):
    """An engine that writes texts."""

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        """Write a text to every prompt."""
        ...


class Transformers:
    """transformers, with an assistant model or prompt lookup."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
        self.torch.set_num_threads(args.threads)
        kind = getattr(self.torch, args.dtype)
        self.tokenizer = library.AutoTokenizer.from_pretrained(args.target, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = library.AutoModelForCausalLM.from_pretrained(args.target, dtype=kind).eval()
        self.more: dict[str, Any] = {"prompt_lookup_num_tokens": args.lookup} if args.lookup else {}
        if args.draft:
            self.more["assistant_model"] = library.AutoModelForCausalLM.from_pretrained(args.draft, dtype=kind).eval()
        self.alone = bool(self.more)  # its assisted generation takes batches of one

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        if self.alone and len(prompts) > 1:
            return [one for prompt in prompts for one in self.write([prompt], asked)]
        given = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        how: dict[str, Any] = {"do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            how |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        with self.torch.inference_mode():
            made = self.model.generate(
                **given, **how, **self.more, max_new_tokens=asked.most, repetition_penalty=1.0,
                output_logits=bool(asked.likeliest), return_dict_in_generate=True,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        start = given["input_ids"].shape[1]
        found = []
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        for at in range(len(prompts)):
            tokens = made.sequences[at, start:].tolist()
            last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
            kept = tokens[:last]
            tops = []
            if asked.likeliest:
                for row in made.logits[: len(kept)]:
                    values, ids = row[at].float().log_softmax(-1).topk(asked.likeliest)
                    tops.append(_merged(map(self.tokenizer.decode, ids.tolist()), values.tolist()))
            pieces = [self.tokenizer.decode([token]) for token in kept]
            text = self.tokenizer.decode(kept)
            size = int(given["attention_mask"][at].sum())
            found.append(Written(text, size, len(kept), pieces, tops, last < len(tokens)))
        return found


class OpenVINO:
    """openvino-genai with continuous batching, a draft model or prompt lookup; it also reads GGUF files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.library = importlib.import_module("openvino_genai")
        how: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
        how |= json.loads(args.settings)
        scheduler = self.library.SchedulerConfig()
        scheduler.cache_size = 1
        more: dict[str, Any] = {"scheduler_config": scheduler}
        if args.draft:
            more["draft_model"] = self.library.draft_model(args.draft, "CPU", **how)
        if args.lookup:
            more["prompt_lookup"] = True
        self.guesses = args.lookup or (3 if args.draft else 0)
        self.ngram = bool(args.lookup)
        self.pipeline = self.library.LLMPipeline(args.target, "CPU", **more, **how)
        self.tokenizer = self.pipeline.get_tokenizer()

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        config = self.library.GenerationConfig()
        config.max_new_tokens, config.apply_chat_template = asked.most, False
        config.do_sample = asked.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = asked.temperature, 1.0, 2**31 - 1
            config.rng_seed = time.time_ns() % 2**31
        if self.guesses:
            config.num_assistant_tokens = self.guesses
        if self.ngram:
            config.max_ngram_size = 3
        made = self.pipeline.generate(list(prompts), config)
        found = []
        for prompt, text in zip(prompts, made.texts, strict=True):
            sizes = [self.tokenizer.encode(one).input_ids.shape[1] for one in (prompt, prompt + text)]
            found.append(Written(text, sizes[0], sizes[1] - sizes[0]))
        return found


class GenAI:
    """onnxruntime-genai, with log-probabilities by its logits."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.library = importlib.import_module("onnxruntime_genai")
        self.numpy = importlib.import_module("numpy")
        self.model = self.library.Model(args.target)
        self.tokenizer = self.library.Tokenizer(self.model)

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        return [self._one(prompt, asked) for prompt in prompts]

    def _one(self, prompt: str, asked: Asked) -> Written:
        given = self.tokenizer.encode(prompt)
        params = self.library.GeneratorParams(self.model)
        params.set_search_options(
            max_length=len(given) + asked.most, do_sample=asked.temperature > 0,
            temperature=asked.temperature or 1.0, top_k=0, top_p=1.0, random_seed=time.time_ns() % 2**31,
        )  # fmt: skip
        generator = self.library.Generator(self.model, params)
        generator.append_tokens(given)
        found = Written("", len(given), 0)
        tokens: list[int] = []
        while not generator.is_done() and len(tokens) < asked.most:
            top: dict[str, float] = {}
            if asked.likeliest:
                row = self.numpy.array(generator.get_logits()).reshape(-1).astype("float64")
                row -= row.max()
                row -= math.log(float(self.numpy.exp(row).sum()))
                ids = self.numpy.argsort(-row)[: asked.likeliest].tolist()
                top = _merged((self.tokenizer.decode([token]) for token in ids), row[ids].tolist())
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            tokens.append(token)
            found.pieces.append(self.tokenizer.decode([token]))
            found.tops.append(top)
        found.text, found.tokens = self.tokenizer.decode(tokens), len(tokens)
        found.ended = len(tokens) < asked.most
        return found


class CTranslate2:
    """ctranslate2's Generator, in batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        library = importlib.import_module("ctranslate2")
        tokenizers = importlib.import_module("tokenizers")
        self.model = library.Generator(args.target, intra_threads=args.threads, compute_type=args.dtype)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(args.target) / "tokenizer.json"))

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        given = [self.tokenizer.encode(prompt) for prompt in prompts]
        made = self.model.generate_batch(
            [one.tokens for one in given], max_length=asked.most, include_prompt_in_result=False,
            sampling_topk=0 if asked.temperature > 0 else 1, sampling_temperature=asked.temperature or 1.0,
            return_logits_vocab=bool(asked.likeliest),
        )  # fmt: skip
        found = []
        for one, result in zip(given, made, strict=True):
            ids = result.sequences_ids[0]
            text = self.tokenizer.decode(ids)
            found.append(Written(text, len(one.ids), len(ids), ended=len(ids) < asked.most))
        return found


def _merged(texts: Any, values: Sequence[float]) -> dict[str, float]:
    """Add the probabilities of tokens whose texts are equal."""
    found: dict[str, float] = {}
    for text, value in zip(texts, values, strict=True):
        found[text] = math.log(math.exp(found[text]) + math.exp(value)) if text in found else value
    return found


ENGINES: dict[str, Any] = {
    "transformers": Transformers,
    "openvino": OpenVINO,
    "genai": GenAI,
    "ctranslate2": CTranslate2,
}


class Worker:
    """Runs requests, those that come together as one batch."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.waiting: queue.Queue[tuple[str, Asked, queue.Queue[Any]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, prompts: Sequence[str], asked: Asked) -> list[Written]:
        """Write a text to every prompt."""
        places: list[queue.Queue[Any]] = []
        for prompt in prompts:
            places.append(queue.Queue())
            self.waiting.put((prompt, asked, places[-1]))
        found = [place.get() for place in places]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def _run(self) -> None:
        held: list[tuple[str, Asked, queue.Queue[Any]]] = []
        while True:
            batch = [held.pop(0) if held else self.waiting.get()]
            end = time.monotonic() + WAIT
            while len(batch) < self.most:
                same = next((one for one in held if one[1] == batch[0][1]), None)
                if same is not None:
                    held.remove(same)
                    batch.append(same)
                    continue
                try:
                    one = self.waiting.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    break
                (batch if one[1] == batch[0][1] else held).append(one)
            try:
                found: Sequence[Any] = self.engine.write([prompt for prompt, _, _ in batch], batch[0][1])
            except Exception as error:  # the client gets it
                found = [error] * len(batch)
            for (_, _, place), one in zip(batch, found, strict=True):
                place.put(one)


def serve(worker: Worker, name: str, port: int) -> None:
    """Serve completions until the process ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer waits 40 ms for an acknowledgment

        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": name, "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.path.endswith("/v1/completions"):
                return self._say(404, {"error": {"message": "completions alone"}})
            prompts = [body["prompt"]] * int(body.get("n") or 1)
            asked = Asked(int(body["max_tokens"]), float(body["temperature"]), int(body.get("logprobs") or 0))
            try:
                written = worker.write(prompts, asked)
            except Exception as error:
                return self._say(500, {"error": {"message": str(error)}})
            choices = [
                {"index": at, "text": one.text, "finish_reason": "stop" if one.ended else "length",
                 "logprobs": {"tokens": one.pieces, "top_logprobs": one.tops} if any(one.tops) else None}
                for at, one in enumerate(written)
            ]  # fmt: skip
            usage = {"prompt_tokens": written[0].prompt_tokens, "completion_tokens": sum(one.tokens for one in written)}
            return self._say(200, {"object": "text_completion", "choices": choices, "usage": usage})

        def _say(self, status: int, found: Any) -> None:
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    """Load an engine, and serve it."""
    parser = argparse.ArgumentParser(description="Serve an engine that has no server, to judge it.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("target", help="folder or file of the model")
    parser.add_argument("--draft", help="folder or file of the draft model")
    parser.add_argument("--lookup", type=int, default=0, help="guesses by prompt lookup")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="texts of a batch at most")
    parser.add_argument("--dtype", default="float32", help="of transformers or ctranslate2")
    parser.add_argument("--settings", default="{}", help="properties of openvino, as JSON")
    args = parser.parse_args()
    engine = ENGINES[args.engine](args)
    serve(Worker(engine, args.batch), Path(args.target).name, args.port)


if __name__ == "__main__":
    main()
