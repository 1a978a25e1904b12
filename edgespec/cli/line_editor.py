"""Lines that are typed at a terminal: edited, recalled, completed."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document

QUIET = 0.05  # seconds without a key that end a paste


def typing() -> AbstractContextManager[None]:
    """While this lasts, typed keys wait for the next line, unseen, regardless of their number.

    A terminal that echoes shows them in the middle of what is written.  One in line mode keeps 4,095 bytes of a line,
    and drops the rest.
    """
    return _line_mode(False)


def asking() -> AbstractContextManager[None]:
    """Put the terminal into line mode, as other programs use it, inside a ``with`` block."""
    return _line_mode(True)


@contextmanager
def _line_mode(on: bool) -> Iterator[None]:
    try:
        import termios
    except ImportError:  # Windows, whose console cuts nothing
        yield
        return
    file = sys.stdin.fileno()
    before, now = termios.tcgetattr(file), termios.tcgetattr(file)
    flags = termios.ICANON | termios.ECHO
    now[3] = now[3] | flags if on else now[3] & ~flags
    termios.tcsetattr(file, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


def gather(editor: PromptSession[str]) -> None:
    """Make one text of the keys that came since the last prompt: the next one begins with it.

    A line end among them is a new line of the text; one at the end sends it.
    """
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.key_binding import KeyPress
    from prompt_toolkit.keys import Keys

    if sys.platform == "win32":
        return
    keys = get_typeahead(editor.input)
    while came := editor.input.read_keys():
        keys += came
        select.select([editor.input.fileno()], [], [], QUIET)  # a text that is pasted comes in pieces
    keys += editor.input.flush_keys()
    texts = [at for at, one in enumerate(keys) if one.key == Keys.BracketedPaste or len(one.key) == 1]
    last = texts[-1] if texts else -1
    made: list[KeyPress] = []
    sent = not texts
    for at, one in enumerate(keys):
        if one.key not in (Keys.ControlM, Keys.ControlJ):
            made.append(one)
        elif at < last:
            made += [KeyPress(Keys.Escape), KeyPress(Keys.ControlM)]
        elif not sent:
            made.append(KeyPress(Keys.ControlM))
            sent = True
    store_typeahead(editor.input, made)


@contextmanager
def line_editor(
    history: Sequence[str] = (), complete: Callable[[str], Iterable[str]] = lambda _: ()
) -> Iterator[PromptSession[str]]:
    """Edit what is typed at the terminal, wherever stdout goes.

    Enter sends; Alt-Enter begins a new line, and lines that are pasted together stay one text.  Arrow keys recall
    earlier texts, and Ctrl-R searches them; they are forgotten at the end.

    Args:
        history: earlier texts, the oldest first.
        complete: what may replace the text before the cursor.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import Condition, has_completions, has_focus
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.plain_text import PlainTextOutput
    from prompt_toolkit.utils import is_dumb_terminal

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            word = document.text_before_cursor.rpartition(" ")[2]
            for text in complete(document.text_before_cursor):
                yield Completion(text, -len(word))

    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    dumb = is_dumb_terminal()  # it does not support escape sequences, so it is asked for a line
    with _terminal() as terminal, create_app_session(output=PlainTextOutput(terminal)) if dumb else nullcontext():
        editor: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=lambda width, *_: "." * (width - 1) + " ",
            history=InMemoryHistory(list(history)),
            completer=Words(),
            complete_while_typing=False,
            complete_in_thread=False,
            key_bindings=keys,
            output=None if dumb else create_output(terminal),
        )
        is_command = Condition(lambda: editor.default_buffer.text.startswith("/"))
        editor.complete_while_typing = is_command & ~has_completions
        try:
            yield editor
        finally:
            expect_pastes(editor, False)


def expect_pastes(editor: PromptSession[str], wanted: bool = True) -> None:
    """Have the terminal mark pasted text while no prompt is active (a prompt does it)."""
    (editor.output.enable_bracketed_paste if wanted else editor.output.disable_bracketed_paste)()
    editor.output.flush()


@contextmanager
def _terminal() -> Iterator[TextIO]:
    """Find the terminal to write a prompt to, where stdout is a file or a pipe too."""
    for file in (sys.stdout, sys.stderr):
        if file.isatty():
            yield file
            return
    with Path(os.ttyname(0)).open("w", encoding="utf-8") as terminal:
        yield terminal
