"""One engine from several threads, from asyncio, and in a process that was forked after loading."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import PROMPTS
from tests.support.requests import METHODS, Get, ask

ROOT = Path(__file__).resolve().parents[2]
NEW = 16


def test_threads_get_the_texts_of_single_requests(engine: Get) -> None:
    made = engine()
    expected = [ask(made, text, max_new_tokens=NEW).tokens for text in PROMPTS[:4]]
    jobs = [(number, method) for number in range(4) for method in METHODS]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda job: ask(made, PROMPTS[job[0]], method=job[1], max_new_tokens=NEW).tokens, jobs))
    assert found == [expected[number] for number, _ in jobs]


def test_asyncio(engine: Get) -> None:
    made = engine()
    expected = [ask(made, text, max_new_tokens=NEW).tokens for text in PROMPTS[:3]]

    async def several(one: Engine) -> list[list[int]]:
        calls = [asyncio.to_thread(ask, one, text, max_new_tokens=NEW, method="ngram") for text in PROMPTS[:3]]
        return [result.tokens for result in await asyncio.gather(*calls)]

    assert asyncio.run(several(made)) == expected


FORKED = """
import json, os, sys
from edgespec.engine.loading import load
engine = load(sys.argv[1], threads=int(sys.argv[3]), operators=sys.argv[2])
how = {"max_new_tokens": 12, "ignore_eos": True}
expected = engine.generate("ROMEO:", method="ar", **how).tokens
reading, writing = os.pipe()
child = os.fork()
if not child:
    try:
        found = [engine.generate("ROMEO:", method=name, **how).tokens for name in ("ar", "speculative", "self-spec")]
        os.write(writing, json.dumps(found).encode())
    except Exception as error:
        os.write(writing, json.dumps(f"{type(error).__name__}: {error}").encode())
    os._exit(0)
os.close(writing)
said = os.fdopen(reading).read()
os.waitpid(child, 0)
again = engine.generate("ROMEO:", method="speculative", **how).tokens
print(json.dumps({"expected": expected, "child": json.loads(said), "again": again}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_after_loading(bundle: Callable[..., Path], operators: Operators, threads: int) -> None:
    command = [sys.executable, "-c", FORKED, str(bundle("int4")), operators, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["again"] == found["expected"]
    if threads == 1:
        assert found["child"] == [found["expected"]] * 3
    else:
        assert "forked" in found["child"]
