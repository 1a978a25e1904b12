"""No test waits for a server that is not there."""

from __future__ import annotations

import pytest

from edgespec.judge import client


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a server that does not listen for one that is not there, at once."""
    monkeypatch.setattr(client, "PATIENCE", 0.0)
