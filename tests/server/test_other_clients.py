"""Other clients, unmodified and in a separate environment: litellm's providers and the `llm` command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from tests.server.conftest import Served, start, stop
from tests.server.test_tools import SCHEMAS, TOOLS
from tests.support import agent_loops, client_loops, encoders, rag_clients
from tests.support.elsewhere import python_with

pytestmark = pytest.mark.nightly

LITELLM = """
import json, sys
import litellm
url, tools = sys.argv[1], json.loads(sys.argv[2])
asked = {"messages": [{"role": "user", "content": "Fix the bug."}], "max_tokens": 200, "tools": tools,
         "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
found = []
for model, base in (("openai/agent", f"{url}/v1"), ("anthropic/agent", url)):
    for stream in (False, True):
        answer = litellm.completion(model=model, api_base=base, api_key="none", stream=stream, **asked)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        (choice,) = answer.choices
        call = choice.message.tool_calls[0].function
        found.append([choice.finish_reason, call.name, json.loads(call.arguments)])
asked = {"input": "Good night", "max_output_tokens": 20}
answer = litellm.responses(model="openai/agent", api_base=f"{url}/v1", api_key="none", **asked)
found.append([answer.status, answer.usage.output_tokens])
answer = litellm.embedding(model="openai/agent", api_base=f"{url}/v1", api_key="none", input=["Good night", "Speak"])
found.append([len(one["embedding"]) for one in answer.data])
print(json.dumps(found))
"""
AGENT = "qwen2.5-coder-1.5b-instruct-q4_k_m"  # a bundle of benchmarks/real.py
MODELS = "- model_id: agent\n  model_name: agent\n  api_base: {url}/v1\n  api_key_name: none\n"


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Served]:
    running = start(chat_bundle, "--name", "agent")
    yield running
    stop(running)


def test_litellm_speaks_all_three_apis(server: Served, tmp_path: Path) -> None:
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
    command = [python_with("clients"), "-c", LITELLM, server.url, json.dumps(TOOLS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    *calls, response, embeddings = json.loads(done.stdout.splitlines()[-1])
    assert len(embeddings) == 2
    assert embeddings[0] == embeddings[1] > 0
    assert response == ["incomplete", 20]
    assert len(calls) == 4
    assert all(call == calls[0] for call in calls)
    assert calls[0][0] == "tool_calls"
    assert calls[0][1] in SCHEMAS


def test_classes_for_embeddings_and_rerank(tmp_path: Path) -> None:
    """Those of LangChain, llama-index and Cohere give the engine's vectors and scores."""
    encoders.save(encoders.torch_model("bert"), tmp_path / "bert")
    encoders.save(encoders.torch_model("bert", "ForSequenceClassification", num_labels=1), tmp_path / "cross")
    for name in ("bert", "cross"):
        edgespec.export(tmp_path / name, tmp_path / f"{name}-edge", format="int8", threads=1)
    running = start(tmp_path / "bert-edge", str(tmp_path / "cross-edge"))
    try:
        command = [python_with("clients"), "-I", rag_clients.__file__, running.url, "bert-edge", "cross-edge"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)}, timeout=300
        )
    finally:
        stop(running)
    assert done.returncode == 0, done.stderr[-3000:]
    found, texts = json.loads(done.stdout.splitlines()[-1]), [*rag_clients.TEXTS, rag_clients.QUERY]
    with edgespec.load(tmp_path / "bert-edge", threads=1) as engine:
        wanted = engine.embed(texts)
    for run in rag_clients.EMBEDDERS:
        assert np.array(found[run.__name__], np.float32).tobytes() == wanted.tobytes()
    with edgespec.load(tmp_path / "cross-edge", threads=1) as engine:
        best = engine.rerank(rag_clients.QUERY, rag_clients.TEXTS, top=2)
    for rank in rag_clients.RANKERS:
        assert found[rank.__name__] == [[rag_clients.TEXTS[one.index], pytest.approx(one.score)] for one in best]


def test_three_turns_of_every_client(server: Served, tmp_path: Path) -> None:
    """A call, another one and an answer, whose history is each client's own."""
    script = Path(client_loops.__file__)
    # the script's folder has modules with other packages' names
    command = [python_with("clients"), "-I", str(script), server.url, "agent"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    turns = json.loads(done.stdout.splitlines()[-1])
    assert len(turns) == len(client_loops.CLIENTS)
    for name, (*calls, said) in turns.items():
        assert len(calls) >= 2, name
        assert all(call in ({"lines": 1}, {"lines": 2}) for call in calls), name
        assert isinstance(said, str), name


def test_agents_with_a_real_model(tmp_path: Path) -> None:
    """Two calls and an answer, as the model chooses, in the loop of each client; the terminal agent ends its task."""
    bundle = Path(os.environ.get("EDGESPEC_REAL_BUNDLES", "")) / AGENT
    if not bundle.is_dir() or "EDGESPEC_REAL_BUNDLES" not in os.environ:
        pytest.skip(f"needs {AGENT} in the folder EDGESPEC_REAL_BUNDLES (.ci/nightly real makes it)")
    running = start(bundle, "--name", "agent", threads=2)
    try:
        command = [python_with("clients"), "-I", str(Path(agent_loops.__file__)), running.url, "agent"]
        environment = os.environ | {"HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    finally:
        stop(running)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["client"] for line in lines] == [client.__name__ for client in agent_loops.CLIENTS]
    for line in lines:
        assert line["right"], line
        assert len(line["calls"]) >= 2, line


def test_the_llm_command(server: Served, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url), "utf-8")
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [python_with("clients"), "-m", "llm", "-m", "agent", "-o", "max_tokens", "9", "-o", "temperature", "0"]
    texts = []
    for options in ((), ("--no-stream",)):
        told = [*command, *options, "--key", "none", "Good night"]
        done = subprocess.run(told, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert texts[0].strip()
