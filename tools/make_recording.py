"""A recording of commands in a terminal, and a moving picture of it.

    python tools/make_recording.py record docs/first.cast 'edgespec export ...' 'edgespec run ...'
    python tools/make_recording.py chat docs/chat.cast "pip install -e '.[export]'" 'edgespec run ./model' --type /exit
    python tools/make_recording.py picture docs/first.cast docs/first.svg

The recording is an asciicast (version 2): what the commands write, with the time of each piece.  The picture leaves out
colors, cuts pauses beyond --idle, and shows the true time at every command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from html import escape
from pathlib import Path
from time import perf_counter

WIDTH, ROWS = 100, 30
LINE, LETTER = 18, 8.4  # pixels
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
Event = tuple[float, str]


def record(output: Path, commands: list[str]) -> None:
    """Run commands one after the other and write down what they say."""
    events: list[Event] = []
    start = perf_counter()
    for command in commands:
        events.append((perf_counter() - start, f"$ {command}\r\n"))
        with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
            assert ran.stdout is not None
            events += [(perf_counter() - start, line.rstrip("\n") + "\r\n") for line in ran.stdout]
    events.append((perf_counter() - start, "$ "))
    _write(output, events)


def record_chat(output: Path, commands: list[str], typed: list[str]) -> None:
    """Run commands, the last in a terminal, where lines are typed into it, each after its prompt ``you>``."""
    import pty

    *before, command = commands
    events: list[Event] = [(0.0, f"$ {line}\r\n") for line in before]  # only shown: they were run before
    start = perf_counter()
    events.append((0.0, f"$ {command}\r\n"))
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": str(WIDTH), "PROMPT_TOOLKIT_NO_CPR": "1"}
    with subprocess.Popen(command, shell=True, stdin=slave, stdout=slave, stderr=slave, env=environment) as ran:
        os.close(slave)
        text, left = "", list(typed)
        while True:
            try:
                piece = os.read(master, 65536).decode("utf-8", "replace")
            except OSError:  # the command closed its terminal
                break
            text += _CONTROL.sub("", piece)
            *lines, text = text.split("\n")
            at = perf_counter() - start
            for line in lines:
                # what was redrawn in place counts as it was left
                shown = line.rstrip("\r").rpartition("\r")[2].replace("you>you>", "you>")
                events.append((at, f"{shown}\r\n"))
            if text.startswith("you>") and left:
                os.write(master, f"{left.pop(0)}\r".encode())
                text = ""
        assert ran.wait() == 0
    os.close(master)
    _write(output, events)


def _write(output: Path, events: list[Event]) -> None:
    header = {"version": 2, "width": WIDTH, "height": ROWS}
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in events)]
    output.write_text("\n".join(lines) + "\n", "utf-8")


def picture(recording: Path, idle: float, hold: float) -> str:
    """Give the SVG of a recording; the end stays for ``hold`` seconds, and then it begins again."""
    first, *rest = recording.read_text("utf-8").splitlines()
    header = json.loads(first)
    lines, now, before = [], 0.0, 0.0
    for at, _, text in map(json.loads, rest):
        now += min(idle, at - before)
        before = at
        for line in _CONTROL.sub("", text).removesuffix("\r\n").split("\r\n"):
            lines.append((now, line, f"{at:.1f} s" if line.startswith("$ ") else ""))
    total = now + hold
    rows = min(ROWS, len(lines))
    width, height = round(WIDTH * LETTER) + 24, rows * LINE + 24
    shown = "".join(_line(number, *line, total) for number, line in enumerate(lines))
    scrolls = [(at, number + 1 - rows) for number, (at, _, _) in enumerate(lines) if number >= rows]
    values = ";".join(["0 0", *(f"0 {-up * LINE}" for _, up in scrolls)])
    times = ";".join(["0", *(f"{at / total:.4f}" for at, _ in scrolls)])
    how = f'calcMode="discrete" dur="{total:.2f}s" repeatCount="indefinite"'
    scroll = (
        f'<animateTransform attributeName="transform" type="translate" values="{values}" keyTimes="{times}" {how}/>'
    )
    title = escape(header.get("title", "edgespec"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="monospace" '
        f'font-size="14">'
        f'<title>{title}</title><rect width="{width}" height="{height}" rx="6" fill="#0d1117"/>'
        f'<svg x="12" y="12" width="{width - 24}" height="{height - 24}" overflow="hidden">'
        f"<g>{scroll}{shown}</g></svg></svg>\n"
    )


def _line(number: int, at: float, text: str, clock: str, total: float) -> str:
    """Make a line that appears at its time."""
    y = number * LINE + 14
    color = "#7ee787" if clock else "#c9d1d9"
    appear = (
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{at / total:.4f}" calcMode="discrete" '
        f'dur="{total:.2f}s" repeatCount="indefinite"/>'
        if at
        else ""
    )
    end = f'<text x="{round(WIDTH * LETTER)}" y="{y}" text-anchor="end" fill="#8b949e">{clock}</text>' if clock else ""
    room = WIDTH - 9 if clock else WIDTH
    text = text if len(text) <= room else text[: room - 3] + "..."
    return f'<g>{appear}<text y="{y}" fill="{color}" xml:space="preserve">{escape(text)}</text>{end}</g>'


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    recorded = kinds.add_parser("record")
    recorded.add_argument("output", type=Path)
    recorded.add_argument("commands", nargs="+")
    chat = kinds.add_parser("chat")
    chat.add_argument("output", type=Path)
    chat.add_argument("commands", nargs="+", help="the last is a chat; those before it are shown only")
    chat.add_argument("--type", action="append", default=[], help="a line for the chat; may be repeated")
    drawn = kinds.add_parser("picture")
    drawn.add_argument("recording", type=Path)
    drawn.add_argument("output", type=Path)
    drawn.add_argument("--idle", type=float, default=3.0, help="longest pause, in seconds")
    drawn.add_argument("--hold", type=float, default=8.0, help="seconds that the end stays")
    arguments = parser.parse_args()
    if arguments.kind == "record":
        record(arguments.output, arguments.commands)
    elif arguments.kind == "chat":
        record_chat(arguments.output, arguments.commands, arguments.type)
    else:
        arguments.output.write_text(picture(arguments.recording, arguments.idle, arguments.hold), "utf-8")


if __name__ == "__main__":
    main()
