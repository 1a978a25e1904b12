"""The example for Ray Data, on a cluster of two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.export.training.windows import data_files, read_texts
from tests.cli.conftest import ROOT

pytestmark = pytest.mark.nightly


def test_two_workers_write_what_each_prompt_gets_alone(demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    texts = [f"ROMEO: {at}" for at in range(64)]
    source = tmp_path / "prompts"
    source.mkdir()
    for part in range(4):
        lines = (json.dumps({"prompt": text}) for text in texts[16 * part : 16 * part + 16])
        (source / f"{part}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    words = [sys.executable, ROOT / "examples/ray_batch.py", demo, source, tmp_path / "answers", "--batch", "1"]
    subprocess.run(
        [*map(str, words), "--workers", "2", "--max-new-tokens", "12"],
        cwd=tmp_path, env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}, check=True, timeout=400,
    )  # fmt: skip
    files = sorted((tmp_path / "answers").glob("*.json"))
    found = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    engine = load(demo, threads=1)
    assert {one["prompt"]: one["text"] for one in found} == {
        text: engine.generate(text, max_new_tokens=12).text for text in texts
    }
    assert all(one["exact"] for one in found)
    assert len({one["worker"] for one in found}) == 2
    assert read_texts(data_files([tmp_path / "answers"])) == [one["prompt"] + one["text"] for one in found]
