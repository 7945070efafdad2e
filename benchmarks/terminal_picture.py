"""A terminal's page as a picture, cell by cell. Needs Pillow, which matplotlib brings, and DejaVu Sans Mono."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.text import Text

_FOLDER = Path("/usr/share/fonts/truetype/dejavu")
_PAPER, _INK, _BLUE, _GREEN = (24, 26, 30), (214, 216, 220), (90, 170, 250), (130, 200, 110)


def draw(lines: Sequence[Text], columns: int, file: Path, size: int = 14) -> None:
    """Writes a PNG. size: of the letters, in pixels."""
    plain = ImageFont.truetype(_FOLDER / "DejaVuSansMono.ttf", size)
    bold = ImageFont.truetype(_FOLDER / "DejaVuSansMono-Bold.ttf", size)
    width, height = round(plain.getlength("x")), round(size * 1.3)
    picture = Image.new("RGB", (width * (columns + 2), height * (len(lines) + 1)), _PAPER)
    pen = ImageDraw.Draw(picture)
    console = Console(width=columns, force_terminal=True, color_system="truecolor")
    for row, line in enumerate(lines):
        column = 1
        for segment in Text("").join([line]).render(console):  # joined, its own style is one of a part
            style = segment.style
            colour = _colour(style.color) if style and style.color else _INK
            if style and style.dim:
                colour = tuple((part + 2 * paper) // 3 + 30 for part, paper in zip(colour, _PAPER, strict=True))
            for letter in segment.text:
                place = (column * width, row * height + height // 2)
                if "\u2800" <= letter <= "\u28ff":
                    _dots(pen, place, (width, height), ord(letter) - 0x2800, colour)
                else:
                    pen.text(place, letter, colour, bold if style and style.bold else plain)
                column += cell_len(letter)
    # Few colours: a small file.
    picture.quantize(32).save(file, optimize=True)


def _dots(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], cell: tuple[int, int], bits: int, colour: tuple[int, ...]
) -> None:
    """A braille letter, which the font lacks."""
    for bit, (x, y) in enumerate(((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))):
        if bits >> bit & 1:
            left, top = place[0] + cell[0] * (2 * x + 1) // 4, place[1] + cell[1] * (2 * y + 1) // 8
            pen.ellipse((left - 1, top - 1, left + 1, top + 1), fill=colour)


def _colour(colour: Color) -> tuple[int, int, int]:
    if colour.number == 12:
        return _BLUE
    if colour.number == 10:
        return _GREEN
    return tuple(colour.get_truecolor())
