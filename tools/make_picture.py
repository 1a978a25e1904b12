"""The README's picture: a text as `edgespec run --show-drafts` shows it, as an SVG.

python tools/make_picture.py BUNDLE -o docs/drafts.svg
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from edgespec.cli.answer import summary
from edgespec.cli.markdown import colored
from edgespec.engine.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--prompt", default="KING RICHARD III:\nWhat")
    parser.add_argument("--method", default="self-spec")
    arguments = parser.parse_args()
    engine = load(arguments.bundle)
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
    command = (
        f"edgespec run {arguments.bundle.name} --prompt ... --method {arguments.method} --no-fallback --show-drafts"
    )
    console.print(Text(f"$ {command}", style="dim"))
    console.print(Text(arguments.prompt), end="")
    stream = engine.stream(arguments.prompt, method=arguments.method, max_new_tokens=80, fallback=False)
    for chunk in stream:
        console.print(colored(engine, stream, chunk) if chunk.round else Text(chunk.text), end="")
    console.print()
    console.print(Text(summary(stream.result), style="dim"))
    picture = console.export_svg(title="edgespec: accepted guesses green, refused ones red")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)  # no fonts from elsewhere
    arguments.output.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
