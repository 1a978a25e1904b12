"""Fifty JSON schemas of shapes that programs ask for."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
WORD: Schema = {"type": "string", "maxLength": 8}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 20}
COLOR: Schema = {"enum": ["red", "green", "blue"]}
DATE: Schema = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}


def record(**fields: Schema) -> Schema:
    """Make an object with just these fields."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def some(of: Schema, most: int = 3, least: int = 0) -> Schema:
    """Make a short list."""
    return {"type": "array", "items": of, "maxItems": most, "minItems": least}


POINT = record(x=SMALL, y=SMALL)
PERSON = record(name=WORD, age=SMALL)

SCHEMAS: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    SMALL,
    WORD,
    COLOR,
    DATE,
    {"const": "yes"},
    {"const": 42},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "string", "enum": ["a", "bb", "ccc"]},
    record(ok={"type": "boolean"}),
    record(name=WORD),
    PERSON,
    record(color=COLOR, count=SMALL),
    POINT,
    record(born=DATE, died=DATE),
    record(name=WORD, tags=some(COLOR)),
    some(SMALL),
    some(COLOR, 4, 2),
    some(POINT, 2),
    record(people=some(PERSON, 2, 1)),
    record(person=PERSON, where=POINT),
    record(a=record(b=record(c=SMALL))),
    {"anyOf": [SMALL, COLOR]},
    {"anyOf": [{"type": "null"}, PERSON]},
    record(value={"anyOf": [WORD, SMALL]}),
    record(kind={"const": "circle"}, radius=SMALL),
    {"anyOf": [record(kind={"const": "a"}, x=SMALL), record(kind={"const": "b"}, y=WORD)]},
    record(first=WORD, last=WORD, email={"type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}\\.com$"}),
    record(id={"type": "string", "pattern": "^[A-F0-9]{8}$"}),
    record(phone={"type": "string", "pattern": "^\\+[0-9]{6,9}$"}),
    record(level={"enum": [1, 2, 3]}, message=WORD),
    record(status={"enum": ["open", "closed"]}, labels=some(WORD, 2)),
    record(title=WORD, year={"type": "integer", "minimum": 1500, "maximum": 1700}),
    record(price={"type": "integer", "minimum": 1, "maximum": 999}, currency={"enum": ["EUR", "USD"]}),
    record(answer={"enum": ["yes", "no", "unknown"]}, reason=WORD),
    record(city=WORD, country={"enum": ["IT", "GB", "FR"]}),
    record(function={"const": "search"}, arguments=record(query=WORD, limit=SMALL)),
    {
        "anyOf": [
            record(function={"const": "look"}, arguments=record(at=WORD)),
            record(function={"const": "go"}, arguments=record(to=COLOR)),
        ]
    },
    record(steps=some(record(do=WORD, minutes=SMALL), 2, 1)),
    record(matrix=some(some(SMALL, 2, 2), 2, 2)),
    record(from_=POINT, to=POINT),
    record(question=WORD, options=some(WORD, 3, 2), correct=SMALL),
    record(score=SMALL, max={"const": 20}),
    record(on={"type": "boolean"}, off={"type": "boolean"}, mode=COLOR),
    record(nothing={"type": "null"}, name=WORD),
    record(start=DATE, days=SMALL),
    record(width=SMALL, height=SMALL, unit={"enum": ["cm", "in"]}),
    {"type": "array", "prefixItems": [WORD, SMALL, COLOR], "items": False, "minItems": 3},
    record(deep=record(er=record(still=some(record(end={"type": "boolean"}), 1, 1)))),
)
