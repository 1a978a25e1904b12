"""A model's own sampling settings: read at export, the default of run, chat, Python and serve, and of nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.errors import ExportError
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import FILE, sampling_part
from edgespec.reports.proof import make_golden
from edgespec.runtimes.files.manifest import SamplingPart, read_manifest
from edgespec.server.app import make_app
from tests.cli.conftest import Command, export
from tests.support import hf

OWN = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
PARAMS = SamplingParams(temperature=0.9, top_p=0.8, top_k=20, repetition_penalty=1.05)
WORDS = "sampling as the model asks: temperature 0.9, top_p 0.8, top_k 20, repetition_penalty 1.05"
NEW = 24


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the embedded model as if its card asked for sampling, with a chat template."""
    folder = tmp_path_factory.mktemp("sampled")
    shutil.copytree(resolve("builtin:shakespeare"), folder / "model")
    for name, more in ((FILE, OWN), ("tokenizer_config.json", {"chat_template": hf.CHAT_TEMPLATE})):
        file = folder / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | more), "utf-8")
    return export(folder / "bundle", str(folder / "model"))


@pytest.mark.parametrize(
    "given, expected",
    [
        (OWN, SamplingPart(temperature=0.9, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        ({"do_sample": True}, SamplingPart(temperature=1.0)),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, SamplingPart(temperature=1.0, min_p=0.1)),
        # transformers ignores these where it does not sample, and applies the penalty all the same
        ({"temperature": 0.6, "top_k": 5}, None),
        ({"temperature": 0.6, "repetition_penalty": 1.2}, SamplingPart(repetition_penalty=1.2)),
        ({"do_sample": False, "top_p": 0.9}, SamplingPart(temperature=0.0)),
        ({"eos_token_id": 2}, None),
    ],
)
def test_what_a_model_asks_for(tmp_path: Path, given: dict[str, Any], expected: SamplingPart | None) -> None:
    (tmp_path / FILE).write_text(json.dumps(given), "utf-8")
    assert sampling_part(tmp_path) == expected


def test_without_the_file_nothing_is_asked_for(tmp_path: Path) -> None:
    assert sampling_part(tmp_path) is None


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": -1}, {"top_k": "many"}, {"repetition_penalty": 0}])
def test_nonsense_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / FILE).write_text(json.dumps(OWN | wrong), "utf-8")
    with pytest.raises(ExportError, match=rf"{FILE}: {next(iter(wrong))} is"):
        sampling_part(tmp_path)


def test_python_takes_them_where_nothing_else_is_said(sampled: Path) -> None:
    with load(sampled, threads=1) as engine:
        explicit = Settings(max_new_tokens=NEW, sampling=PARAMS)
        for changes in ({"seed": 3}, {"seed": 3, "temperature": 0.4}, {"seed": 3, "top_k": 0}):
            own = engine.generate("ROMEO:", max_new_tokens=NEW, method="ar", **changes)
            assert own.tokens == engine.generate("ROMEO:", explicit, method="ar", **changes).tokens
            assert own.model_sampling == {
                name: value for name, value in OWN.items() if name != "do_sample" and name not in changes
            }
        greedy = engine.generate("ROMEO:", Settings(method="ar", max_new_tokens=NEW))
        assert greedy.model_sampling == {}
        assert greedy.tokens != engine.generate("ROMEO:", method="ar", max_new_tokens=NEW, seed=3).tokens
        assert engine.generate_batch(["ROMEO:"], max_new_tokens=4, seed=3)[0].model_sampling
        assert engine.generate("ROMEO:", temperature=0, max_new_tokens=4).model_sampling == {"repetition_penalty": 1.05}


def test_run_and_chat_take_them_and_say_so(command: Command, sampled: Path) -> None:
    ask = ("run", sampled, "--prompt", "ROMEO:", "--max-new-tokens", NEW, "--seed", 3, "--method", "ar")
    said = command(*ask)
    assert WORDS in said.err
    explicit = ("--temperature", 0.9, "--top-p", 0.8, "--top-k", 20, "--repetition-penalty", 1.05)
    made = command(*ask, "--json").json
    assert made["text"] == command(*ask, *explicit, "--json").json["text"]
    assert made["model_sampling"] == {name: value for name, value in OWN.items() if name != "do_sample"}
    other = command(*ask, "--temperature", 0, "--repetition-penalty", 1)
    assert "as the model asks" not in other.err
    chat = command("run", sampled, "--chat", "--max-new-tokens", 8, stdin="Good night\n")
    assert WORDS in chat.err
    assert "temperature 0.9, top_k 20, top_p 0.8" in " ".join(command("info", sampled).out.split())


def test_proofs_and_measurements_stay_greedy(command: Command, sampled: Path) -> None:
    golden = read_manifest(sampled).golden
    assert golden
    assert make_golden(sampled, "\n".join(["My lord, the king is here"] * 3), 1) == make_golden(
        sampled, "\n".join(["My lord, the king is here"] * 3), 1
    )
    proof = command("verify", sampled, "--limit", 2, "--max-new-tokens", 8, "--json").json
    assert (proof["passed"], proof["golden"]["same"]) == (True, len(golden))
    timed = command("bench", sampled, "--limit", 1, "--repeats", 1, "--max-new-tokens", 8)
    assert timed.code == 0
    with load(sampled, threads=1) as engine:
        for vector in golden[:2]:
            greedy = Settings(method="ar", max_new_tokens=len(vector.tokens))
            assert engine.generate(vector.prompt, greedy).tokens == vector.tokens


@pytest.mark.parametrize("own", [True, False])
def test_the_server_takes_them_where_the_client_says_nothing(sampled: Path, demo: Path, own: bool) -> None:
    """And 1.0, as OpenAI's API, of a model that does not say whether to sample."""
    bundle = sampled if own else demo
    ask = {"model": "it", "prompt": "ROMEO:", "max_tokens": NEW, "seed": 5, "edgespec": {"method": "ar"}}
    top_k, penalty = (20, 1.05) if own else (0, 1.0)
    said = {"temperature": 0.9, "top_p": 0.8} if own else {"temperature": 1.0, "top_p": 1.0}
    full = ask | said | {"edgespec": {"method": "ar", "top_k": top_k, "repetition_penalty": penalty}}
    with TestClient(make_app(load(bundle, threads=1), "it"), base_url="http://localhost") as client:

        def text(body: dict[str, Any]) -> str:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()["choices"][0]["text"]
            assert re.search(r"\w", found)
            return str(found)

        assert text(ask) == text(full) != text(full | {"temperature": 0})
        assert text(ask | {"temperature": 0.2}) == text(full | {"temperature": 0.2})
