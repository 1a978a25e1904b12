"""The route of a token counts only functions of the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.route import PACKAGE, ROOT, own_file, route


@pytest.mark.parametrize(
    "name, expected",
    [
        (ROOT / "edgespec" / "engine" / "engine.py", "edgespec/engine/engine.py"),
        (ROOT / "runtimes" / "opening.py", "edgespec/runtimes/opening.py"),  # through a link
        (ROOT / ".venv" / "lib" / "python3.12" / "site-packages" / "numpy" / "core.py", None),
        (ROOT / "tests" / "conftest.py", None),
        (Path("/usr/lib/python3/os.py"), None),
        ("<string>", None),
    ],
)
def test_a_virtual_environment_inside_the_checkout_is_not_counted(name: Path | str, expected: str | None) -> None:
    assert own_file(str(name)) == expected


def test_a_token_goes_through_the_package(bundle: Callable[..., Path]) -> None:
    called = route(bundle("int4"), "ar")
    files = {file for file, _ in called}
    assert "edgespec/runtimes/slots/stock.py" in files or any("native" in file for file in files)
    assert {Path(file).parts[0] for file, _ in called} == {PACKAGE}
