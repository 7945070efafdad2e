"""Words that a shell on their way might read as its own, and a place where such a reading would show."""

import random
import secrets
from collections.abc import Sequence

PER_COMMAND = 20


class Canary:
    """A file that is made if anything of a word is ever run, wherever that would be."""

    def __init__(self) -> None:
        self.path = f"/tmp/canary-{secrets.token_hex(6)}"

    def words(self) -> list[bytes]:
        run = f"touch {self.path}"
        forms = (
            "; {0}", "&& {0}", "|| {0}", "| {0}", "& {0} &", "$({0})", "`{0}`", "\n{0}\n", "\\\n{0}", "' ; {0} ; '",
            '"; {0}; "', "\\'; {0}; \\'", "'\"'\"'; {0}; '", "<({0})", ">{1}", "1>{1}", ">>{1}", "!{0}", "!!; {0}",
            "%s; {0}", "\\0073 {0}", "({0})", "a=`{0}`", "{{touch,{1}}}", "^a^{0}^", "-o;{0}", "\r{0}\r", "#\n{0}",
        )  # fmt: skip
        return [form.format(run, self.path).encode() for form in forms]


_ODD = (
    b"", b" ", b"-", b"--", b"-n", b"-c", b"--help", b"~", b"~root", b"*", b"?", b"[a-z]*", b"$HOME", b"${HOME}", b"$",
    b"$$", b"!", b"!!", b"!$", b"\\", b"\\\\", b"\\'", b"\\n", b"\\0101", b"%", b"%s", b"%self", b"%1", b"=ls", b"a=b",
    b"{a,b}", b"#", b"#a", b"'", b'"', b"''", b"`", b"\n", b"\n\n", b"a\n", b"\t", b"\r\n", b"\x01", b"\x1b[31m",
    b"\x7f", b"\x80", b"\xff", b"\xc3\xa9", b"\xc3", b"\xed\xa0\x80", b"\xef\xbf\xbd", b"\xf0\x9f\x98\x80",
    b"\x81\x82\x88", b"@", b"^", b"&", b"|", b";", b"(", b")", b"<", b">", b"x" * 4000, b"y\n" * 700,
)  # fmt: skip


def batch(number: int, canary: Canary) -> list[bytes]:
    """The words of one command: always the same for a number. Every third holds printable ASCII alone, less one
    of the two characters in it that need packing."""
    draw = random.Random(number)
    traps = canary.words()

    def word() -> bytes:
        chance = draw.random()
        if chance < 0.2:
            return draw.choice(traps)
        if chance < 0.5:
            return draw.choice(_ODD)
        some = draw.choice((range(1, 256), range(1, 256), range(32, 127), b"'\"\\!$`\n ;&|<>()*?~#%={}[]^-ab"))
        return bytes(draw.choices(some, k=draw.randint(0, 40)))

    words = [word() for _ in range(PER_COMMAND)]
    if number % 3:
        return words
    without = b"\\!"[number % 2]
    words[0] = b"a!!\\\\\\'"
    return [bytes(b for b in each if 32 <= b < 127 and b != without) for each in words]


def as_words(raw: Sequence[bytes]) -> list[str]:
    return [word.decode("utf-8", "surrogateescape") for word in raw]
