"""Programs with words exchanged at random: the native operator refuses them, or runs, and never ends the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.runtimes.files.formats import Format
from tests.support.native_graph import doctored
from tests.support.planned import PLANS, with_heads

NAME = "qwen2_untied"


FUZZ = """
import sys
from pathlib import Path
import numpy as np
from edgespec.export.bundle.model_part import open_model
from edgespec.runtimes.files.manifest import ModelPart
from tests.conftest import Written
from tests.support.native_graph import Raw, program_text, with_program

folder, source, part, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
made = Written(folder, open_model(source, None), ModelPart.model_validate_json(part), {})
random, text = np.random.default_rng(seed), program_text(made)
ran = refused = 0
for _ in range(120):
    words = text.split(" ")
    for _ in range(int(random.integers(1, 3))):
        at = int(random.integers(len(words)))
        key, equals, value = words[at].partition("=")
        new = str(random.choice(["0", "1", "2", "7", "16", "33", "100", "4000", "-1", "65536", "1000000000"]))
        other = words[int(random.integers(len(words)))]
        words[at] = key + equals + new if equals and value.lstrip("-").isdigit() else other
    try:
        raw = Raw(made, path=with_program(made, folder.parent / "fuzz", " ".join(words)))
        feeds = raw.feeds([5, 6, 7])
        if random.integers(2):
            group = raw.at.heads[int(random.integers(len(made.part.heads)))]
            feeds["gates"] = raw.gates(raw.at.hidden, raw.at.load, group, off=[raw.at.lm, raw.at.embed])
            feeds["hidden_in"] = random.standard_normal((3, raw.facts.hidden)).astype(np.float32)
        feeds["control"][0] = random.integers(3)
        raw.run(feeds)
        ran += 1
    except Exception as error:
        assert str(error), "an error without words"
        refused += 1
print(ran, refused)
"""


@pytest.mark.parametrize("form, name", [("int4", "shared"), ("fp32", "own")])
def test_no_program_ends_the_process(
    native: None, checkpoint: Callable[[str], Path], tmp_path: Path, form: Format, name: str
) -> None:
    made = with_heads(tmp_path, checkpoint(NAME), PLANS[name], form).written
    doctored(made, tmp_path / "model", lambda model: None)
    arguments = [str(tmp_path / "model"), str(checkpoint(NAME)), made.part.model_dump_json(), "1"]
    command = [sys.executable, "-c", FUZZ, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr[-2000:]
    worked, refused = map(int, ran.stdout.split())
    assert refused > 20
    assert worked + refused == 120
