"""Scores of lm_eval with ``EdgespecForCausalLM``: those that it gives the same model of transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.support import hf
from tests.support.elsewhere import LM_EVAL, python_with

pytestmark = pytest.mark.nightly
WORDS = ["the", "harbour", "quay", "men", "how", "long", "she", "had", "heard", "it", "before", "ship", "sea", "road"]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
WRITTEN = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["quay"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def write_tasks(folder: Path) -> None:
    """Write three tasks over a local file of questions."""
    draw, rows = random.Random(3), []
    for number in range(24):
        question, *choices = (" ".join(draw.choices(WORDS, k=count)) for count in (6, 1, 2, 3))
        rows.append({"question": question, "choices": choices, "answer": number % 3})
    data = folder / "questions.json"
    data.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    for name, own in (("choice", CHOICE), ("rolling", ROLLING), ("written", WRITTEN)):
        task = {
            "task": f"harbour_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **own,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task), "utf-8")  # JSON is YAML


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    python = python_with("lm_eval")
    source = hf.write_reference_checkpoint(tmp_path / "model", "llama_tied_gqa")
    edgespec.export(source, tmp_path / "bundle", format="fp32", threads=1)
    write_tasks(tmp_path)
    names = [f"harbour_{name}" for name in ("choice", "rolling", "written")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [python, "-c", LM_EVAL, str(source), str(tmp_path / "bundle"), str(tmp_path), *names],
        capture_output=True, text=True, env=os.environ | offline, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    own, other = found["edgespec"], found["transformers"]
    for name in names:
        scores = {key: value for key, value in own["results"][name].items() if isinstance(value, float)}
        assert scores
        for key, score in scores.items():
            assert score == pytest.approx(other["results"][name][key], rel=1e-4), key
    assert own["texts"][names[2]] == other["texts"][names[2]]
    assert any(text for (text,) in own["texts"][names[2]])
