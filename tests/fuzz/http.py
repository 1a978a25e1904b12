"""Requests made from a server's own description (schemathesis): what is answered must be in it, and nothing may fail.

python -m tests.fuzz.http http://127.0.0.1:8000 --examples 500
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi

MOST_TOKENS = 4  # of a text that is asked for: what is tried is what is read, not what is written
TIMEOUT = 60.0
CHECKS = [
    not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_headers_conformance,
    openapi.response_schema_conformance,
]


@dataclass
class Tried:
    """Results of the requests.

    Attributes:
        statuses: how often each was answered.
        wrong: what should not have been.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def try_all(url: str, examples: int, seed: int = 0, key: str | None = None) -> Tried:
    """Ask for every path, with bodies that fit the description and bodies that do not.

    Args:
        url: of the server.
        examples: requests of each path.
        seed: of the random requests.
        key: that the server asks for.
    """
    found = Tried()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    for made in schema.get_all_operations():
        operation: Any = made.ok()  # type: ignore[union-attr]
        cases = st.one_of(
            *(
                operation.as_strategy(generation_mode=mode)
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            )
        )

        def one(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), (int, type(None))):
                case.body["max_tokens"] = MOST_TOKENS
            response = case.call(headers=headers, timeout=TIMEOUT)
            found.statuses[response.status_code] = found.statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=CHECKS)

        settings = hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        try:
            hypothesis.seed(seed)(settings(hypothesis.given(case=cases)(one)))()
        except Exception as error:
            found.wrong.append(f"{operation.label}: {error}"[:4000])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=500, help="of each path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key")
    options = parser.parse_args()
    found = try_all(options.url, options.examples, options.seed, options.key)
    sys.stdout.write(f"{dict(sorted(found.statuses.items()))}\n" + "\n".join(found.wrong) + "\n")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
