"""``edgespec run --audio``: a recording to text or subtitles."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    GRAMMARS,
    emit_json,
    group,
    make_ready,
    make_settings,
    open_engine,
    option,
    refuse_beside,
)
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import EXPORT_FORMATS

if TYPE_CHECKING:
    from edgespec.engine.transcript import TextFormat, Transcript
    from edgespec.engine.transcription import TranscriptionSettings

FORMS = ["txt", "srt", "vtt", "json"]

audio_options = group(
    "Sound",
    option(
        "--audio",
        "A recording to transcribe, or with --chat to ask about: wav, flac, ogg, mp3, m4a or webm; - is stdin.",
        metavar="FILE",
    ),
    option("--language", "Language of the recording, for example en.  [default: detected]"),
    option("--task", "Transcribe, or translate into English.", ["transcribe", "translate"], "transcribe"),
    option("--timestamps/--no-timestamps", "Whether segments have times.", default=True),
    option(
        "--format",
        f"Format of the transcript: {', '.join(FORMS)}; or of the weights of a MODEL: {', '.join(EXPORT_FORMATS)}.  "
        "[default: txt, and weights that keep the quality]",
        [*FORMS, *EXPORT_FORMATS],
        dest="form",
    ),
)


def transcribe(bundle: str, prompts: tuple[str, ...], method: str | None, options: dict[str, Any]) -> None:
    """Transcribe one recording; segments stream to stdout, one line about it goes to stderr."""
    from edgespec.engine.transcript import written

    beside = ("session", "input", "output", "system", "tools", "mcp", "template", "stop", "show_drafts")
    refuse_beside("--audio", beside, options)
    if any(options[name] for name in GRAMMARS):
        raise click.UsageError("a grammar does not go with --audio: transcripts follow the model's own rules")
    if len(prompts) > 1:
        raise click.UsageError("give one --prompt: words before the recording")
    make_settings(method, options)  # what cannot be is refused before anything is loaded
    asked, sound = _asked(prompts, options), read_sound(options["audio"])
    as_json = options["as_json"]
    form: TextFormat = "json" if as_json else options["form"] if options["form"] in FORMS else "txt"
    folder = make_ready(bundle, options)
    begun = time.perf_counter()
    with open_engine(folder, options) as engine:
        running = engine.transcription(sound, asked, make_settings(method, options, engine.defaults))
        if form == "vtt":
            click.echo("WEBVTT\n")
        try:
            for number, segment in enumerate(running, 1):
                if form != "json":
                    click.echo(written(segment, form, number), nl=False)
        except KeyboardInterrupt:
            running.close()
            sys.exit(130)
        found = running.transcript
    if as_json:
        emit_json({"bundle": bundle, "audio": options["audio"]} | found.as_dict())
    elif form == "json":
        click.echo(found.write("json"), nl=False)
    click.echo(summary(found, time.perf_counter() - begun), err=True)
    sure = found.language_probability
    if sure is not None and sure < asked.language_detection_threshold:
        click.echo(f"the language is a guess ({found.language}, {sure:.0%} sure): name it with --language", err=True)


def summary(found: Transcript, seconds: float) -> str:
    """One line: how much sound in how much time, its language, and how its text was decoded."""
    how = found.how
    parts = [f"{found.duration:.1f} s of sound in {seconds:.1f} s"]
    if found.language is not None:
        sure = found.language_probability
        parts.append(found.language if sure is None else f"{found.language} ({sure:.0%} sure)")
    parts.append(f"{how.get('tokens', 0)} tokens in {how.get('rounds', 0)} passes")
    if how.get("drafted"):
        parts.append("same text" if how["exact"] else "lossless" if how["lossless"] else "lossy as asked for")
    return ", ".join(filter(None, [*parts, how.get("method_used")]))


def _asked(prompts: tuple[str, ...], options: dict[str, Any]) -> TranscriptionSettings:
    from edgespec.engine.transcription import TranscriptionSettings

    asked = TranscriptionSettings(
        language=options["language"],
        task=options["task"],
        timestamps=options["timestamps"],
        initial_prompt=prompts[0] if prompts else None,
    )
    temperature = options["temperature"]
    return asked.changed(temperatures=(temperature,)) if temperature else asked


def read_sound(name: str) -> Path | bytes:
    """Return the file that ``--audio`` names, or what stdin holds for ``-``."""
    if name != "-":
        return Path(name)
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed, but the recording is to be read from it", "give --audio FILE")
    return sys.stdin.buffer.read()
