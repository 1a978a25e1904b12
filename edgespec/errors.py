"""All errors that edgespec raises on purpose.

Every message says what was expected, what came and, as ``hint``, what to do.  The command line prints both and exits
with 1; it never shows a traceback for one of these.
"""

from __future__ import annotations

from collections.abc import Iterable


class EdgespecError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what was expected and what came.
        hint: what the reader can do about it.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says; its type's name if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def install_hint(extra: str) -> str:
    """Return the command that installs an ``extra``: no package is published, so it needs a clone."""
    return f"pip install -e '.[{extra}]' in your clone of edgespec"


def unknown_name(what: str, name: str, known: Iterable[str]) -> InvalidRequest:
    """Make the error of a name that is none of ``known``: it suggests the nearest one, or lists all."""
    from difflib import get_close_matches

    names = sorted(known)
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
    return InvalidRequest(f"unknown {what} {name!r}", hint)


class ExportError(EdgespecError):
    """The source model cannot be exported: unreadable, unsupported or inconsistent."""


class UnsupportedModel(ExportError):
    """No emitter knows this architecture, or one of the options its configuration asks for."""


class IncompatibleDraft(EdgespecError):
    """A draft does not share the target's vocabulary."""


class BundleError(EdgespecError):
    """A bundle is missing a part, was altered, or is newer than this program."""


class DeviceError(EdgespecError):
    """A device is not there, gives wrong numbers, or failed in the middle of a pass."""


class BudgetError(EdgespecError):
    """Nothing fits the memory budget, or what was asked for does not."""


class QualityError(BudgetError):
    """Only a format fits the memory budget that loses much of the model's quality, or none does.

    Attributes:
        format: the one that would fit; empty = none.
    """

    def __init__(self, message: str, hint: str | None = None, form: str = "") -> None:
        super().__init__(message, hint)
        self.format = form


class StoreError(EdgespecError):
    """An n-gram store cannot be written or read: not a store, damaged, of a newer version, or of another tokenizer."""


class SessionError(EdgespecError):
    """A session file cannot be written or read: missing, damaged, newer, or of another bundle or other settings."""


class ProfileError(EdgespecError):
    """A device profile cannot be read or written: not a profile, damaged, or of another version."""


class InvalidRequest(EdgespecError):
    """A generation request that cannot be served: an empty or long prompt, invalid settings."""


class ContextFull(InvalidRequest):
    """A prompt leaves no room for a new token in the context."""


class TrainingError(EdgespecError):
    """Heads or a draft cannot be trained: unsuitable data or options, a state of another training, a loss of NaN."""
