"""The public interface that programs may rely on."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import edgespec
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings, SettingsChanges
from edgespec.decoding.stats import Stats
from edgespec.decoding.verify import Accept
from edgespec.engine.asynchronous import AsyncStream
from edgespec.engine.conversation import Conversation
from edgespec.engine.engine import PUBLIC as PUBLIC_OF_ENGINES
from edgespec.engine.engine import Engine
from edgespec.engine.result import Chunk, Result
from edgespec.engine.stream import Stream
from edgespec.export.options import ExportChanges
from edgespec.runtimes.options import LoadChanges, LoadOptions
from edgespec.signatures import described

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = [
    "Audio", "EdgespecError", "Engine", "ExportOptions", "Grammar", "Image", "LoadOptions", "Result", "SamplingParams",
    "Settings", "__version__", "export", "load"
]  # fmt: skip


def names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def defaults(cls: type) -> dict[str, object]:
    return {name: getattr(cls(), name) for name in names(cls)}


def test_the_public_names() -> None:
    assert edgespec.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(edgespec, name) is not None
    with pytest.raises(AttributeError, match="'edgespec' has no attribute 'generate'"):
        edgespec.__getattr__("generate")


def test_public_names_are_imported_on_first_use() -> None:
    code = (
        "import sys, edgespec; assert set(edgespec.__all__) <= set(dir(edgespec));"  # completion finds them
        "assert 'numpy' not in sys.modules and 'onnxruntime' not in sys.modules;"
        "from edgespec import *; assert Settings().method is None and 'numpy' in sys.modules;"
        "assert edgespec.Engine is Engine and edgespec.load is load"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def members() -> dict[str, Callable[..., object]]:
    """List all public functions and classes by name, with the public methods of the classes.

    Requests and conversations, which engines make, have the methods that the pages name.
    """
    found: dict[str, Callable[..., object]] = {}
    for one in (getattr(edgespec, name) for name in PUBLIC if name != "__version__"):
        found[one.__name__] = one
        for name in dir(one) if inspect.isclass(one) else ():
            method = inspect.getattr_static(one, name, None)
            method = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
            if not name.startswith("_") and inspect.isfunction(method) and name not in vars(BaseException):
                found[f"{one.__name__}.{name}"] = method
    for method in (Stream.cancel, Stream.close, AsyncStream.cancel, AsyncStream.aclose, Conversation.ask,
                   Conversation.stream, Conversation.take, Conversation.save, Accept.parse):  # fmt: skip
        found[method.__qualname__] = getattr(method, "__func__", method)
    return found


MEMBERS = members()


def test_what_is_offered_is_looked_at() -> None:
    expected = {"load", "export", "Engine", "Engine.generate", "Engine.stream", "Engine.agenerate", "Engine.astream",
                "Engine.chat", "Engine.transcribe", "Settings.changed", "Result.as_dict", "Image.open"}  # fmt: skip
    assert expected <= MEMBERS.keys()


@pytest.mark.parametrize("name", MEMBERS)
def test_signatures_name_every_argument_and_docstrings_describe_it(name: str) -> None:
    """As editors, notebooks and ``help`` show them."""
    one = MEMBERS[name]
    given = list(inspect.signature(one).parameters.values())
    assert [each.name for each in given if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)] == []
    doc = inspect.getdoc(one)
    assert doc
    if not inspect.isclass(one):  # a class's docstring describes its objects
        first, _, rest = doc.splitlines()[0].partition(" ")
        assert re.fullmatch(r"[A-Z][a-z]+", first), first
        assert not first.endswith("s"), first
        assert rest, first
    told = described(one)
    assert [each.name for each in given if each.name not in ("self", "cls", *told)] == []


def test_what_may_be_set_is_in_signatures() -> None:
    """They have types and defaults; a default that means the model's own value is documented."""
    shown = inspect.signature(Engine.generate).parameters
    assert {*names(Settings), *names(SamplingParams), *names(DraftOptions)} - {"constraint", "prompt"} <= shown.keys()
    assert (shown["gamma"].default, shown["batch"].default, shown["seed"].default) == (None, 4, None)
    assert str(shown["temperature"]) == "temperature: 'float' = <the model's>"
    assert str(shown["stop"]) == "stop: 'str | tuple[str, ...]' = ()"
    assert list(shown)[:4] == ["self", "prompt", "settings", "on_chunk"]
    options = inspect.signature(edgespec.export).parameters
    assert {name: options[name].default for name in ("format", "trials", "quick")} == {
        "format": "int4", "trials": 64, "quick": False
    }  # fmt: skip
    assert options.keys() == {*names(edgespec.ExportOptions), "options", "progress"}
    assert inspect.signature(edgespec.load).parameters.keys() == {*names(LoadOptions), "bundle", "options", "progress"}


@pytest.mark.nightly  # mypy reads the whole package: a minute
def test_a_wrong_name_is_an_error_of_types(tmp_path: Path) -> None:
    """Editors underline such names: mypy reads the same ones."""
    (tmp_path / "tried.py").write_text(
        "import edgespec\n"
        'edgespec.export("a", "b", methods="ngram", target_size="1G", calibration="x.txt")\n'
        'edgespec.export("a", "b", metods=["ngram"])\n'
        'with edgespec.load("b", threads=1) as engine:\n'
        '    engine.generate("x", temprature=1)\n'
        '    engine.astream("x", max_new_tokens=1, temperature=0.5)\n',
        "utf-8",
    )
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent", "tried.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert [line.split(":")[1] for line in ran.stdout.splitlines() if "error" in line] == ["3", "5"], ran.stdout


def test_completion_shows_no_inner_names() -> None:
    assert dir(edgespec) == PUBLIC
    shown = [name for name in dir(Engine) if not name.startswith("__")]
    assert sorted(shown) == sorted(PUBLIC_OF_ENGINES)
    assert not [name for name in shown if name.startswith("_")]
    code = "import edgespec, edgespec.library, edgespec.engine.engine; assert dir(edgespec) == edgespec.__all__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_export_is_the_function_however_it_is_imported() -> None:
    """The package of the same name still exists."""
    code = (
        "import sys, io, contextlib, edgespec.export.api as front, edgespec.export.pipeline, edgespec;"
        "from edgespec.export.api import export; from edgespec import export as other;"
        "assert edgespec.export is export is other is front.export and front is sys.modules['edgespec.export.api'];"
        "assert edgespec.export.pipeline.export_model;"
        "out = io.StringIO();\nwith contextlib.redirect_stdout(out): help(edgespec.export)\n"
        "assert 'function export in module edgespec.export.api' in out.getvalue(), out.getvalue();"
        "assert 'methods: decoding methods to prepare' in out.getvalue()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_settings() -> None:
    assert defaults(LoadOptions) == {
        "threads": None, "context": None, "strict": True, "check": True, "operators": "auto", "precision": "full",
        "device": "cpu", "device_precision": None, "attention": None, "draft_attention": None,
        "ngram_store": None, "image_rows": None,
        "prompt_cache": True, "budget": None, "adapters": None, "draft_adapter": None
    }  # fmt: skip
    assert defaults(Settings) == {
        "method": None, "adapter": None, "max_new_tokens": None, "gamma": None, "fallback": True, "adaptive": True,
        "sampling": SamplingParams(), "drafts": DraftOptions(), "stop": (), "ignore_eos": False, "logprobs": False,
        "top_logprobs": 0,
        "batch": 4, "shadow": None, "proposer": None, "accept": Accept(), "grammar": None,
        "markers": (), "prediction": None, "source_language": None,
        "target_language": None, "prefix_tokens": None, "beams": None, "guidance_scale": None, "negative_prompt": None,
    }  # fmt: skip
    assert defaults(SamplingParams) == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "seed": None, "acceptance": "rejection", "verification": "token", "constraint": None,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt": 0,
    }  # fmt: skip
    assert defaults(Accept) == {"min_block": 0}


def test_editors_know_what_may_be_changed() -> None:
    assert SettingsChanges.__annotations__.keys() == {
        *names(Settings), *names(SamplingParams), *names(DraftOptions)
    } - {"constraint", "prompt"}  # fmt: skip
    assert list(LoadChanges.__annotations__) == names(LoadOptions)
    assert ["model", "output", *ExportChanges.__annotations__] == names(edgespec.ExportOptions)


def test_results() -> None:
    assert names(Result) == [
        "text", "tokens", "finish", "stats", "method_requested", "method_used", "reason", "lossless", "exact",
        "approximations", "operators", "device", "device_lost", "draft_attention", "logprobs", "peak_bytes",
        "predicted_bytes", "model_sampling", "unverified", "stop", "details"
    ]  # fmt: skip
    assert names(Chunk) == ["text", "round", "pieces"]
    assert [name for name in names(Stats) if not name.startswith("_")] == [
        "prompt_tokens", "reused_tokens", "tokens", "rounds", "drafted", "accepted", "histogram", "drafted_at",
        "accepted_at", "source_rows", "image_rows", "encode_ms", "setup_ms", "prefill_ms", "draft_ms", "verify_ms",
        "other_ms", "dropped_reason", "exact", "lossless",
        "plain_rounds", "drafted_rounds", "work", "recent", "drops", "probes", "fallbacks", "recoveries", "switches",
        "shadow_every", "shadow_checked", "shadow_agreeing", "shadow_first"
    ]  # fmt: skip


@pytest.mark.parametrize("value", [Settings(), SamplingParams(), Accept(), Chunk("", None)])
def test_values_cannot_be_changed(value: Settings | SamplingParams | Accept | Chunk) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, names(type(value))[0], None)
