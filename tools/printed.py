"""Pages of print with what they say: what builtin:reader learns from, and is measured on.

The faces are DejaVu's, which come with matplotlib.  A line is ``ROW`` pixels high.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono")
SIZES = (11, 12, 13)  # pixels
ROW, BASE, MARGIN = 16, 12, 7  # pixels: of a line, from its top to its base line, and left of it and right together
MADE, SHORT = 0.35, 0.5  # shares of pages of random characters, and of those with shorter lines
Gray = NDArray[np.uint8]  # [h, w]


class Printer:
    """Prints words, dark on light."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        basic = ImageFont.Layout.BASIC  # the same with any build of Pillow
        self.fonts = [
            ImageFont.truetype(folder / f"{face}.ttf", size, layout_engine=basic) for face in FACES for size in SIZES
        ]

    def page(self, words: list[str], columns: int, lines: int, plain: bool = False) -> tuple[Gray, str]:
        """Print a page -> uint8 [16 lines, 16 columns], and what it says.

        Args:
            words: to begin anywhere in.
            columns: sixteen pixels each.
            lines: of text.
            plain: always of these words, as wide as it gets.
        """
        font = self.random.choice(self.fonts)
        most = columns * ROW - MARGIN
        at = self.random.randrange(len(words) - 16 * lines)
        left = words[at : at + 16 * lines]
        if not plain and self.random.random() < MADE:
            left = [word for _ in range(lines) for word in self._gibberish()]
        if not plain and self.random.random() < SHORT:
            most = int(most * self.random.uniform(0.3, 1))
        said = []
        for _ in range(lines):
            count = self._fitting(left, font, most)
            if not count:  # a word that is too long is cut
                left[0] = left[0][: max(1, int(most / font.getlength(left[0]) * len(left[0])))]
                count = 1
            said.append(" ".join(left[:count]))
            left = left[count:]
        return self.printed(said, font, columns), "\n".join(said)

    def printed(self, said: list[str], font: ImageFont.FreeTypeFont, columns: int) -> Gray:
        """Print lines."""
        paper, ink = self.random.choice((255, self.random.randint(200, 255))), self.random.choice((0, 0, 40, 80))
        page = Image.new("L", (columns * ROW, len(said) * ROW), paper)
        draw = ImageDraw.Draw(page)
        left = self.random.randint(0, MARGIN - 1)
        for index, line in enumerate(said):
            draw.text((left, index * ROW + BASE), line, fill=ink, font=font, anchor="ls")
        return np.asarray(page)

    def _fitting(self, words: list[str], font: ImageFont.FreeTypeFont, most: int) -> int:
        """How many of the words go into ``most`` pixels."""
        text = ""
        for count, word in enumerate(words):
            text = f"{text} {word}" if text else word
            if font.getlength(text) > most:
                return count
        return len(words)

    def _gibberish(self) -> list[str]:
        """Random words: letters, numbers, signs."""
        kinds = (
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.ascii_letters,
            string.digits,
            string.ascii_letters + string.digits,
            string.printable[:94],
        )
        made = self.random
        return ["".join(made.choices(made.choice(kinds), k=made.randint(1, 8))) for _ in range(16)]


def parts(text: str) -> tuple[list[str], list[str]]:
    """Return the words of a text: what is trained on, and its last tenth, which is held out."""
    cut = text.index("\n\n", int(len(text) * 0.9))
    return text[:cut].split(), text[cut:].split()
