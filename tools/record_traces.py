"""Record what control decides on: for each position of greedy texts, how many guesses would have been accepted.

    python -m tools.record_traces BUNDLE METHOD OUTPUT [--prompts FOLDER] [--tokens 96]

Greedy decoding accepts a draft token if it is the text's next token.  A draft model's token after accepted ones is thus
its likeliest token after the text, so one pass over each text gives all chains.  A drafter that reads its own keys and
values drafts a chain at every position, from the end of the text to its beginning.

The output is JSON: ``prices`` in milliseconds (``verify`` by rows, ``draft`` per step), ``acceptance`` as the bundle's
manifest has it, and ``texts``, each with its ``kind``, ``prompt`` and ``tokens`` (ids), ``right`` (one digit per token
but the last: accepted draft tokens, at most 8), and for drafters that stop early ``sure`` (8 digits per position: the
range of ``formulas.confidence.BOUNDS`` of every draft token's own probability, or less where the chain had ended).
"""

from __future__ import annotations

import argparse
import gzip
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.engine.engine import Engine
from edgespec.formulas.confidence import BOUNDS
from edgespec.formulas.cost import measure
from edgespec.library import load
from edgespec.runtimes.slots.slot import Slot

LONGEST = 8
EACH = 10  # prompts of each kind
KINDS = {
    "chat": {"writing", "roleplay", "reasoning", "stem", "humanities", "qa"},
    "summary": {"summarization", "extraction"},
}
PROSE = 400  # characters of a free text's beginning
MOST_CHARACTERS = 1500  # of a prompt


def prompts(folder: Path) -> list[tuple[str, str, bool]]:
    """List (kind, text, whether it is a message of a chat): ten each of chat, code, summary and free text."""
    found: list[tuple[str, str, bool]] = []
    lines = (folder / "prompts/spec_bench_question_odd.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    for kind, categories in KINDS.items():
        fit = [one for one in questions if one["category"] in categories and len(one["turns"][0]) < MOST_CHARACTERS]
        step = len(fit) // EACH
        found += [(kind, one["turns"][0], True) for one in fit[: step * EACH : step]]
    with gzip.open(folder / "prompts/HumanEval.jsonl.gz", "rt") as file:
        tasks = [json.loads(line)["prompt"] for line in file]
    found += [("code", f"Complete this function:\n```python\n{task}```", True) for task in tasks[:160:16]]
    prose = (folder / "text/wikitext2_valid.txt").read_text()
    at = range(5000, len(prose), len(prose) // EACH)
    return found + [("free", prose[start : start + PROSE].lstrip(), False) for start in list(at)[:EACH]]


def text_of(engine: Engine, prompt: Sequence[int], method: str, tokens: int) -> list[int]:
    """Decode greedily; drafts only make it faster."""
    return engine.generate(
        prompt, method=method, gamma=3, adaptive=False, max_new_tokens=tokens, temperature=0.0, repetition_penalty=1.0
    ).tokens


def chains_of_model(drafter: Speculative, text: Sequence[int], first: int) -> str:
    """Count accepted guesses after each token from ``first`` on, by one reading of the text."""
    slot = drafter.model
    assert isinstance(slot, Slot)
    slot.follow([])
    best: list[int] = []
    for at in range(0, len(text) - 1, 16):
        part = np.array(text[at : min(at + 16, len(text) - 1)], np.int64)  # [n]
        logits = slot.forward(part).logits[:, : drafter.vocab]  # [n, columns]
        slot.keep(range(len(part)))
        columns = logits.argmax(-1)
        best += (columns if slot.head_tokens is None else slot.head_tokens[columns]).tolist()
    right = [int(guess == text[at + 1]) for at, guess in enumerate(best)]
    runs, run = [], 0
    for at in range(len(right) - 1, first - 1, -1):
        run = min(run + 1, LONGEST) if right[at] else 0
        runs.append(run)
    return "".join(map(str, reversed(runs)))


def chains_of_self(drafter: SelfSpec, text: Sequence[int], first: int, beyond: int) -> tuple[str, list[str]]:
    """Draw a chain at each position from the end on; it ends ``beyond`` guesses after the first wrong one."""
    slot, runs, sure = drafter.target, [], []
    assert isinstance(slot, Slot)
    slot.follow([])
    slot.prefill(text[:-2])
    for at in range(len(text) - 2, first - 1, -1):
        slot.crop(at)
        step = drafter._choices(list(text[: at + 1])) or drafter._steps(list(text[: at + 1]))
        last, run, wrong, said = None, 0, 0, ""
        for depth in range(LONGEST):
            found = step(last)
            last, chance = found if isinstance(found, tuple) else _likeliest(found)
            said += str(bisect_right(BOUNDS, chance))
            truth = text[at + 1 + depth] if at + 1 + depth < len(text) else last
            run += not wrong and last == truth
            wrong += bool(wrong) or last != truth
            if wrong > beyond:
                break
        runs.append(run)
        sure.append(said)
    return "".join(map(str, reversed(runs))), sure[::-1]


def _likeliest(logits: Any) -> tuple[int, float]:
    best = int(logits.argmax())
    return best, float(1 / np.exp(logits - logits[best]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("method")
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data"))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beyond", type=int, default=2, help="guesses drawn after the first wrong one")
    parser.add_argument("--texts", type=Path, help="take texts from traces of the same target")
    parser.add_argument("--limit", type=int, default=1000)
    arguments = parser.parse_args()
    known = json.loads(arguments.texts.read_text())["texts"] if arguments.texts else None
    with load(arguments.bundle, threads=arguments.threads) as engine:
        session = engine.sessions.any()
        drafter = session.drafter(engine.choose(arguments.method), DraftOptions())
        target = session.target
        texts = []
        for at, (kind, words, chat) in enumerate(prompts(arguments.prompts)[: arguments.limit]):
            if known is not None:
                prompt, tokens = known[at]["prompt"], known[at]["tokens"]
            else:
                said = engine.chat_prompt([{"role": "user", "content": words}]) if chat else engine.encode(words)
                assert isinstance(said, list)
                prompt, tokens = said, text_of(engine, said, arguments.method, arguments.tokens)
            one: dict[str, Any] = {"kind": kind, "prompt": prompt, "tokens": tokens}
            if isinstance(drafter, SelfSpec):
                one["right"], sure = chains_of_self(drafter, [*prompt, *tokens], len(prompt) - 1, arguments.beyond)
                one["sure"] = " ".join(sure)
            else:
                assert isinstance(drafter, Speculative)
                one["right"] = chains_of_model(drafter, [*prompt, *tokens], len(prompt) - 1)
            texts.append(one)
            print(at, kind, len(prompt), len(tokens), one["right"], flush=True)
        target.stand_in(200)
        verify = measure(lambda n: target.forward(np.zeros(n, np.int64), None, True), (1, 2, 3, 5, 9), 9)
        (draft,) = measure(lambda _: drafter.benchmark_step(), (1,), 9).values()
        part = engine.bundle.manifest.methods[arguments.method]
        found = {
            "pair": f"{engine.bundle.path.name} {arguments.method}",
            "prices": {"verify": {n: round(ms, 2) for n, ms in verify.items()}, "draft": round(draft, 2)},
            "acceptance": part.measured[0].acceptance if part.measured else None,
            "positions": part.measured[0].positions if part.measured else None,
            "confidence": part.measured[0].confidence if part.measured else None,
            "texts": texts,
        }
    arguments.output.write_text(json.dumps(found, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n")


if __name__ == "__main__":
    main()
