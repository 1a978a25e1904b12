"""Measure structured output: the fifty schemas of the tests, with every method, interleaved.

    python -m benchmarks.structured BUNDLE [--methods ngram,speculative] [--threads 2]

Every text is validated (jsonschema) and compared with plain decoding's under the same schema.  A speed-up is the median
over the schemas of plain decoding's time a token over the method's, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema

from benchmarks.common import conditions, ratio, show
from edgespec.decoding.settings import Grammar
from edgespec.drafters.registry import AR
from edgespec.engine.loading import load
from tests.support.schemas import SCHEMAS, Schema

PROMPT = "KING RICHARD:\n"
MOST = 200  # tokens of an answer


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--methods", default="ngram,speculative")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS))
    arguments = parser.parse_args()
    methods = [AR, *arguments.methods.split(",")]
    chosen = SCHEMAS[: arguments.schemas]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    with load(arguments.bundle, threads=arguments.threads, check=False) as engine:

        def once(name: str, schema: Schema) -> dict[str, Any]:
            start = perf_counter()
            result = engine.generate(PROMPT, method=name, grammar=Grammar.json_schema(schema), max_new_tokens=MOST)
            ms = 1000 * (perf_counter() - start)
            return {
                "tokens": result.tokens,
                "rounds": result.stats.rounds,
                "ms": ms,
                "valid": _valid(result.text, schema),
            }

        for name in methods:  # drafters are loaded, and grammars compiled
            for schema in chosen:
                once(name, schema)
        for turn, schema in enumerate(chosen):
            for name in methods[:: 1 if turn % 2 else -1]:
                found[name].append(once(name, schema))
        plain = found[AR]
        speeds = {name: [each["ms"] / len(each["tokens"]) for each in found[name]] for name in methods}
        show(
            conditions(bundle=arguments.bundle.name, operators=engine.operators.kind, threads=arguments.threads)
            | {
                "schemas": len(chosen),
                "methods": {
                    name: {
                        "tokens_a_round": round(
                            sum(len(each["tokens"]) for each in runs) / sum(each["rounds"] for each in runs), 2
                        ),
                        "tokens_per_second": round(
                            1000 * sum(len(each["tokens"]) for each in runs) / sum(each["ms"] for each in runs), 1
                        ),
                        "speed_up": ratio(speeds[AR], speeds[name]),
                        "valid": sum(each["valid"] for each in runs),
                        "same_text": sum(a["tokens"] == b["tokens"] for a, b in zip(runs, plain, strict=True)),
                    }
                    for name, runs in found.items()
                },
            }
        )


def _valid(text: str, schema: Schema) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
