"""A chat at a terminal: lines that are edited, commands, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import conclude, template_value
from edgespec.cli.common import print_table, progress
from edgespec.cli.images import read_images, require_sight, text_of, with_images
from edgespec.cli.line_editor import asking, expect_pastes, gather, line_editor
from edgespec.cli.markdown import cleaned, show
from edgespec.cli.method_settings import NAMES, read_setting
from edgespec.cli.method_settings import apply as apply_settings
from edgespec.cli.tool_calls import Call, Tools, answer_shape, read_answer
from edgespec.errors import EdgespecError, InvalidRequest, unknown_name

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from edgespec.decoding.settings import Settings
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image

SWITCHES = {
    "drafts": "accepted guesses green, rejected ones red",
    "markdown": "headings, lists and code as they are meant",
    "stats": "all figures after an answer",
}
BENCH_TOKENS, BENCH_REPEATS = 48, 3
MOST_CALLS = 16  # rounds of calls that one question may cause


@dataclass(frozen=True)
class Command:
    """A command of a chat: its argument, help text, function, and required value."""

    usage: str
    what: str
    run: Callable[[Chat, str], None]
    needs: str = ""
    example: str = ""


@dataclass
class Chat:
    """A conversation whose questions are typed."""

    engine: Engine  # what answers
    conversation: Conversation  # with the messages so far
    settings: Settings  # of the next answers
    shown: set[str]  # names of ``SWITCHES`` that are on
    tools: Tools | None = None  # tools that the model may call; None = none
    images: list[Image | Audio] = field(default_factory=list)  # and recordings, that go along with the next question
    ended: bool = False
    typed: bool = False

    def talk(self) -> None:
        """Answer what is typed until the chat is ended."""
        self.typed = True
        asked = [text_of(message["content"]) for message in self.conversation.messages if message.get("role") == "user"]
        click.echo("/help lists the commands; Alt-Enter begins a new line", err=True)
        pressed = False  # Ctrl-C, and nothing since
        with line_editor(asked, self.complete) as editor:
            if self.tools is not None:
                self.tools.ask = partial(_ask_line, editor)
            while not self.ended:
                try:
                    gather(editor)
                    # made once for each line: to count tokens the whole conversation is written by its template
                    text = editor.prompt("you> ", bottom_toolbar=self.status())
                except EOFError:
                    return
                except KeyboardInterrupt:
                    if pressed:
                        return
                    pressed = True
                    click.echo("Ctrl-C again, Ctrl-D or /exit ends the chat", err=True)
                    continue
                pressed = False
                expect_pastes(editor)
                if text.strip():
                    self.take(text)

    def take(self, text: str) -> None:
        """Run a command, or ask a question; errors are printed, and the chat continues."""
        word, _, rest = text.strip().partition(" ")
        try:
            if (command := COMMANDS.get(word)) is not None:
                if command.needs and not rest.strip():
                    raise InvalidRequest(f"{word}: expected {command.needs}", f"as in {word} {command.example}")
                command.run(self, rest.strip())
            elif word.startswith("/") and "/" not in word[1:]:
                raise unknown_name("command", word, COMMANDS)
            else:
                self.ask(text.rstrip("\r\n"))
        except EdgespecError as error:
            click.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)

    def ask(self, question: Any) -> Result:
        """Ask one question with its pictures, and show the answer and its statistics.

        Raises:
            InvalidRequest: the template refuses it, or it has no room.
        """
        asked = with_images(self.images, question) if isinstance(question, str) else question
        result, calls = self._answer(asked, self.settings)
        self.images = []
        for _ in range(MOST_CALLS):
            if not calls or self.tools is None or result.finish == "cancelled":
                break
            self._call(calls)
            result, calls = self._answer(None, self.settings)
        return result

    def _call(self, calls: list[Call]) -> None:
        """Run calls; Ctrl-C stops them all, and each has an answer all the same: templates expect one."""
        assert self.tools is not None
        stopped = False
        for call in calls:
            said = "The user stopped this call."
            if not stopped:
                try:
                    said = self.tools.answer(call)
                except KeyboardInterrupt:
                    stopped = True
            message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}
            self.conversation.messages.append(message)
        if stopped:
            raise KeyboardInterrupt

    def _answer(self, question: Any, settings: Settings) -> tuple[Result, list[Call]]:
        """Answer once -> the result, and the calls in it."""
        conversation, before = self.conversation, self.conversation.left_out
        calls: list[Call] = []
        shape = None
        if self.tools is not None:
            shape = answer_shape(self.engine.codec, conversation, question)
            settings = settings.changed(markers=tuple(self.engine.codec.special_ids(shape.markers)))
        conversation.settings = settings
        stream = conversation.stream(question)
        if conversation.left_out > before:
            left = conversation.left_out
            click.echo(f"the context is full: the oldest {left} messages are not seen now", err=True)
        if shape is None:
            show(self.engine, stream, "drafts" in self.shown, "markdown" in self.shown)
            conversation.take(stream.result)
        else:
            text, calls = read_answer(stream, shape)
            said: dict[str, Any] = {"role": "assistant", "content": text}
            conversation.messages.append(said | ({"tool_calls": [one.as_message() for one in calls]} if calls else {}))
        conclude(self.engine, stream.result, settings, "stats" in self.shown, self.typed)
        return stream.result, calls

    def status(self) -> str:
        """Say how the next answer is made, and how full the context is."""
        used = f"{self.conversation.tokens()} of {self.engine.context} tokens"
        return f" {self.settings.method or 'auto'}   {used}   /help "

    def complete(self, text: str) -> Iterable[str]:
        """Words that may replace the last one of a command."""
        command, space, rest = text.partition(" ")
        if not command.startswith("/"):
            return ()
        if not space:
            return [name for name in COMMANDS if name.startswith(command)]
        words: Iterable[str] = ()
        if command == "/method":
            words = self._methods()
        elif command == "/set" and " " not in rest:
            words = sorted({*SETTABLE, *NAMES, *SWITCHES})
        elif command in ("/save", "/load", "/image", "/audio"):
            folder = Path(rest).expanduser() if rest.endswith(("/", "~")) else Path(rest).expanduser().parent
            words = (str(path) for path in sorted(folder.glob("*"))) if folder.is_dir() else ()
        return [word for word in words if word.startswith(rest.rpartition(" ")[2])]

    # -- commands ------------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        for name, command in COMMANDS.items():
            click.echo(f"  {f'{name} {command.usage}':<22}{command.what}", err=True)
        click.echo("Alt-Enter begins a new line, Ctrl-R searches what was asked, Ctrl-C stops an answer", err=True)

    def _system(self, text: str) -> None:
        messages = self.conversation.messages
        first = next(iter(messages), {})
        if not text:
            click.echo(first["content"] if first.get("role") == "system" else "no system message", err=True)
            return
        self.conversation.messages = [{"role": "system", "content": text}, *self._turns()]

    def _turns(self) -> list[dict[str, Any]]:
        return [message for message in self.conversation.messages if message.get("role") != "system"]

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ", 1).partition(" ")
        if not name:
            self._show_settings()
        elif name in SWITCHES:
            if value not in ("on", "off"):
                raise InvalidRequest(f"/set {name} {value}".rstrip() + ": expected on or off")
            (self.shown.add if value == "on" else self.shown.discard)(name)
        elif name in NAMES:
            try:
                self.settings = apply_settings(self.settings, dict([read_setting(f"{name}={value.strip()}")]))
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        elif (known := name.replace("-", "_")) in SETTABLE:
            if not (given := value.strip()):
                self._show_setting(known)
                return
            own = given == "default"
            changed = self._setting(known, self.engine.defaults) if own else template_value(given)
            self.settings = self.settings.changed(**{known: changed})
        else:
            raise unknown_name("setting", name, {*SETTABLE, *NAMES, *SWITCHES})

    def _show_settings(self) -> None:
        for name in SETTABLE:
            self._show_setting(name)
        for name, what in SWITCHES.items():
            click.echo(f"  {name:<20}{'on' if name in self.shown else 'off':<10}{what}", err=True)
        click.echo(f"and settings of one method: {', '.join(NAMES)}", err=True)

    def _show_setting(self, name: str) -> None:
        value = self._setting(name, self.settings)
        click.echo(f"  {name:<20}{'default' if value is None else value}", err=True)

    @staticmethod
    def _setting(name: str, settings: Settings) -> Any:
        if name == "accept":
            return settings.accept.rule
        return getattr(settings.sampling if hasattr(settings.sampling, name) else settings, name)

    def _methods(self) -> list[str]:
        return [*self.engine.methods, "auto"]

    def _method(self, name: str) -> None:
        if name:
            self.engine.choose(name)
            self.settings = self.settings.changed(method=name)
            return
        for known in self._methods():
            mark = "*" if known == (self.settings.method or "auto") else " "
            click.echo(f"{mark} {known}", err=True)

    def _save(self, name: str) -> None:
        self.conversation.save(Path(name).expanduser())
        click.echo(f"saved {_count(len(self.conversation.messages), 'message')} in {name}", err=True)

    def _load(self, name: str) -> None:
        self.conversation.messages = self.engine.restore_session(Path(name).expanduser())
        for message in self._turns():
            click.echo(
                f"{'you> ' if message['role'] == 'user' else ''}{cleaned(text_of(message['content']))}", err=True
            )

    def _regenerate(self, _: str) -> None:
        messages = list(self.conversation.messages)
        question = self.conversation.undo()
        if question is None:
            raise InvalidRequest("nothing was asked yet")
        if self.settings.sampling.greedy:
            click.echo("greedy decoding gives the same answer again: /set temperature 0.8 gives others", err=True)
        elif self.settings.sampling.seed is not None:
            self.settings = self.settings.changed(seed=self.settings.sampling.seed + 1)
        try:
            self.ask(question)
        except BaseException:
            self.conversation.messages = messages
            raise

    def _undo(self, _: str) -> None:
        question = self.conversation.undo()
        click.echo("nothing was asked yet" if question is None else f"forgotten: {text_of(question)}", err=True)

    def _tokens(self, _: str) -> None:
        conversation = self.conversation
        seen = len(conversation.messages) - conversation.left_out
        left = f", {conversation.left_out} are not seen any more" if conversation.left_out else ""
        used = f"{conversation.tokens()} of {self.engine.context} tokens"
        click.echo(f"{used}, {_count(seen, 'message')}{left}", err=True)

    def _bench(self, _: str) -> None:
        """Compare the methods on the last question, with the conversation before it."""
        from edgespec.drafters.registry import AR
        from edgespec.reports.bench import bench_all

        last = max((at for at, one in enumerate(self.conversation.messages) if one.get("role") == "user"), default=None)
        if last is None:
            raise InvalidRequest("nothing was asked yet", "/bench compares the methods on the last question")
        conversation = self.conversation
        prompt = self.engine.chat_prompt(
            conversation.messages[: last + 1], conversation.tools, options=conversation.options
        )
        entry = self.engine, [name for name in self.engine.methods if name != AR]
        settings = self.settings.changed(max_new_tokens=BENCH_TOKENS, temperature=0.0)
        with progress() as report:
            found = bench_all([entry], [prompt], settings, BENCH_REPEATS, progress=partial(report, "bench"))
        rows = [
            (
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x",
                f"{row['tokens_per_round']:.2f}",
                f"{row['same_text']}/{row['runs']}",
            )
            for row in (one.as_dict() for one in found)
        ]
        print_table(("method", "tokens/s", "speed-up", "tokens/round", "same text"), rows)

    def _image(self, name: str) -> None:
        require_sight(self.engine)
        self.images += read_images([Path(name).expanduser()])
        click.echo(f"{_count(len(self.images), 'picture')} in front of your next question", err=True)

    def _audio(self, name: str) -> None:
        from edgespec.runtimes.audio.audio import Audio

        require_sight(self.engine, "audio")
        self.images.append(Audio.open(Path(name).expanduser()))
        click.echo(f"{_count(len(self.images), 'recording')} in front of your next question", err=True)

    def _reset(self, _: str) -> None:
        self.conversation.messages = [one for one in self.conversation.messages if one.get("role") == "system"]
        self.images = []

    def _exit(self, _: str) -> None:
        self.ended = True


def _ask_line(editor: PromptSession[str], question: str) -> str:
    """Ask for a line; keys that came before the question are not its answer, but of the next message."""
    gather(editor)
    with asking():
        return str(click.prompt(question, default="n", show_default=False, prompt_suffix="", err=True))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


COMMANDS = {
    "/help": Command("", "list these commands", Chat._help),
    "/system": Command("[TEXT]", "show or replace the system message", Chat._system),
    "/set": Command("[NAME VALUE]", "show or change settings, as in /set temperature 0.8", Chat._set),
    "/method": Command("[NAME]", "show or choose the method", Chat._method),
    "/regenerate": Command("", "answer the last question again", Chat._regenerate),
    "/undo": Command("", "forget the last question and its answer", Chat._undo),
    "/tokens": Command("", "say how full the context is", Chat._tokens),
    "/bench": Command("", "compare the methods on the last question", Chat._bench),
    "/save": Command(
        "FILE", "keep the conversation and its cache in a file", Chat._save, "a file to write", "talk.session"
    ),
    "/load": Command(
        "FILE", "continue a saved conversation", Chat._load, "a file of /save or --session", "talk.session"
    ),
    "/image": Command(
        "FILE", "put a picture in front of the next question", Chat._image, "a picture's file", "photo.jpg"
    ),
    "/audio": Command(
        "FILE", "put a recording in front of the next question", Chat._audio, "a recording's file", "talk.mp3"
    ),
    "/reset": Command("", "forget the conversation; the system message stays", Chat._reset),
    "/exit": Command("", "end the chat; Ctrl-D does as well, and Ctrl-C twice", Chat._exit),
}
SETTABLE = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_new_tokens", "stop", "gamma",
    "fallback", "acceptance", "accept",
)  # fmt: skip
