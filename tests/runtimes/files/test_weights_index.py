"""The index of the weights is checked before a byte is read or written by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import BundleError
from edgespec.runtimes.files.weights_index import read_index
from tests.conftest import Written

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def index(writer: Callable[..., Written]) -> tuple[dict[str, Any], int]:
    folder = writer("native", "qwen2_untied", "int4").folder
    found: dict[str, Any] = json.loads((folder / "model.weights.json").read_text("utf-8"))
    return found, (folder / "model.data").stat().st_size


def matrix(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(data["matrices"].values()))
    return found


def tensor(data: dict[str, Any], layout: str) -> list[Any]:
    found: list[Any] = next(iter(data[layout].values()))
    return found


CHANGES: dict[str, tuple[Change, str]] = {
    "no matrices": (lambda data: data.pop("matrices"), "matrices: Field required"),
    "another key": (lambda data: data.update(a=1), "a: Extra inputs"),
    "an unknown kind": (lambda data: matrix(data).update(kind="q3"), "kind"),
    "no inputs": (lambda data: matrix(data).update(k=0), "k: Input should be greater than 0"),
    "a text for a size": (lambda data: matrix(data).update(n="many"), "n: Input should be a valid integer"),
    "too many rows": (lambda data: matrix(data).update(n=1 << 40), "n: Input should be less than"),
    "other rows than its parts": (lambda data: matrix(data).update(n=matrix(data)["n"] + 16), "rows together"),
    "no whole heads": (lambda data: matrix(data).update(head_dim=7), "no heads of 7"),
    "a matrix whose packed form is not there": (lambda data: data["matrices"].update(x=matrix(data)), "expected"),
    "a negative offset": (lambda data: tensor(data, "native").__setitem__(0, -1), "native"),
    "an offset beyond the file": (lambda data: tensor(data, "native").__setitem__(0, 1 << 40), "ends at byte"),
    "another length": (lambda data: tensor(data, "native").__setitem__(1, 3), "are no"),
    "an unknown type": (lambda data: tensor(data, "stock").__setitem__(2, "O"), "Input should be '<f4'"),
    "a shape of gigabytes": (
        lambda data: data["stock"].update(x=[0, 4 << 40, "<f4", [1 << 40]]),
        "stock x ends at byte 4398046511104, expected at most",
    ),
    "nine dimensions": (lambda data: tensor(data, "stock").__setitem__(3, [1] * 9), "at most 8 items"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_refused(index: tuple[dict[str, Any], int], tmp_path: Path, name: str) -> None:
    data, size = index
    path = tmp_path / "model.weights.json"
    path.write_text(json.dumps(data))
    assert read_index(path, "native", size).native
    change, said = CHANGES[name]
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BundleError) as caught:
        read_index(path, "native", size)
    assert said in caught.value.message
    assert str(path) in caught.value.message
