"""Commands and Python of the user pages run, with small models under the names that the pages use.

Models of the hub are folders here, where an embedded model is of their kind.  ``RULES`` gives a reason for everything
that does not run.  Nightly, a page is run as one session in an empty folder, in the order of its blocks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from edgespec.export.source.source import resolve
from tests.docs.conftest import NAMES, ROOT, text_of
from tests.server.conftest import source_with_template

PAGES = [name for name in NAMES if name != "CONTRIBUTING.md" and not name.startswith("docs/dev/")]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
SHELL = ("bash", "sh", "console")
PATIENCE = 600  # seconds

RULES = {  # what does not run -> why
    r"^(sudo|pip|python3? -m venv|clean/|rsync|rm -r|cmake|export [A-Z]|SKBUILD|llama-server)": "another program",
    r"^(eval|_EDGESPEC)": "another shell",
    r"^(accelerate|ACCELERATE|torchrun|edgespec train)": "trains for minutes: tests/export/training",
    r"^python -m (benchmarks|tools)|^python -c|^python examples/ray": "needs a phone, torch or Ray",
    r"^edgespec judge": "judges llama.cpp: tests/judge",
    r"--mcp ": "starts a server of the network",
    r"t5-small --from|nllb|--language ko": "the hub: models with languages",
    r"Qwen3-ASR|qwen-asr": "the hub: decoders with an audio encoder",
    r"Janus|run janus|llamagen|painter|captions|orpheus": "the hub: models that draw or speak",
    r"dspark|--heads heads$|--drafter drafter |--draft-adapter lora": "what a training of the page makes",
    r"from fastapi|import onnxruntime_genai|from optimum": "another package",
    r"^optimum-cli export edgespec": "another package: tests/cli/test_optimum_command.py",
    r"from transformers": "torch: tests/engine/test_transformers_model.py, tests/export/test_exporter.py",
    r"import lm_eval": "another package: tests/engine/test_lm_eval.py",
    r"sys\.argv": "tests/cli/test_foreign.py runs it",
    r'"type": "audio"': "the hub: a question about a recording",
    r"edgespec export MODEL": "a model of the reader's own",
    r"^edgespec (run|verify) .*--device webgpu": "a GPU: tests/runtimes/devices",
}
PEOPLE = re.compile(r"^edgespec run (?!.*--(prompt|input|audio|image|chat))")  # where a person types
COPIES = {  # names of pages -> embedded models
    "draft": "shakespeare-draft", "Llama-3.2-1B-Instruct": "shakespeare-draft", "medusa-heads": "shakespeare-medusa",
    "drafter": "shakespeare-eagle", "openai/whisper-small": "spoken-digits", "facebook/bart-large-cnn": "restore",
    "Helsinki-NLP/opus-mt-de-en": "restore", "google-t5/t5-large": "restore", "google-t5/t5-small": "restore-draft",
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": "reader",
}  # fmt: skip
MODELS = ("model", "my-model", "target", "base", "Llama-3.2-3B-Instruct", "Qwen2.5-1.5B-Instruct",
          "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
          "HuggingFaceTB/SmolLM2-135M-Instruct")  # fmt: skip
BUNDLES = {  # that pages have from elsewhere -> options of their export
    "demo": "model --format int4 --quick --method speculative --draft draft", "my-int4": "model --format int4 --quick",
    "my-int8": "model --format int8", "opus": "builtin:restore --format int8",
    "whisper": "builtin:spoken-digits --format int8", "smolvlm": "builtin:reader --format int8",
}  # fmt: skip
ADAPTERS = ("lora", "lora-poet", "lora-clerk")
SAME = ("my-bundle", "qwen", "coder", "embedder")  # as my-int8
TEXT = "My lord, I will not go to the king. " * 300
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
FILES = {
    "my-prompts.txt": "ROMEO:\nJULIET:\n", "notes.txt": TEXT, "my-text.txt": TEXT, "article.txt": TEXT[:400],
    "letter.txt": "thou art here\n", "person.json": json.dumps(SCHEMA), "old-chats.jsonl": '{"prompt": "ROMEO:"}\n',
    "prompts.jsonl": '{"id": "a", "prompt": "ROMEO:"}\n', "lines.jsonl": '{"prompt": "thou art here"}\n',
    "tools.json": json.dumps([{"type": "function", "function": {"name": "see", "parameters": SCHEMA}}]),
}  # fmt: skip


def blocks(page: str) -> Iterator[tuple[bool, str]]:
    """Yield the commands and the Python blocks of a page in order: (whether it is Python, its text)."""
    for kind, body in _FENCE.findall(text_of(page)):
        if kind == "python" and not re.match(r'^"\w', body):  # else: an entry of a table
            yield True, body
        elif kind in SHELL:
            lines = body.replace("\\\n", " ").splitlines()
            shown = [line[2:] for line in lines if line.startswith("$ ")]  # else: the answer
            for line in lines if kind != "console" else shown:
                if command := re.sub(r"(^|\s{2,})# .*$", "", line).strip():
                    yield False, command


def reason(code: str) -> str | None:
    """Find the rule by which a command or a block does not run; None = it runs."""
    return next((rule for rule in RULES if re.search(rule, code)), None)


def test_every_rule_is_needed() -> None:
    found = [reason(code) for page in PAGES for _, code in blocks(page)]
    unused = [rule for rule in RULES if rule not in found]
    assert not unused
    assert found.count(None) >= 120, "pages with few commands, or a rule that leaves out too many"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the models, bundles and files that pages name."""
    from gguf import GGMLQuantizationType

    from tests.support.checkpoints import write_adapter
    from tests.support.gguf_files import write_gguf

    place = tmp_path_factory.mktemp("place")
    for name in MODELS:
        made = source_with_template(tmp_path_factory.mktemp("source"))
        if name == "my-model":  # which a page plans for
            config = json.loads((made / "config.json").read_text("utf-8"))
            (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}), "utf-8")
        (place / name).parent.mkdir(exist_ok=True)
        made.rename(place / name)
    for name, embedded in COPIES.items():
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copytree(resolve(f"builtin:{embedded}"), place / name)
    for name in ADAPTERS:
        write_adapter(place / name, json.loads((place / "base/config.json").read_text("utf-8")))
    write_gguf(place / "model-Q8_0.gguf", "llama_tied_gqa", kind=GGMLQuantizationType.Q8_0)
    for name, text in FILES.items():
        (place / name).write_text(text, "utf-8")
    for name in ("talk.mp3", "numbers.wav", "talk.wav"):
        shutil.copy(ROOT / "tests/data/digits/en.wav", place / name)
    for name in ("photo.jpg", "photo.png", "tests/data/print/line.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests/data/print/line.png", place / name)
    shutil.copytree(ROOT / "tests/data/digits", place / "recordings")
    for name, options in BUNDLES.items():
        subprocess.run(
            [sys.executable, "-m", "edgespec", "export", *options.split(), "-o", name],
            cwd=place, env=environment(place), check=True, timeout=PATIENCE, capture_output=True,
        )  # fmt: skip
    for name in SAME:
        shutil.copytree(place / "my-int8", place / name)
    return place


def environment(home: Path) -> dict[str, str]:
    """Variables of a session: no hub, its own cache, the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
                         "EDGESPEC_CACHE": str(home / ".cache/edgespec")}  # fmt: skip


class Session:
    """Runs the blocks of a page in a folder.

    Args:
        folder: where it has what pages name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = environment(folder)
        self._server: subprocess.Popen[bytes] | None = None
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]

    def run(self, code: str, python: bool) -> None:
        """Run a command or a block; it fails by its exit code."""
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")
        if python:
            self._make_room(*re.findall(r'edgespec\.export\("[^"]+", "([^"]+)"', code))
            self._serve_for(code)
            self._check([sys.executable, "-c", self._completed(code)], code)
        elif re.search(r"(^|\s)edgespec serve ", code):
            self._serve(code)
        else:
            if re.match(r"edgespec export (?!--recipe list)", code):
                self._make_room(*re.findall(r" -o (\S+)", code))
                code += "" if "--overwrite" in code else " --overwrite"
            if PEOPLE.search(code):
                code += ' --prompt "ROMEO:"'
            self._check(["bash", "-c", code], code)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait(PATIENCE)
            self._server = None

    def _check(self, command: list[str], code: str) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, input=b"ROMEO:\n", capture_output=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:].decode()}\n{done.stderr[-2000:].decode()}"

    def _make_room(self, *names: str) -> None:
        """Remove bundles that a block makes anew."""
        for path in (self.folder / name for name in names):
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)

    def _completed(self, code: str) -> str:
        """Give a block what pages leave out: an engine, a client."""
        lines = ["import edgespec"]
        if "client." in code and "client =" not in code:
            where = f"http://127.0.0.1:{self._port}/v1"
            lines.append(f"from openai import OpenAI\nclient = OpenAI(base_url={where!r}, api_key='none')")
        if re.search(r"\bengine\.", code) and not re.search(r"\bengine =|as engine", code):
            lines.append('engine = edgespec.load("qwen")')
        return "\n".join([*lines, code])

    def _serve_for(self, code: str) -> None:
        """Start the server that a client of the page needs, if the page has started none."""
        found = re.search(r'model="([\w-]+)"', code)
        if found and "client." in code and self._server is None:
            self._serve(f"edgespec serve {found[1]}")

    def _serve(self, code: str) -> None:
        self.close()
        code = re.sub(r"--host \S+", "", code)
        self._server = subprocess.Popen(
            ["bash", "-c", re.sub(r"(?=edgespec serve )", "exec ", code) + f" --port {self._port}"],
            cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            assert self._server.poll() is None, f"ended: {code}"
            with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"did not start: {code}")


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", [page for page in PAGES if any(reason(code) is None for _, code in blocks(page))])
def test_a_page_runs(page: str, place: Path, tmp_path: Path) -> None:
    for found in place.iterdir():
        if found.name not in (".cache", ".local"):
            (tmp_path / found.name).symlink_to(found)
    session = Session(tmp_path)
    try:
        for python, code in blocks(page):
            if reason(code) is None:
                session.run(code, python)
    finally:
        session.close()
