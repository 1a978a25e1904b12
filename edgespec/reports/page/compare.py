"""Figures of llama.cpp's own benchmark, to stand beside: the output of ``llama-bench -o json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidRequest

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Foreign:
    """One test of llama-bench.

    Attributes:
        model: its file and type.
        test: what was done, in llama-bench's words, as in ``tg128 @ d512``.
        threads: of the run.
        speed: tokens per second, the mean.
        deviation: their standard deviation.
        build: which llama.cpp.
    """

    model: str
    test: str
    threads: int
    speed: float
    deviation: float
    build: str


def read_llama_bench(file: Path) -> list[Foreign]:
    """Read the file.

    Raises:
        InvalidRequest: not there, or not what llama-bench writes.
    """
    hint = "write it with `llama-bench -m MODEL -o json > llama-bench.json`"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise InvalidRequest(f"{file}: larger than any output of llama-bench", hint)
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file}: cannot be read as JSON: {error}", hint) from error
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{file}: expected a list of tests, got {type(found).__name__}", hint)
    try:
        return [_test(one) for one in found]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{file}: not an output of llama-bench: {error!r}", hint) from error


def _test(one: dict[str, Any]) -> Foreign:
    prompt, written, depth = (int(one.get(name, 0)) for name in ("n_prompt", "n_gen", "n_depth"))
    test = "+".join(part for part in (f"pp{prompt}" if prompt else "", f"tg{written}" if written else "") if part)
    return Foreign(
        model=f"{Path(str(one['model_filename'])).name} ({one['model_type']})",
        test=test + (f" @ d{depth}" if depth else ""),
        threads=int(one["n_threads"]),
        speed=float(one["avg_ts"]),
        deviation=float(one.get("stddev_ts", 0)),
        build=str(one.get("build_commit", "")),
    )
