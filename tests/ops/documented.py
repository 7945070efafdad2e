"""What docs/programs.md tells of each JSON document, and how what a program wrote differs from it.

A field is told by a point: `name`, `name`: what it is. Where it holds objects, what it is begins with a section's name
("Run", "list of Run", "null, or Run"), or names their fields in backticks. "by name, ..." is a mapping of such.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

TEXT = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()

OPEN = "and the keys of"
"""What says of an object that it has fields beside those that are named."""

Fields = Mapping[str, str]
"""By name, what a field is."""


def points(text: str) -> dict[str, str]:
    """The fields that one point tells of."""
    names, _, what = text.partition(":")
    return dict.fromkeys(re.findall(r"`([^`]+)`", names), what.strip())


def _sections() -> dict[str, Fields]:
    found: dict[str, Fields] = {}
    for section in TEXT.split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        told = re.findall(r"^- (.*)$", body.partition("\n#")[0], re.MULTILINE)
        found[name] = {field: what for point in told for field, what in points(point).items()}
    return found


SECTIONS = _sections()


def _commands() -> dict[tuple[str, ...], str]:
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", TEXT, re.MULTILINE)
    return {tuple(command.split()): cell for named, cell in rows for command in re.findall(r"`(.*?)`", named)}


COMMANDS = _commands()
"""By words and options, what their document is."""


def command_of(words: Sequence[str]) -> tuple[str, ...] | None:
    """The command of a command line, as the table names it."""
    found: list[tuple[int, int, tuple[str, ...]]] = []
    for command in COMMANDS:
        plain = [word for word in command if not word.startswith("--")]
        places = [at for at in range(len(words)) if list(words[at : at + len(plain)]) == plain]
        if places and all(word in words for word in command):
            found.append((places[0], -len(command), command))
    return min(found)[2] if found else None


def document_of(command: tuple[str, ...], words: Sequence[str]) -> Fields:
    """The fields of what a command line prints, of one container."""
    fields: dict[str, str] = {}
    for part in COMMANDS[command].split("; "):
        chosen = re.fullmatch(r"with ((?:`--[a-z-]+`(?: or )?)+) (also )?(.*)", part)
        if chosen is None:
            fields |= _of(part)
        elif set(re.findall(r"`(.*?)`", chosen[1])) & set(words):
            fields = {**(fields if chosen[2] else {}), **_of(chosen[3])} if _of(chosen[3]) else fields
    return fields


def _of(part: str) -> Fields:
    if part.startswith("`"):
        return points(part)
    return SECTIONS.get(re.split(r"\W", part)[0], {})


def compare(words: Sequence[str], printed: str) -> list[str]:
    """In what the documents that a command line printed differ from what is told of them."""
    words = words[: words.index("--")] if "--" in words else words
    command = command_of(words)
    if command is None:
        return [f"{' '.join(words)} is in no row of the table"]
    fields, many = document_of(command, words), any(word.split("=")[0] == "--on" for word in words)
    found: list[str] = []
    for line in printed.split("\n"):
        if not line:
            continue
        document: dict[str, Any] = json.loads(line)
        if document.get("schema_version") != 1:
            found.append(f"{command}: its schema_version is {document.get('schema_version')}")
        if command == ("train", "logs"):
            found += _log_line(document, many=many)
        elif many and not (command[0].startswith("gpu") and "--all" in command):
            outcomes = {"results": "list of Outcome"}
            found += _differences(document, outcomes, " ".join(command), {"Outcome.value": fields})
        else:
            found += _differences(document, fields, " ".join(command), {})
    return found


def confirm(words: Sequence[str | bytes], printed: bytes) -> None:
    """What a command line printed, with --json, is what is told of it."""
    told = [word.decode(errors="replace") if isinstance(word, bytes) else word for word in words]
    if "--json" in (told[: told.index("--")] if "--" in told else told):
        assert not (found := compare(told, printed.decode())), "\n".join(["docs/programs.md:", *found])


def _log_line(document: Mapping[str, Any], *, many: bool) -> Iterator[str]:
    """A line, and at last the run or what went wrong."""
    (told,) = [name for name in ("line", "run", "error") if name in document and (many or name != "error")] or [""]
    if told not in document:
        yield f"a line of train logs has {', '.join(document)}"
        return
    ends = {"run": "Run", "error": SECTIONS["Outcome"]["error"], "line": ""}
    more = {"container": ""} if many else {}
    yield from _differences(document, {told: ends[told], **more}, "train logs", {})


def _differences(value: Mapping[str, Any], fields: Fields, where: str, special: Mapping[str, Fields]) -> Iterator[str]:
    """special: fields of objects, by where they are, which the text alone does not tell."""
    fields = {name: what for name, what in fields.items() if name != "schema_version"}
    there = [name for name in value if name != "schema_version"]
    yield from (f"{where} has {name}, which is not told" for name in there if name not in fields)
    yield from (f"{where} has no {name}, which is told" for name in fields if name not in value)
    for name in there:
        if name in fields:
            yield from _held(value[name], fields[name], f"{where}.{name}", name, special)


def _held(value: Any, what: str, where: str, name: str, special: Mapping[str, Fields]) -> Iterator[str]:
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _held(item, what, where, name, special)
    if not isinstance(value, dict):
        return
    held = cast(dict[str, Any], value)
    if inherited := re.fullmatch(r"as in (\w+)", what):
        what = SECTIONS[inherited[1]][name]
    section = re.match(r"(?:null, or )?(?:list of )?([A-Z]\w+)\b", what)
    if what == SECTIONS["Outcome"]["value"] and where.endswith("results.value"):
        yield from _differences(held, special["Outcome.value"], where, {})
    elif section and section[1] in SECTIONS:
        yield from _differences(held, SECTIONS[section[1]], where, special)
    elif what.startswith("by "):
        for item in held.values():
            yield from _held(item, what.partition(", ")[2], f"{where}[]", name, special)
    elif names := re.findall(r"`([^`]+)`", what.partition(":")[0] if what.startswith("list of") else what):
        more = {it: "by any name" for it in held} if OPEN in what else {}
        yield from _differences(held, {**more, **dict.fromkeys(names, "")}, where, special)
    else:
        yield f"{where} is an object, of which nothing is told"
