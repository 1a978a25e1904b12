"""What other people's programs may rely on."""

from __future__ import annotations

import dataclasses
import inspect
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
from edgespec.engine.engine import Engine
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk, Result
from edgespec.runtimes.options import LoadChanges, LoadOptions

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


@pytest.mark.parametrize(
    "function, signature",
    [
        (
            edgespec.load,
            "(bundle: str | os.PathLike[str], options: LoadOptions | None = None, *, progress: Progress | None = None, "
            "**changes: Unpack[LoadChanges]) -> Engine",
        ),
        (
            Engine.generate,
            "(self, prompt: Prompt, settings: Settings | None = None, *, "
            "on_chunk: Callable[[Chunk], None] | None = None, cancel: threading.Event | None = None, "
            "on_stats: Callable[[Stats], None] | None = None, stats_every: int = 16, "
            "**changes: Unpack[SettingsChanges]) -> Result",
        ),
        (
            Engine.stream,
            "(self, prompt: Prompt, settings: Settings | None = None, *, cancel: threading.Event | None = None, "
            "on_stats: Callable[[Stats], None] | None = None, stats_every: int = 16, "
            "**changes: Unpack[SettingsChanges]) -> Stream",
        ),
        (
            Engine.generate_batch,
            "(self, prompts: Sequence[Prompt], settings: Settings | None = None, *, "
            "seeds: Sequence[int | None] | None = None, cancel: threading.Event | None = None, "
            "on_result: Callable[[int, Result], None] | None = None, "
            "**changes: Unpack[SettingsChanges]) -> list[Result]",
        ),
        (
            Engine.chat,
            "(self, messages: Sequence[Message], settings: Settings | None = None, *, "
            "tools: Sequence[Any] | None = None, template_options: Mapping[str, Any] | None = None, "
            "**changes: Unpack[SettingsChanges]) -> Result",
        ),
        (
            Engine.conversation,
            "(self, messages: Sequence[Message] = (), settings: Settings | None = None, *, "
            "tools: Sequence[Any] | None = None, template_options: Mapping[str, Any] | None = None) -> Conversation",
        ),
        (Engine.close, "(self) -> None"),
        (Stream.cancel, "(self) -> None"),
        (Stream.close, "(self) -> None"),
    ],
)
def test_signatures(function: Callable[..., object], signature: str) -> None:
    assert str(inspect.signature(function)).replace("'", "") == signature


def test_settings() -> None:
    assert defaults(LoadOptions) == {
        "threads": None, "context": None, "strict": True, "check": True, "operators": "auto", "precision": "full",
        "device": "cpu", "device_precision": None, "attention": None, "draft_attention": None,
        "ngram_store": None, "image_rows": None,
        "prompt_cache": True, "budget": None
    }  # fmt: skip
    assert defaults(Settings) == {
        "method": None, "max_new_tokens": None, "gamma": None, "fallback": True, "adaptive": True,
        "sampling": SamplingParams(), "drafts": DraftOptions(), "stop": (), "ignore_eos": False, "logprobs": False,
        "top_logprobs": 0,
        "batch": 4, "shadow": None, "proposer": None, "accept": Accept(), "grammar": None,
        "markers": (), "prediction": None, "source_language": None,
        "target_language": None, "begin": None, "beams": None, "guidance_scale": None, "negative_prompt": None,
    }  # fmt: skip
    assert defaults(SamplingParams) == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "seed": None, "acceptance": "rejection", "verification": "token", "constraint": None,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt": 0,
    }  # fmt: skip
    assert defaults(Accept) == {
        "rule": "exact", "epsilon": 0.09, "delta": 0.3, "k": 1, "distance": 0, "min_block": 0, "near": None,
    }  # fmt: skip


def test_editors_know_what_may_be_changed() -> None:
    assert SettingsChanges.__annotations__.keys() == {
        *names(Settings), *names(SamplingParams), *names(DraftOptions)
    } - {"constraint", "prompt"}  # fmt: skip
    assert list(LoadChanges.__annotations__) == names(LoadOptions)


def test_results() -> None:
    assert names(Result) == [
        "text", "tokens", "finish", "stats", "method_requested", "method_used", "reason", "lossless", "exact",
        "approximations", "operators", "device", "device_lost", "draft_attention", "logprobs", "peak_bytes",
        "predicted_bytes", "model_sampling", "unproven", "stop", "details"
    ]  # fmt: skip
    assert names(Chunk) == ["text", "round", "pieces"]
    assert [name for name in names(Stats) if not name.startswith("_")] == [
        "prompt_tokens", "reused_tokens", "tokens", "rounds", "drafted", "accepted", "histogram", "offered",
        "accepted_at", "source_rows", "image_rows", "encode_ms", "setup_ms", "prefill_ms", "draft_ms", "verify_ms",
        "other_ms", "dropped_reason", "exact", "lossless",
        "plain_rounds", "drafted_rounds", "work", "recent", "drops", "probes", "fallbacks", "recoveries", "switches",
        "shadow_every", "shadow_checked", "shadow_agreeing", "shadow_first", "width", "expected", "control_plain_ms",
        "draft_steps", "draft_step_cost"
    ]  # fmt: skip


@pytest.mark.parametrize("value", [Settings(), SamplingParams(), Accept(), Chunk("", None)])
def test_values_cannot_be_changed(value: Settings | SamplingParams | Accept | Chunk) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, names(type(value))[0], None)
