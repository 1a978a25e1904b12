"""Fixtures: a bundle served by a real server in a separate process, and an engine in this process to compare with."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.ort.native_library import native_library
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits

if TYPE_CHECKING:
    import openai

TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if tools %}{{ tools | length }} TOOLS\n{% endif %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)


class Later:
    """A module that is imported once something of it is asked for: each process collects all tests, and runs some."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # attributes that pytest looks up on everything in a test module
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    said: str = ""  # on stderr, until it listened

    def openai(self, key: str = "none", timeout: float = 120) -> openai.OpenAI:
        """Make a client of OpenAI's that asks once."""
        made: openai.OpenAI = Later("openai").OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=timeout
        )
        return made


@pytest.fixture(scope="session")
def kind() -> Operators:
    return "native" if native_library().path is not None else "stock"


@pytest.fixture(scope="session")
def served_bundle(bundles: Callable[..., Path], kind: Operators, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the embedded model with a template of conversations."""
    folder = tmp_path_factory.mktemp("served") / "demo"
    shutil.copytree(bundles(kind), folder)
    return folder


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the embedded model with a template of conversations."""
    return with_template(TEMPLATE, tmp_path_factory.mktemp("chat"))


def with_template(template: str, folder: Path) -> Path:
    """Export the embedded model with a template of conversations."""
    source = source_with_template(folder, template)
    export_model(ExportOptions(str(source), folder / "bundle", [], "int4", threads=1), golden=False)
    return folder / "bundle"


def source_with_template(folder: Path, template: str = TEMPLATE) -> Path:
    """Copy the embedded model, and give it a template of conversations."""
    source = folder / "model"
    shutil.copytree(resolve("builtin:shakespeare"), source)
    own = json.loads((source / "tokenizer_config.json").read_text("utf-8")) | {"chat_template": template}
    (source / "tokenizer_config.json").write_text(json.dumps(own), "utf-8")
    return source


@pytest.fixture(scope="session")
def alone(served_bundle: Path, kind: Operators) -> Iterator[Engine]:
    """Load the same bundle in this process, for the expected result of each request."""
    engine = load(served_bundle, threads=1, operators=kind)
    yield engine
    engine.close()


def start(bundle: Path | str, *options: str, threads: int = 1, program: tuple[str, str] = ("-m", "edgespec")) -> Served:
    """Start ``edgespec serve``, or another ``program`` of Python's, and wait until it listens."""
    command = [sys.executable, *program, "serve", str(bundle), "--port", "0", "--threads", str(threads), *options]
    # a shell lets what it runs in the background ignore Ctrl-C, and what that starts would ignore it too
    fresh = None if sys.platform == "win32" else partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=fresh)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"at (http://\S+)/v1", line):
            return Served(found[1], process, said)
    raise AssertionError(f"the server did not start:\n{said}")


def models_of(bundle: Path, name: str, limits: Limits | None = None) -> Models:
    """Make the models of a server that has one, in this process."""
    return Models({name: bundle}, LoadOptions(threads=1), limits)


def stop(served: Served) -> str:
    """Ask it to stop, and wait; returns what it said since it started."""
    served.process.terminate()
    try:
        _, said = served.process.communicate(timeout=60)
        return said
    finally:
        served.process.kill()


@pytest.fixture(scope="session")
def served(served_bundle: Path) -> Iterator[Served]:
    """Make a server of that bundle, whose queue takes everything."""
    running = start(served_bundle, "--queue", "200", "--name", "demo", "--max-batch-size", "4")
    yield running
    stop(running)
