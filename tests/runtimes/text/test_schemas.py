"""Schemas whose objects get no properties that they do not name."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.guidance import prepared
from edgespec.runtimes.text.schemas import closed, parameters

BASE = {"$defs": {"B": {"type": "object", "properties": {"x": {"type": "integer"}}}}}


def test_objects_that_name_properties_are_closed_wherever_they_are() -> None:
    inner: dict[str, Any] = {"properties": {"a": {}}}
    shut = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    for key in ("items", "additionalProperties"):
        assert closed({key: inner})[key] == shut
    for key in ("anyOf", "oneOf", "prefixItems", "allOf"):
        assert closed({key: [inner]})[key] == [shut]
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        assert closed({key: {"k": inner}})[key]["k"] == shut
    for key in ("const", "default", "examples"):  # data
        assert closed({key: inner})[key] == inner


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "additionalProperties": True}]},
    ],
)
def test_other_properties_are_allowed_where_a_schema_asks_for_them(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_what_several_schemas_name_for_one_object_closes_it_together() -> None:
    for schema in (
        BASE | {"allOf": [{"$ref": "#/$defs/B"}, {"properties": {"y": {}}}]},
        BASE | {"$ref": "#/$defs/B", "properties": {"y": {}}},
        {"properties": {"y": {}}, "anyOf": [{"properties": {"x": {}}}, {"required": ["y"]}]},
    ):
        found = closed(schema)
        assert found["additionalProperties"] is False
        assert set(found["properties"]) == {"x", "y"}
        assert "additionalProperties" not in str(found.get("allOf", found.get("anyOf")))
    assert closed(BASE | {"allOf": [{"$ref": "#/$defs/B"}]})["$defs"]["B"]["additionalProperties"] is False


def test_references_that_grow_without_end_are_refused() -> None:
    rules: dict[str, Any] = {
        f"n{at}": {"allOf": [{"$ref": f"#/$defs/n{at + 1}"}, {"$ref": f"#/$defs/n{at + 1}"}]} for at in range(40)
    }
    rules["n40"] = {"properties": {"x": {}}}
    for schema in ({"$ref": "#/$defs/n0", "properties": {"a": {}}}, {"$ref": "#/$defs/n30"}):
        with pytest.raises(InvalidRequest, match="without end"):
            closed(schema | {"$defs": rules})
    loop = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"x": {}}}]}}}
    with pytest.raises(InvalidRequest, match="without end"):
        closed(loop | {"$ref": "#/$defs/a", "properties": {"y": {}}})


@pytest.mark.parametrize(
    ("names", "patterns"),
    [(["score"], ["^score$"]), (["score", "tags"], ["^(score|tags)$"]), (["a1"], ["[0-9]"]), (["x"], ["^y", "x"])],
)
def test_patterns_that_fit_a_named_property_are_refused(names: list[str], patterns: list[str]) -> None:
    """The rest of such a pattern may be empty, and a text would reach a state where nothing is allowed."""
    pytest.importorskip("llguidance")
    schema = {"properties": dict.fromkeys(names, True), "patternProperties": dict.fromkeys(patterns, True)}
    for whole in (schema, {"items": schema}, {"anyOf": [{"type": "null"}, schema]}):
        with pytest.raises(InvalidRequest, match="also fits the property"):
            prepared(whole)
    assert prepared({"properties": {"b": True}, "patternProperties": {"^a": True}})["additionalProperties"] is False


@pytest.mark.parametrize(
    "given", [None, True, {}, {"properties": {}}, {"title": "x"}, {"type": ["object", "null"]}, {"type": "object"}]
)
def test_arguments_are_objects_whatever_a_tool_leaves_out(given: Any) -> None:
    found = parameters(given, "look")
    assert found["type"] == "object"
    assert closed(found)["additionalProperties"] is False


@pytest.mark.parametrize("given", [{"type": "string"}, {"type": ["array", "null"]}, [], False, "object"])
def test_arguments_that_cannot_be_an_object_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tool .look.*expected one of an object"):
        parameters(given, "look")
