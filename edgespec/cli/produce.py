"""``edgespec run -o FILE``: what a model draws or speaks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import conclude, end
from edgespec.cli.common import GRAMMARS, PATH, emit_json, group, make_settings, option, refuse_beside
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result
    from edgespec.runtimes.files.manifest import Manifest

made_options = group(
    "Models that draw or speak",
    option("-o", "File of the picture or the speech: picture.png, speech.wav; - is stdout.", PATH, dest="made"),
    option("--voice", "Voice name.  [default: the model's first voice]"),
)
BESIDE = ("chat", "session", "input", "images", "system", "tools", "mcp", "template", "stop", "show_drafts", "beams",
          *GRAMMARS)  # fmt: skip


def check_made(manifest: Manifest, made: Path | None, options: dict[str, Any]) -> None:
    """Reject -o for text, a missing -o for pictures and speech, and options that do not fit.

    Raises:
        click.UsageError: it is named.
    """
    usual = "picture.png" if manifest.codes is not None and manifest.codes.image else "speech.wav"
    ending = usual[-4:]
    if (manifest.codes is None) != (made is None):
        raise click.UsageError("-o is only for image and speech models" if made else f"name a file: -o {usual}")
    if options.get("voice") and not (manifest.codes and manifest.codes.sound):
        raise click.UsageError("--voice is only for speech models")
    refuse_beside("-o", BESIDE if made else (), options)
    if made and made.suffix != ending and str(made) != "-":
        raise click.UsageError(f"-o {made}: expected a name that ends with {ending}, or -")
    if str(made) == "-" and options["as_json"]:
        raise click.UsageError("--json does not go with -o -: both would write to stdout")


def produce(engine: Engine, bundle: str, texts: Sequence[str], method: str | None, options: dict[str, Any]) -> None:
    """Write the file, and say how it was decoded."""
    if len(texts) != 1:
        raise click.UsageError("give one --prompt TEXT: the picture or the speech")
    text, made = texts[0], options["made"]
    more: dict[str, Any] = {}
    if engine.bundle.manifest.codes and engine.bundle.manifest.codes.image:
        text, settings = text.strip(), make_settings(method, options, engine.defaults)
        drawing = engine.draw(text, settings)
        _write(made, drawing.png())
        height, width, _ = drawing.pixels.shape
        what, result = f"{width} x {height} pixels", drawing.result
    else:
        settings = make_settings(method, options, engine.speaking)
        seconds, result = _speak(engine, text.rstrip("\r\n"), options["voice"], settings, made)
        what, more = f"{seconds:.1f} s of speech", {"seconds": seconds}
    if options["as_json"]:
        emit_json({"bundle": bundle, "prompt": text, "file": str(made)} | more | result.as_dict())
    else:
        click.echo(f"{made}: {what}", err=True)
        conclude(engine, result, settings, options["show_stats"])
    end(engine, result, settings)


def _write(file: Path, data: bytes) -> None:
    if str(file) == "-":
        sys.stdout.buffer.write(data)
        return
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be written: {error.strerror}", "name another file") from error


def _speak(engine: Engine, text: str, voice: str | None, settings: Settings, made: Path) -> tuple[float, Result]:
    """Write a WAV file, or a stream of one to stdout -> its seconds, and how its codes were decoded."""
    from edgespec.runtimes.audio.spoken import pcm, wav_header

    speech, pieces, live = engine.speak(text, voice, settings), [], str(made) == "-"
    stdout = sys.stdout.buffer
    if live:
        stdout.write(wav_header(speech.rate))
    try:
        for piece in speech:
            pieces.append(pcm(piece))
            if live:
                stdout.write(pieces[-1])
                stdout.flush()
    except KeyboardInterrupt:
        speech.close()
    samples = sum(map(len, pieces)) // 2
    if not live:
        _write(made, wav_header(speech.rate, samples) + b"".join(pieces))
    return samples / speech.rate, speech.result
