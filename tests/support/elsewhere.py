"""Other programs that open bundles, each in a separate environment, because they need different versions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

GENAI = """
import json, sys
import onnxruntime_genai as og

folder, tokens, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = og.Model(folder)
settings = og.GeneratorParams(model)
settings.set_search_options(do_sample=False, max_length=len(tokens) + count)
generator = og.Generator(model, settings)
generator.append_tokens(tokens)
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps([int(token) for token in generator.get_sequence(0)][len(tokens) :]))
"""
OPTIMUM = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM

folder, tokens, count = sys.argv[1], torch.tensor([json.loads(sys.argv[2])]), int(sys.argv[3])
model = ORTModelForCausalLM.from_pretrained(folder)
found = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count)
print(json.dumps(found[0].tolist()[tokens.shape[1] :]))
"""
SPECULATORS = """
import json, sys
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel

found = {}
for folder in sys.argv[1:]:
    written, loaded = load_file(folder + "/model.safetensors"), SpeculatorModel.from_pretrained(folder).state_dict()
    same = (name in loaded and torch.equal(loaded[name].float(), value.float()) for name, value in written.items())
    other = [name for name, equal in zip(written, same) if not equal]
    found[folder] = [other, [name for name in loaded if name not in written]]
print(json.dumps(found))
"""
LM_EVAL = """
import json, sys
import lm_eval, torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec.transformers import EdgespecForCausalLM

source, bundle, tasks, *names = sys.argv[1:]
models = {
    "transformers": AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
    "edgespec": EdgespecForCausalLM.from_pretrained(bundle, threads=1),
}
tokenizer, found = AutoTokenizer.from_pretrained(source), {}
for name, model in models.items():
    model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=96)
    made = lm_eval.simple_evaluate(model=model, tasks=names, bootstrap_iters=0, log_samples=True,
                                   task_manager=TaskManager(include_path=tasks, include_defaults=False))
    texts = {task: [one["filtered_resps"] for one in samples] for task, samples in made["samples"].items()}
    found[name] = {"results": made["results"], "texts": texts}
print(json.dumps(found))
"""
PROGRAMS = {
    "onnxruntime-genai": ("EDGESPEC_GENAI_PYTHON", GENAI),
    "optimum": ("EDGESPEC_OPTIMUM_PYTHON", OPTIMUM),
    "speculators": ("EDGESPEC_SPECULATORS_PYTHON", SPECULATORS),
    "lm_eval": ("EDGESPEC_LM_EVAL_PYTHON", LM_EVAL),  # with edgespec[transformers]
    "clients": ("EDGESPEC_CLIENTS_PYTHON", ""),  # litellm and llm, which other packages would hold back
}


def python_with(package: str) -> str:
    """Find the interpreter of the environment that has a package, or skip the test without it."""
    variable = PROGRAMS[package][0]
    if not (python := os.environ.get(variable)):
        pytest.skip(f"needs {package} in an environment of its own ({variable}, see CONTRIBUTING.md)")
    return python


def run_elsewhere(package: str, *arguments: object) -> Any:
    """Run a package's program in its environment -> the JSON that it prints."""
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"ORT_DISABLE_TELEMETRY": "1"}
    command = [python_with(package), "-c", PROGRAMS[package][1], *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def generate(package: str, bundle: Path, tokens: list[int], count: int) -> list[int]:
    """Give what a program writes after these tokens, greedily; fewer than ``count`` where the text ends."""
    found: list[int] = run_elsewhere(package, bundle, json.dumps(tokens), count)
    return found
