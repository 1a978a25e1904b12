"""Commit subjects follow the convention of CONTRIBUTING.md."""

from __future__ import annotations

import pytest

from tools.commit_subjects import fault


@pytest.mark.parametrize(
    "subject",
    ["server: reject nested arrays in tool schemas", "export, plan: read a tokenizer once", "ci: run on avx2"],
)
def test_a_subject_in_order(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    "subject",
    [
        "Reject nested arrays",
        "server: Reject nested arrays",
        "server: reject nested arrays.",
        "server:reject nested arrays",
        f"server: {'reject ' * 10}",
    ],
)
def test_a_subject_to_write_again(subject: str) -> None:
    assert fault(subject)
