"""`pvesh`: the API as a program for root, with PVE's own words when something is wrong. Runs in the hypervisor."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, cast

from dflash_ops.sandbox import api, layout
from dflash_ops.sandbox.api import ApiError
from dflash_ops.sandbox.calls import CALLS
from dflash_ops.sandbox.perl import Failure, say, take_time, through_perl
from dflash_ops.sandbox.processes import own_environment, own_words
from dflash_ops.sandbox.rights import ROOT
from dflash_ops.sandbox.tasks import Task

_METHODS = {"get": "GET", "create": "POST", "set": "PUT", "delete": "DELETE"}
_FORMATS = ("text", "json", "json-pretty", "yaml")
_SWITCHES = ("noproxy", "quiet", "human-readable", "noborder", "noheader")


def main() -> NoReturn:
    """The program pvesh."""
    try:
        words = [word.decode("utf-8", "replace") for word in through_perl(own_words(), own_environment())]
        _call(words)
        code = 0
    except Failure as failure:
        say(str(failure))
        code = failure.code
    except KeyboardInterrupt:
        code = 130
    take_time()
    sys.stdout.flush()
    sys.exit(code)


def _call(words: list[str]) -> None:
    if os.geteuid() != 0 or not Path(layout.CONFIGS).is_dir():
        root = os.geteuid() == 0
        for number in (1, 2, 3):
            say(f"ipcc_send_rec[{number}] failed: {'Connection refused' if root else 'Unknown error -1'}")
        why = "Connection refused" if root else "Unknown error -1"
        raise Failure(f"Unable to load access control list: {why}", 111 if root else 255)
    if not words:
        raise Failure("ERROR: no command specified\n" + _USAGE)
    verb = [words[0]] if words[0] in _METHODS else [name for name in _METHODS if name.startswith(words[0])]
    if len(verb) != 1:
        raise Failure(f"ERROR: unknown command 'pvesh {words[0]}'\n" + _USAGE)
    usage = f"pvesh {verb[0]} <api_path> [OPTIONS] [FORMAT_OPTIONS]"
    rest, options = _taken_apart(words[1:], usage)
    if not rest:
        raise Failure(f"400 not enough arguments\n{usage}")
    path, shape = "/" + rest[0].strip("/"), options.pop("output-format", "text")
    if shape not in _FORMATS:
        why = f"value '{shape}' does not have a value in the enumeration '{', '.join(sorted(_FORMATS))}'"
        raise Failure(f"400 Parameter verification failed.\noutput-format: {why}\n{usage}")
    switches = {name: options.pop(name, "0") for name in _SWITCHES}
    try:
        data = api.answer(CALLS, _METHODS[verb[0]], path, options, ROOT, local=True)
    except ApiError as error:
        raise _failure(error, verb[0], path, usage) from error
    task = Task.parse(data) if isinstance(data, str) else None
    if task is not None:
        follow(task)
    if data is not None and switches["quiet"] == "0":
        sys.stdout.write(_shown(data, shape))


def _taken_apart(words: list[str], usage: str) -> tuple[list[str], dict[str, str]]:
    """The words without a dash, and the options: one dash or two, the value behind `=` or in the next word."""
    rest: list[str] = []
    options: dict[str, str] = {}
    while words:
        word, *words = words
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if name in _SWITCHES:
                value = "1"
            elif not words:
                raise Failure(f"Option {name} requires an argument\n400 unable to parse option\n{usage}")
            else:
                value, *words = words
        options[name] = value
    return rest, options


def _failure(error: ApiError, verb: str, path: str, usage: str) -> Failure:
    if error.code == 501:
        return Failure(f"no '{verb}' handler for '{path}'")
    unknown = [name for name, why in (error.errors or {}).items() if why.startswith("property is not defined")]
    if unknown:
        return Failure(
            "\n".join([*(f"Unknown option: {name}" for name in unknown), f"400 unable to parse option\n{usage}"])
        )
    if error.errors:
        rows = "".join(f"{name}: {why}\n" for name, why in error.errors.items())
        return Failure(f"400 {error.message}\n{rows}{usage}", 255)
    if error.code == 595:
        command = f"ssh -o BatchMode=yes root@127.0.0.1 pvesh --noproxy {verb} {path} --output-format json"
        say(f"ssh: connect to host 127.0.0.1 port 22: {error.message}")
        return Failure(f"proxy handler failed: command '{command}' failed: exit code 255")
    # perl's `die` exits with what errno happens to be: ENOENT when a file was looked for last.
    return Failure(error.message, 2 if verb == "get" and "does not exist" in error.message else 255)


def follow(task: Task) -> bool:
    """As a task in the foreground: its words on stdout, its error on stderr; whether it went well, of which the exit
    code of pvesh says nothing."""
    seen = 0
    while True:
        running = task.running
        lines = task.lines()
        for line in lines[seen:]:
            if not line.startswith("TASK "):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            elif line.startswith("TASK ERROR: "):
                say(line.removeprefix("TASK ERROR: "))
        seen = len(lines)
        if not running:
            return task.verdict == "OK" or task.verdict.startswith("WARNINGS")
        time.sleep(0.02)


def _shown(data: Any, shape: str) -> str:
    if shape == "json":
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    if shape in ("json-pretty", "yaml"):
        return json.dumps(data, sort_keys=True, indent=3, ensure_ascii=False) + "\n"
    if isinstance(data, str):
        return data + "\n"
    if isinstance(data, dict):
        facts = cast(dict[str, Any], data)
        return _table(["key", "value"], [[key, facts[key]] for key in sorted(facts)])
    names = sorted({name for row in data for name in row})
    return _table(names, [[row.get(name, "") for name in names] for row in data])


def _table(names: list[str], rows: list[list[Any]]) -> str:
    texts = [[_cell(value) for value in row] for row in [names, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]

    def rule(left: str, middle: str, right: str, line: str) -> str:
        return left + middle.join(line * (width + 2) for width in widths) + right + "\n"

    lines = ["│ " + " │ ".join(map(str.ljust, row, widths)) + " │\n" for row in texts]
    body = rule("├", "┼", "┤", "─").join(lines[1:])
    return rule("┌", "┬", "┐", "─") + lines[0] + rule("╞", "╪", "╡", "═") + body + rule("└", "┴", "┘", "─")


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


_USAGE = "USAGE: pvesh <COMMAND> [ARGS] [OPTIONS]"
