"""Reading published skip sets."""

from __future__ import annotations

from pathlib import Path

from edgespec.decoding.target import SkipSet
from edgespec.errors import ExportError
from edgespec.runtimes.files.json_file import read_json


def read_skip_set(path: Path, layers: int) -> SkipSet:
    """Read ``{"attention": [...], "mlp": [...]}``, or a collection of such sets with one that fits.

    Args:
        path: the JSON file; ``FILE:NAME`` picks a set of a collection.
        layers: of the model.

    Raises:
        ExportError: not such a file, several sets to choose from, or layers the model does not have.
    """
    name, file = None, path
    if not file.is_file() and ":" in path.name:
        stem, _, name = str(path).rpartition(":")
        file = Path(stem)
    data = read_json(file, ExportError, 'expected {"attention": [...], "mlp": [...]}')
    if isinstance(data, dict) and "attention" not in data and "mlp" not in data:
        if name is None and len(data) == 1:
            name = next(iter(data))
        if name not in data:
            raise ExportError(
                f"{file}: holds several skip sets", f"pick one as {file.name}:NAME: {', '.join(map(str, data))}"
            )
        data = data[name]
    try:
        sets = [sorted({_layer(number) for number in data.get(kind, [])}) for kind in ("attention", "mlp")]
    except (AttributeError, TypeError, ValueError) as error:
        raise ExportError(f'{file}: expected {{"attention": [...], "mlp": [...]}} of layer numbers') from error
    beyond = [layer for kind in sets for layer in kind if not 0 <= layer < layers]
    if beyond:
        raise ExportError(
            f"{file}: names layer {beyond[0]}, but the model has layers 0 to {layers - 1}",
            "use a set made for this model",
        )
    if not sets[0] and not sets[1]:
        raise ExportError(
            f"{file}: the skip set is empty: the draft would be the target itself", "leave --skip-set out to search one"
        )
    return SkipSet(tuple(sets[0]), tuple(sets[1]))


def _layer(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"not a layer: {number!r}")
    return number


def first_skip_set(layers: int) -> SkipSet:
    """Where SWIFT (arXiv 2410.06916) starts to search: every other layer, but for the first and the last."""
    odd = tuple(range(1, layers - 1, 2))
    return SkipSet(odd, odd)
