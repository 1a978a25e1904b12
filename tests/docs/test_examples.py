"""The notebook in examples/ runs from its first cell to its last."""

from __future__ import annotations

import json

from tests.docs.conftest import ROOT


def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "examples/first_steps.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found: dict[str, object] = {"__name__": "notebook"}
    for cell in code:
        exec(compile(cell, "first_steps.ipynb", "exec"), found)
    own, plain = found["own"], found["plain"]
    assert len(code) >= 4
    assert getattr(own, "tokens") == getattr(plain, "tokens")  # noqa: B009
