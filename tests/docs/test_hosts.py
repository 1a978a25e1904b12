"""Check the table of features by host against the declarations of each host, and the methods against its code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from edgespec.drafters.registry import METHODS
from tests.docs.conftest import ROOT, text_of
from tools.host_features import BEGIN, END, FEATURES, PAGE, SOURCES, row, session_methods, source, table

LIBRARY = ("bundle.cpp", "session.cpp")
SIMILAR = {  # fields of the settings of the header, and what other hosts call them
    "bias_tokens": "logit_bias", "seeded": "seed", "biases": "logit_bias",
}  # fmt: skip
NOT_SETTINGS = {"size", "reserved", "user", "progress"}


def test_the_page_has_the_table() -> None:
    """``python -m tools.host_features`` writes it."""
    assert text_of(PAGE).split(BEGIN)[1].split(END)[0] == table()


def test_methods_of_sessions_are_those_of_the_code() -> None:
    code = "".join((ROOT / "edgespec/runtimes/native" / name).read_text("utf-8") for name in LIBRARY)
    assert set(session_methods()) <= {name for name in METHODS if name != "ar" and f'"{name}"' in code}
    assert '" draws chains here"' in code
    (kotlin,) = re.findall(r"val METHODS = listOf\((.*?)\)", source(SOURCES["Kotlin"]))
    assert set(re.findall(r'"(.*?)"', kotlin)) == {"ar", *session_methods()}
    (web,) = re.findall(r"\* (plain, .*?)\*/", source(SOURCES["web"]), re.DOTALL)
    assert set(re.findall(r"[\w-]+", web.split(", or several")[0])) == {"plain", *session_methods()}


@pytest.mark.parametrize("host", ["python", "c", "kotlin", "web"])
def test_a_declaration_that_is_gone_is_found(host: str) -> None:
    for feature in FEATURES:
        if getattr(feature, host):
            with pytest.raises(LookupError, match="not declared"):
                row(replace(feature, **{host: "gone"}))


def test_settings_of_the_header_are_in_every_host() -> None:
    """A field that the header gains is in Rust and in the web package, or named here."""
    (body,) = re.findall(
        r"typedef struct edgespec_settings \{(.*?)\n\} edgespec_settings;", source(SOURCES["C, Swift"]), re.S
    )
    body = re.sub(r"/\*.*?\*/|\(\*\w+\)\([^)]*\)", "", body, flags=re.DOTALL)
    fields = {name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())}
    named = {SIMILAR.get(name, name) for name in fields if not name.endswith("_count")} - NOT_SETTINGS - {"int"}
    assert len(named) > 20
    assert not {name for name in named if f"pub {name}:" not in source(SOURCES["Rust"])}
    camel = {re.sub(r"_(\w)", lambda found: found[1].upper(), name) for name in named}
    assert {name for name in camel if f"  {name}?:" not in source(SOURCES["web"])} == {"adapter"}
