"""``edgespec run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import at_terminal, conclude, drain, end, read_tools, template_options
from edgespec.cli.audio import audio_options, read_sound, transcribe
from edgespec.cli.batch import answer_file, read_input
from edgespec.cli.chat import Chat
from edgespec.cli.common import (
    COMMON,
    COUNT,
    OUTPUT,
    PATH,
    WORDS,
    GroupedCommand,
    adapters_option,
    emit_json,
    group,
    json_option,
    make_ready,
    make_settings,
    method_names,
    open_engine,
    option,
    prompt_cache_option,
    request_options,
)
from edgespec.cli.images import image_option, image_rows_option, read_images, require_sight, with_images
from edgespec.cli.line_editor import typing
from edgespec.cli.markdown import harmless, show
from edgespec.cli.produce import check_made, made_options, produce
from edgespec.cli.tool_calls import mcp_tools
from edgespec.cli.translate import joined, parts_of, write_lines
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result
    from edgespec.engine.stream import Stream
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image


@click.command("run", cls=GroupedCommand)
@click.argument("bundle", metavar="BUNDLE_OR_MODEL")
@group(
    COMMON,
    option(
        "--prompt",
        "Text to continue; with --chat a question, and the option may be repeated.  - reads stdin.",
        dest="prompts",
        multiple=True,
    ),
    option("--chat", "Chat with the model: ask by --prompt, by a pipe, or by typing.", bool),
    option(
        "--method",
        "Method of the bundle, plain, chain, or auto, which picks the fastest.  [default: auto]",
        callback=method_names,
    ),
    option(
        "--max-new-tokens",
        "Maximum number of new tokens.  [default: 128; answers of chats and texts of grammars run to their end]",
        COUNT,
    ),
    option(
        "--session",
        "File of a conversation: loaded if it exists, saved at the end.",
        click.Path(path_type=Path, dir_okay=False),
    ),
    prompt_cache_option,
    option("--beams", "Beam search with N beams, without drafting.", COUNT),
    option("--show-drafts", "Show accepted guesses in green and rejected ones in red.", bool),
)
@adapters_option
@request_options
@group("Pictures", image_option, image_rows_option)
@audio_options
@made_options
@group(
    "Many prompts",
    option(
        "--input",
        "JSONL: an object a line, with `prompt` or `messages`, perhaps `id` and `seed`; for an encoder-decoder also a "
        "text, line by line.",
        PATH,
    ),
    option("--output", "JSONL of the answers, in the same order.  Answers that it has already are kept.", PATH),
    option("--batch", "Sequences to decode together.", COUNT, 4),
)
@group(
    "Chat",
    option("--system", "System message of a chat."),
    option("--tools", "JSON file with functions that the model may call.", PATH),
    option(
        "--mcp",
        "Local MCP server with tools: its command, or a JSON file with mcpServers.  You are asked before each call.",
        multiple=True,
    ),
    option(
        "--template-option",
        "Option of the chat template, such as enable_thinking=false; may be repeated.",
        dest="template",
        multiple=True,
        metavar="KEY=VALUE",
    ),
)
@group(OUTPUT, option("--stats", "Print all statistics: method, acceptance, speed, work.", bool, dest="show_stats"))
@json_option
def command(bundle: str, prompts: tuple[str, ...], method: str | None, **options: Any) -> None:
    """Generate text from a bundle, or chat with it; text streams to stdout, one line about it goes to stderr.

    A model (folder, .gguf file, hub id, builtin:NAME) is pulled and exported first, in the fastest format that loses at
    most 1 % of perplexity and fits the memory, and found again the next time (`edgespec list`).  At a terminal a chat
    model without --prompt chats.

    A terminal shows the prompt before the text; a pipe gets only the text, and so does a request with a grammar.
    If a text with a grammar is cut before its end, the exit code is 3.  In a chat at a terminal, /help names the
    commands, /reset starts again, and /exit ends it.

    \b
    edgespec run demo --prompt "ROMEO:"
    edgespec run Qwen/Qwen2.5-0.5B-Instruct
    edgespec run demo --prompt "ROMEO:" --method self-spec --show-drafts
    edgespec run demo --prompt "ROMEO:" --method chain --set proposers=ngram,self-spec
    echo "Summarize: ..." | edgespec run demo --prompt - --json
    edgespec run demo --prompt "ROMEO:" --method ngram --ngram-store my-texts.store
    edgespec run my-chat-model --chat --template-option enable_thinking=false
    edgespec run my-chat-model --chat --session talk.session
    edgespec run my-chat-model --chat --prompt "What is a bundle?"
    echo "What is a bundle?" | edgespec run my-chat-model --chat
    edgespec run my-chat-model --mcp "uvx mcp-server-time"
    edgespec run HuggingFaceTB/SmolVLM2-500M-Video-Instruct --image photo.jpg --prompt "What is in the picture?"
    edgespec run openai/whisper-small --audio talk.mp3 --format srt > talk.srt
    edgespec run my-qwen-asr --audio talk.mp3 --chat --prompt "What is it about?"
    edgespec run builtin:glyphs --prompt "A serif" -o picture.png
    edgespec run my-orpheus --prompt "Hello there." --voice tara -o speech.wav
    edgespec run demo --input prompts.jsonl --output answers.jsonl --batch 8
    edgespec run facebook/nllb-200-distilled-600M --from ko --to en --prompt "..."
    edgespec run my-translator --input letter.txt --output brief.txt --batch 8
    """
    from edgespec.library import check_source
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.files.manifest import read_manifest

    check_source(bundle)  # a misspelled name is not about the prompt
    chat = options["chat"]
    if options["audio"] is not None and not chat:
        transcribe(bundle, prompts, method, options)
        return
    typed = _check(bundle, prompts, options)
    make_settings(method, options)  # what cannot be is refused before anything is loaded
    options["images"] = read_images(options["images"])
    if options["audio"] is not None:
        options["images"].append(Audio.open(read_sound(options["audio"])))
    texts = [] if typed or options["input"] else [_read_stdin() if text == "-" else text for text in prompts or "-"]
    by_line = options["input"] is not None and options["input"].suffix != ".jsonl" and str(options["input"]) != "-"
    asked = read_input(options["input"]) if options["input"] else []
    folder = make_ready(bundle, options)
    manifest = read_manifest(folder)
    template = manifest.tokenizer.chat_template
    check_made(manifest, options["made"], options)
    if typed and not chat and not template:
        raise click.UsageError("give --prompt TEXT: this model has no chat template")
    chat = chat or bool(options["images"] and template)  # text about a picture is an answer
    with typing() if typed else nullcontext():
        engine = open_engine(folder, options)
        if options["made"]:
            produce(engine, bundle, texts, method, options)
            return
        settings = make_settings(method, options, engine.defaults)
        for one in options["images"]:
            require_sight(engine, one.kind)
        if options["input"]:
            many = settings.changed(batch=options["batch"])
            if by_line and engine.inputs.sources is not None:
                write_lines(engine, options["input"], options["output"], many, options["as_json"])
                return
            answer_file(engine, asked, options["input"], options["output"], many, options["as_json"])
            return
        request = _Request(engine, bundle, settings, options)
        if chat or typed:
            request.chat(texts)
        else:
            request.complete(texts[0])


def _check(bundle: str, prompts: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Refuse options that do not fit together; gives whether questions are typed.

    Raises:
        click.UsageError: what does not fit is named.
        InvalidRequest: no prompt, and no such bundle or model, either: its name is what is wrong first.
    """
    from edgespec.library import require_known

    chat, as_json = options["chat"], options["as_json"]
    if (options["input"] is None) != (options["output"] is None):
        raise click.UsageError("--input and --output belong together")
    if options["input"] is not None:
        if chat or prompts or options["images"]:
            raise click.UsageError("--input has the prompts: leave --prompt, --image and --chat out")
        return False
    if not chat and not prompts and not options["images"] and (as_json or not at_terminal()):
        require_known(bundle)
        raise click.UsageError("give --prompt TEXT, --chat, or both")
    if len(prompts) > 1 and not chat:
        raise click.UsageError("several --prompt belong to --chat, which asks them in turn")
    typed = not prompts and at_terminal()
    if as_json and (typed or len(prompts) > 1):
        raise click.UsageError("--json prints one answer: give one --prompt TEXT, or pipe the question")
    if options["mcp"] and not typed:
        raise click.UsageError("--mcp needs a chat at a terminal, where you confirm each call")
    for name in ("system", "tools", "template"):
        if options[name] and not (chat or typed):
            raise click.UsageError(f"--{WORDS.get(name, name)} belongs to --chat")
    return typed


@dataclass(frozen=True)
class _Request:
    """A request, and the options of its command."""

    engine: Engine
    bundle: str
    settings: Settings
    options: dict[str, Any]

    def chat(self, texts: list[str]) -> None:
        """Answer the given questions, or otherwise typed ones."""
        engine, settings, options, session = self.engine, self.settings, self.options, self.options["session"]
        if settings.beams is not None:
            raise InvalidRequest("--beams does not work in a chat", "leave --beams out")
        kept = self._restored()
        first = [{"role": "system", "content": options["system"]}] if options["system"] else []
        if kept and first and kept[:1] != first:
            raise InvalidRequest(f"{session}: begun with another --system", "leave it out, or name another file")
        tools, template = read_tools(options["tools"]), template_options(options["template"])
        conversation = engine.conversation(kept or first, settings, tools=tools, template_options=template)
        # no template: report it before the first question
        hello = [*first, {"role": "user", "content": "hello"}]
        engine.codec.chat(hello, conversation.tools, options=conversation.options)
        switches = {"drafts": options["show_drafts"], "stats": options["show_stats"], "markdown": not texts}
        talk = Chat(engine, conversation, settings, {name for name, on in switches.items() if on})
        talk.images = options["images"]
        try:
            if not texts:
                with mcp_tools(options["mcp"]) as talk.tools:
                    if talk.tools is not None:
                        conversation.tools = [*(tools or ()), *talk.tools.schemas]
                    talk.talk()
            elif options["as_json"]:
                question = _question(texts[0], talk.images)
                stream = conversation.stream(with_images(talk.images, question))
                drain(stream)
                conversation.take(stream.result)
                self._end(stream.result, question)
            else:
                for text in texts:
                    end(engine, talk.ask(_question(text, talk.images)), settings)
        finally:
            if session is not None:
                conversation.save(session)

    def complete(self, text: str) -> None:
        """Continue a text; an encoder-decoder reads it and generates another one."""
        engine, settings, images = self.engine, self.settings, self.options["images"]
        self._restored()
        if engine.inputs.sources is not None:
            self._translate(text)
            return
        if settings.beams is not None:
            self._end(engine.generate(text, settings), text)
            return
        stream = engine.stream([*images, text] if images else text, settings)
        if not self.options["as_json"]:
            if engine.codec.chat_template is not None:
                hint = f"edgespec run {shlex.quote(self.bundle)} --chat"
                click.echo(f"this is a chat model; to talk to it: {hint}", err=True)
            if sys.stdout.isatty() and settings.grammar is None:
                click.echo(text, nl=False)
        self._show(stream, text)

    def _translate(self, text: str) -> None:
        """Write what an encoder-decoder makes of a text; one that is too long is cut into sentences."""
        engine, settings = self.engine, self.settings
        parts = parts_of(engine, text.rstrip("\r\n"), settings)
        if len(parts) > 1:
            click.echo(
                f"the text is longer than this model reads: it goes by sentences, in {len(parts)} parts", err=True
            )
        elif settings.beams is None and not self.options["as_json"]:
            self._show(engine.stream(parts[0], settings), text)
            return
        self._end(joined(engine.generate_batch(parts, settings)), text)

    def _show(self, stream: Stream, prompt: str) -> None:
        """Write a text as it is generated, and save its session."""
        if self.options["as_json"]:
            drain(stream)
        else:
            show(self.engine, stream, self.options["show_drafts"])
        if self.options["session"] is not None and self.engine.inputs.sources is None:
            self.engine.save_session(self.options["session"], stream.tokens, adapter=self.settings.adapter)
        self._end(stream.result, prompt, shown=True)

    def _end(self, result: Result, prompt: str, shown: bool = False) -> None:
        """Write a text, unless it was already shown, and the messages about it."""
        as_json = self.options["as_json"]
        if as_json:
            emit_json({"bundle": self.bundle, "prompt": prompt} | result.as_dict())
        else:
            if not shown:
                click.echo(harmless(result.text), color=True)
            conclude(self.engine, result, self.settings, self.options["show_stats"])
        end(self.engine, result, self.settings, told=not as_json)

    def _restored(self) -> list[dict[str, Any]]:
        """Load a saved session -> the messages of its conversation."""
        session = self.options["session"]
        return self.engine.restore_session(session) if session is not None and session.exists() else []


def _question(text: str, images: Sequence[Image | Audio]) -> str:
    """Strip the line end of `echo` from a question; a picture needs none."""
    if not text.strip() and not images:
        raise InvalidRequest("the question is empty", "give it with --prompt TEXT, or pipe it in")
    return text.rstrip("\r\n")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed, but the prompt is to be read from it", "give it with --prompt TEXT")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason}", "convert it to UTF-8") from error
