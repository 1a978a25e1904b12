"""Prepare JSON schemas for grammars: objects get no properties that the schema does not name.

JSON Schema allows other properties unless ``additionalProperties`` is false.  A small model then adds properties until
the context is full.  So they are allowed only where a schema asks for them, as in llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.errors import InvalidRequest

MOST_INLINED = 20000  # schemas that are checked, or copied, in place of a reference
DEEPEST = 48  # of them within each other
_LISTS = ("anyOf", "oneOf", "allOf")  # what holds for the same value
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalProperties")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a schema, with ``additionalProperties: false`` where an object names properties and does not set it.

    Raises:
        InvalidRequest: a pattern of ``patternProperties`` that fits a named property, or references that grow.
    """
    made = _Closing(schema).closed(dict(schema))
    assert isinstance(made, dict)
    return made


def parameters(schema: Any, name: str) -> dict[str, Any]:
    """Return the schema of the arguments of the tool ``name``: an object, even if ``schema`` is incomplete.

    Raises:
        InvalidRequest: it allows no object.
    """
    if schema is None or schema is True:
        schema = {}
    kinds = schema.get("type", "object") if isinstance(schema, dict) else None
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        found = type(schema).__name__ if kinds is None else f"type {json.dumps(kinds)[:80]}"
        raise InvalidRequest(f"the parameters of tool {name!r} are a schema of {found}: expected one of an object")
    made = dict(schema) | {"type": "object"}
    if not any(key in made for key in ("$ref", "patternProperties", *_LISTS)):
        made.setdefault("properties", {})
    return made


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema in a schema that names properties and patterns of them."""
    if isinstance(node, dict):
        if all(isinstance(node.get(key), dict) for key in ("properties", "patternProperties")):
            yield node
        for key, value in node.items():
            inner = value.values() if key in _MAPS and isinstance(value, dict) else []
            inner = value if key in (*_LISTS, "prefixItems") and isinstance(value, list) else inner
            for one in [value] if key in _ONES else inner:
                yield from objects(one)


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, MOST_INLINED

    def closed(self, node: Any) -> Any:
        """Copy a schema whose objects are closed."""
        if not isinstance(node, dict):
            return node
        named = any(isinstance(node.get(key), dict) for key in ("properties", "patternProperties"))
        combined = sum(bool(self._names(part)) for part in self._parts(node) + self._alternatives(node))
        if not combined or not (named or len(self._parts(node)) > 1):
            made = {key: self._within(key, value) for key, value in node.items()}
            if named and not any(key in node for key in ("type", "$ref", "enum", "const", *_LISTS)):
                made["type"] = "object"  # it names properties, so that is what it means
            return made | {"additionalProperties": False} if named and "additionalProperties" not in node else made
        made = self._opened(node)  # several schemas hold for one object: only all of their names together close it
        if self._says(made):
            return made
        names = dict.fromkeys(sorted(self._names(made)), True)
        return made | {"properties": names | made.get("properties", {}), "additionalProperties": False}

    def _within(self, key: str, value: Any) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.closed(one) for name, one in value.items()}
        if key in (*_LISTS, "prefixItems") and isinstance(value, list):
            return [self.closed(one) for one in value]
        return self.closed(value) if key in _ONES else value

    def _opened(self, node: Any, depth: int = 0) -> Any:
        """Copy one of several schemas for the same object: close its properties, but not the schema itself."""
        self._count(depth)
        if not isinstance(node, dict):
            return node
        made = {
            key: [self._opened(one, depth + 1) for one in value]
            if key in _LISTS and isinstance(value, list)
            else self._within(key, value)
            for key, value in node.items()
        }
        if (target := self._target(node)) is not None:
            del made["$ref"]
            made["allOf"] = [*made.get("allOf", []), self._opened(target, depth + 1)]
        return made

    def _count(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise InvalidRequest("a schema whose references and combinations grow without end: expected a simpler one")

    def _target(self, node: dict[str, Any]) -> Any:
        """Find the schema that a reference names; None without a reference, or if its target is outside this schema."""
        pointer = node.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            return None
        found: Any = self._root
        for step in pointer[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """List the schemas that always apply to the same value."""
        parts, target = node.get("allOf"), self._target(node)
        return (parts if isinstance(parts, list) else []) + ([] if target is None else [target])

    def _alternatives(self, node: dict[str, Any]) -> list[Any]:
        """List the schemas of which one applies to the same value."""
        lists = [node.get(key) for key in ("anyOf", "oneOf")]
        return [one for value in lists if isinstance(value, list) for one in value]

    def _names(self, node: Any, depth: int = 0) -> set[str]:
        """Collect the properties that a schema names for the value itself."""
        self._count(depth)
        if not isinstance(node, dict):
            return set()
        own = node.get("properties")
        found = set(own) if isinstance(own, dict) else set()
        return found.union(*(self._names(one, depth + 1) for one in self._parts(node) + self._alternatives(node)))

    def _says(self, node: Any) -> bool:
        """Whether a schema, or one for the same value, defines the other allowed properties."""
        if not isinstance(node, dict):
            return False
        return "additionalProperties" in node or any(map(self._says, self._parts(node) + self._alternatives(node)))
