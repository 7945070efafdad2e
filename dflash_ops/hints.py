"""Commands that a message offers, made to go where the one that printed it went.

Whoever said -t or --inventory would else be sent to the default container. `addressed` is pure; `here` is what this
process's command line said, and `at` another container's turn, as --on has them one after another.
"""

import contextlib
import re
import shlex
from collections.abc import Generator

# The commands that take -t, of groups with the word behind.
_COMMAND = re.compile(
    r"\bdflash-ops (?:(?:train|env|gpu|ct) [a-z]+"
    r"|(?:deploy|releases|rollback|prune|put|get|gpu-status|doctor|exec|shell)(?![-\w]))"
)
_END = re.compile(r"[;,`()\n]|: |\bdflash-ops ")  # what a command's words do not reach beyond
_WHERE = re.compile(r"(?:^|\s)(?:-t|--target|--on)(?=[\s=]|$)")
_FILE = re.compile(r"(?:^|\s)--inventory(?=[\s=]|$)")

_target: str | None = None
_inventory: str | None = None


def addressed(text: str, target: str | None, inventory: str | None) -> str:
    """The text with ` -t TARGET` and ` --inventory FILE` in each of its commands of ours that takes them and does not
    say them. None adds nothing."""
    if target is None and inventory is None:
        return text
    added: list[tuple[int, str]] = []
    for found in _COMMAND.finditer(text):
        end = _END.search(text, found.end())
        words = text[found.end() : end.start() if end else len(text)]
        more = f" -t {shlex.quote(target)}" if target is not None and not _WHERE.search(words) else ""
        if inventory is not None and not _FILE.search(words):
            more += f" --inventory {shlex.quote(inventory)}"
        added.append((found.end(), more))
    for place, more in reversed(added):
        text = text[:place] + more + text[place:]
    return text


def here(text: str) -> str:
    """The text for the place that this process works at."""
    return addressed(text, _target, _inventory)


def of(name: str | None, text: str) -> str:
    """The text for another container; None: for no container."""
    return addressed(text, name, _inventory)


@contextlib.contextmanager
def at(name: str | None) -> Generator[None, None, None]:
    """What the block says is about this container. For the main thread, which alone shows values."""
    global _target
    before, _target = _target, name
    try:
        yield
    finally:
        _target = before


def said_target(name: str | None) -> None:
    """The command line's -t; None when it says none."""
    global _target
    _target = name


def said_inventory(file: str | None) -> None:
    """The command line's --inventory; None when it says none."""
    global _inventory
    _inventory = file
