"""Convert manifests of older schemas to the current one before validation.

Each step takes a manifest's JSON from one schema to the next.  The list includes changes in the bundle's other files,
of which the runtime reads both versions.

2 -> 3:

* Graphs of stock operators call their inputs ``input_ids`` and ``position_ids``; before, ``ids`` and ``pos``.  Slots
  check a graph's inputs (``edgespec/runtimes/slots/shared.py``).
* Graphs of the operators whose layout the bundle does not have name a missing weight file, ``converted``.  Before,
  they named the existing one, and programs other than edgespec read the wrong layout.

3 -> 4:

* int8 matrices have two planes, and a model has the size of the low ones (``low_bytes``); its native graph has
  further gates for them.  Before, there was one: kind q8, which native operators still multiply.

4 -> 5:

* A decoder may have a ``source`` that it attends over, and an ``encoder``.  Before, all models were decoder-only.

5 -> 6:

* Keys have other names (``RENAMED``), and the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import PurePosixPath
from typing import Any

OLDEST, RENAMING, SCHEMA = 2, 6, 6
Json = dict[str, Any]
_RULES = {
    "suppressed": "suppress_tokens",
    "begin_suppressed": "begin_suppress_tokens",
    "bad_words": "bad_words_ids",
    "no_repeat": "no_repeat_ngram_size",
    "least": "min_length",
    "least_new": "min_new_tokens",
    "most": "max_length",
    "forced_end": "forced_eos_token_id",
}
RENAMED: Mapping[str, Mapping[str, str]] = {
    "model": {
        "fine": "int8_fraction",
        "headroom": "extra_rows",
        "kept": "bytes_per_weight",
        "low_bytes": "low_nibble_bytes",
        "tapped": "aux_hidden_layers",
    },
    "model/graphs/*": {"least_length": "min_length"},
    "model/source": {"most": "max_rows"},
    "model/image": {
        "most": "max_rows",
        "places": "position_embedding",
        "taps": "deepstack_layers",
        "words": "prompt_template",
    },
    "model/image/processor": {"least": "min_pixels", "most": "max_pixels"},
    "model/sound": {"ask": "transcript_prompt", "most": "max_rows", "words": "prompt_template"},
    "model/sound/front": {"least": "min_samples"},
    "rules": _RULES,
    "text": {"begin": "prefix_tokens"},
    "text/rules": _RULES,
    "speech": {
        "latest_first": "max_initial_timestamp_index",
        "suppressed": "suppress_tokens",
        "suppressed_first": "begin_suppress_tokens",
    },
    "codes/image/caption": {"most": "max_tokens", "nothing": "unconditional"},
    "golden/*": {"begin": "prefix_tokens"},
}
"""Keys up to schema 5 and their names since, by the place of their object: ``model`` is any model of the bundle, its
encoders included, and ``*`` any member."""
_MODELS = "target", "draft", "drafter"
_ENCODERS = (["encoder"], ["tower"], ["projectors", "*"], ["convolutions", "*"])


def migrated(data: Json, version: int) -> Json:
    """Convert a manifest from schema ``version`` to ``SCHEMA``; validation reports unexpected values later."""
    for step in range(version, SCHEMA):
        data = _STEPS[step](data)
    return data | {"schema_version": SCHEMA}


def with_old_names(data: Json) -> Json:
    """Return a manifest of schema 6 with the keys of schema 5, in the same order."""
    before = {place: {new: old for old, new in names.items()} for place, names in RENAMED.items()}
    return _renamed(data, before) | {"schema_version": RENAMING - 1}


def _name_converted(data: Json) -> Json:
    """Add to ``data`` of schema 3 the names of converted weights, for each model with an index."""
    found = dict(data)
    for name in _MODELS:
        part = data.get(name)
        if isinstance(part, dict) and part.get("index") and isinstance(part.get("weights"), str):
            found[name] = {**part, "converted": PurePosixPath(part["weights"]).name}
    return found


def _renamed(data: Json, names: Mapping[str, Mapping[str, str]]) -> Json:
    """Rename keys; one whose new name is there as well stays, and validation rejects it."""
    found = deepcopy(data)
    for place, renames in names.items():
        for part in parts(found, place):
            entries = [(key if renames.get(key, key) in part else renames[key], value) for key, value in part.items()]
            part.clear()
            part.update(entries)
    return found


def parts(data: Json, place: str) -> Iterator[Json]:
    """Yield the objects at a place of ``RENAMED``."""
    first, *rest = path = place.split("/")
    if first != "model":
        yield from _at(data, path)
    else:
        for model in _models(data):
            yield from _at(model, rest)


def _models(data: Json) -> Iterator[Json]:
    waiting = [part for name in _MODELS for part in _at(data, [name])]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [encoder for path in _ENCODERS for encoder in _at(part, path)]


def _at(value: Any, path: Sequence[str]) -> Iterator[Json]:
    """Yield the objects at a path below a value; a path that leads elsewhere has none."""
    if not path:
        yield from [value] if isinstance(value, dict) else []
    elif path[0] == "*":
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for member in list(members):
            yield from _at(member, path[1:])
    elif isinstance(value, dict) and path[0] in value:
        yield from _at(value[path[0]], path[1:])


_STEPS: Mapping[int, Callable[[Json], Json]] = {
    2: _name_converted, 3: dict, 4: dict, 5: lambda data: _renamed(data, RENAMED),
}  # fmt: skip
