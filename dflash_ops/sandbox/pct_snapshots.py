"""`pct snapshot|listsnapshot|rollback|delsnapshot|migrate|unlock`: mostly the API's own calls, made by root in the
foreground."""

import time
from typing import TYPE_CHECKING, Any

from dflash_ops.sandbox.perl import Failure, say

if TYPE_CHECKING:
    from dflash_ops.sandbox.pct import Call


def create(call: "Call") -> int:
    """`pct snapshot ID NAME [--description TEXT]`"""
    given = {"snapname": _word(call)}
    if "description" in call.options:
        given["description"] = call.options["description"]
    return _ask(call, "POST", "/snapshot", given)


def delete(call: "Call") -> int:
    """`pct delsnapshot ID NAME`"""
    return _ask(call, "DELETE", f"/snapshot/{_word(call)}", {})


def rollback(call: "Call") -> int:
    """`pct rollback ID NAME [--start]`"""
    return _ask(call, "POST", f"/snapshot/{_word(call)}/rollback", {"start": call.options.get("start", "0")})


def migrate(call: "Call") -> int:
    """`pct migrate ID NODE [--restart]`"""
    switches = {name: call.options[name] for name in ("restart", "online") if name in call.options}
    return _ask(call, "POST", "/migrate", {"target": _word(call), **switches})


def unlock(call: "Call") -> int:
    """`pct unlock ID`: forget what a broken task left."""
    from dflash_ops.sandbox.guest_config import Config

    call.config(255)
    config = Config.read(call.vmid)
    config.put("lock", None)
    config.write(call.vmid)
    return 0


def show(call: "Call") -> int:
    """`pct listsnapshot ID`: a tree of them, each below its parent."""
    rows: list[dict[str, Any]] = _answer(call, "GET", "/snapshot", {})
    names = {row["name"] for row in rows}

    def branch(row: dict[str, Any], prefix: str) -> None:
        text = (row.get("description") or "no-description").split("\n")[0]
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["snaptime"])) if "snaptime" in row else ""
        print(f"{prefix} {row['name']:<{max(0, 30 - len(prefix))}} {moment:<23} {text}")
        for child in rows:
            if child.get("parent") == row["name"]:
                branch(child, " " + prefix)

    for row in rows:
        if row.get("parent") not in names:
            branch(row, "`->")
    return 0


def _word(call: "Call") -> str:
    return call.rest[0].decode("utf-8", "surrogateescape")


def _ask(call: "Call", method: str, path: str, given: dict[str, str]) -> int:
    """Make the call and follow its task; the exit code is the task's."""
    from dflash_ops.sandbox.pvesh import follow
    from dflash_ops.sandbox.tasks import Task

    task = Task.parse(_answer(call, method, path, given))
    assert task is not None
    return 0 if follow(task) else 255


def _answer(call: "Call", method: str, path: str, given: dict[str, str]) -> Any:
    from dflash_ops.sandbox import api, layout
    from dflash_ops.sandbox.calls import CALLS
    from dflash_ops.sandbox.rights import ROOT

    call.config(255)
    try:
        return api.answer(CALLS, method, f"/nodes/{layout.NODE}/lxc/{call.vmid}{path}", given, ROOT, local=True)
    except api.ApiError as error:
        if not error.errors:
            raise Failure(error.message) from error
        say(f"400 {error.message}")
        raise Failure("\n".join(f"{name}: {why}" for name, why in error.errors.items())) from error


VERBS = {
    "delsnapshot": delete,
    "listsnapshot": show,
    "migrate": migrate,
    "rollback": rollback,
    "snapshot": create,
    "unlock": unlock,
}
