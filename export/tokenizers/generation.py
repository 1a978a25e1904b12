"""A model's own sampling settings, from generation_config.json."""

from __future__ import annotations

from pathlib import Path

from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import BundleError, ExportError, InvalidRequest
from edgespec.runtimes.files.manifest import SamplingPart
from edgespec.runtimes.text.special import read_object

FILE = "generation_config.json"
RULES = ("top_k", "top_p", "min_p")  # which transformers applies only where it samples


def sampling_part(folder: Path) -> SamplingPart | None:
    """Read how a model asks for tokens to be chosen; None = it says nothing.

    As in transformers, ``do_sample`` decides whether the temperature and the rules beside it are used at all; what the
    file leaves out is off, and the temperature 1.

    Args:
        folder: of the model.

    Raises:
        ExportError: a value that cannot be.
    """
    try:
        given = {name: value for name, value in read_object(folder / FILE).items() if value is not None}
    except BundleError:  # missing or damaged, as for the tokens that end a text
        return None
    wanted = given.get("do_sample")
    names = ("temperature", *RULES) if wanted is True else ()
    found = {name: given[name] for name in (*names, "repetition_penalty") if name in given}
    if wanted is not None:
        found = {"temperature": 1.0 if wanted is True else 0.0} | found
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ExportError(f"{folder / FILE}: {error.message}", "repair this setting, or delete it") from error
    part = SamplingPart(**found)
    return None if part == SamplingPart() else part
