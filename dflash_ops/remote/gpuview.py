"""What a host, or a container, tells for `gpu-status`: nvidia-smi, the kernel's Xid lines, who holds the devices.

The hypervisor sees every process, the GPU locks and the kernel's log; a container knows its runs, so that it can say
whose a process is. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NoReturn

from dflash_ops.remote import answers, gpuasked

_FORMAT = "--format=csv,noheader,nounits"
_XID = "NVRM: Xid"
_XIDS = 200  # the newest ones
# What drivers before 535 call it.
_OLDER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}


def main(parameters: dict[str, Any]) -> NoReturn:
    path = Path(parameters["path"]) if parameters["path"] else None
    code = answers.answer(path, lambda: view(path, parameters["fields"], parameters["apps"], parameters["seconds"]))
    os._exit(code)  # what has been said is written; taking the interpreter apart would only keep who waits waiting


def view(path: Path | None, fields: list[str], apps: list[str], seconds: float) -> dict[str, Any]:
    """path: where the runs lie, None on a host. fields, apps: what nvidia-smi is asked of GPUs and of compute processes
    (no question when empty)."""
    programs = {"gpus": _query("gpu", fields)}
    if apps:
        programs["apps"] = _query("compute-apps", apps)
    if path is None:
        programs["kernel"] = ["journalctl", "-k", "-q", "-o", "json", f"--grep={_XID}", "-n", str(_XIDS)]
    asked = gpuasked.Asked(programs, seconds)  # they answer while we look around
    try:
        holders, runs = _around(path)
        told = asked.answers()
    finally:
        asked.end()
    from dflash_ops.remote import probe, processes

    if apps:
        holders += _charged_and_unseen(told["apps"]["out"], apps.index("pid"), {it["pid"] for it in holders})
    kernel = told.pop("kernel", None)
    told["gpus"]["fields"] = fields
    if _lacks_a_field(told["gpus"]):
        told["gpus"] = _without_unknown(fields, told["gpus"], seconds)
    return {
        "boot_id": processes.boot_id(),
        "now": time.time(),
        "pid_namespace": probe.pid_namespace("self"),
        "smi": told,
        "minors": probe.device_minor_by_bus(),
        "cards": probe.cards(),
        "holders": holders,
        "runs": runs,
        "xids": None if kernel is None else _xids(kernel),
        "hidden": probe.hidden(),
    }


def _around(path: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Who holds the GPUs, and the runs that they are of."""
    # Only now: reading and compiling them takes as long as nvidia-smi does.
    from dflash_ops.remote import probe, processes

    holders = probe.holders()
    if path is None:
        return holders, []
    from dflash_ops.remote import owners

    ours = owners.Owners(path)
    for holder in holders:
        process = processes.find(holder)
        owner = ours.of(process) if process is not None else owners.UNKNOWN
        holder["owner"] = owner.kind
        holder["run_id"] = owner.run_id or holder["run_id"]
    return holders, ours.runs({holder["run_id"] for holder in holders if holder["run_id"]})


def _charged_and_unseen(out: str, column: int, known: set[int]) -> list[dict[str, Any]]:
    """Living processes that nvidia-smi names and that were not found: those that took a GPU while we looked around, and
    those of others, which a user who is not root can't look into."""
    from dflash_ops.remote import probe, processes

    cells = (line.split(",") for line in out.split("\n"))
    pids = {it[column].strip() for it in cells if len(it) > column}
    found: list[dict[str, Any]] = []
    for pid in sorted({int(it) for it in pids if it.isascii() and it.isdigit()} - known):
        process = processes.read(pid)
        late = (probe.holder(process) if process is not None else None) or probe.charged(pid)
        found += [late] if late is not None else []
    return found


# -- nvidia-smi


def _query(what: str, fields: list[str]) -> list[str]:
    return ["nvidia-smi", f"--query-{what}={','.join(fields)}", _FORMAT]


def _lacks_a_field(answer: dict[str, Any]) -> bool:
    return answer["code"] == 2 and "not a valid field" in answer["out"]


def _without_unknown(fields: list[str], refused: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The answer to those of the fields that this driver knows: one that it does not know loses it the whole query."""
    offered = gpuasked.ask_smi({"help": ["--help-query-gpu"]}, seconds)["help"]
    known = set(re.findall(r'"([\w.]+)"', offered["out"]))
    asked = {name: name if name in known else _OLDER.get(name, name) for name in fields}
    kept = [name for name in fields if asked[name] in known]
    if not kept:
        return {**refused, "fields": fields}
    told = gpuasked.ask({"gpus": _query("gpu", [asked[name] for name in kept])}, seconds)["gpus"]
    return {**told, "fields": kept}


# -- the kernel's log


def _xids(journal: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The Xid lines since the boot, the oldest first: {"time" (seconds since 1970), "message"}. From the journal, else
    from the kernel's ring buffer; None when neither can be read."""
    if journal["code"] in (0, 1) and not journal["out"].startswith(("Compiled", "Failed", "journalctl:")):
        found: list[dict[str, Any]] = []
        for line in journal["out"].split("\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if _XID in record["MESSAGE"]:
                    moment = int(record["__REALTIME_TIMESTAMP"]) / 1e6
                    found.append({"time": moment, "message": record["MESSAGE"][:300]})
        return sorted(found, key=lambda it: it["time"])
    return _ring_buffer()


def _ring_buffer(file: Path = Path("/dev/kmsg")) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = []
    began = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)  # one record each
            except BrokenPipeError:
                continue  # overwritten meanwhile
            except OSError:
                break  # no more for now
            if not record:
                break
            head, _, message = record.decode("utf-8", "replace").partition(";")
            cells = head.split(",")
            if _XID in message and len(cells) > 2 and cells[2].isdigit():
                moment = began + int(cells[2]) / 1e6
                found.append({"time": moment, "message": message.split("\n")[0][:300]})
    finally:
        os.close(descriptor)
    return found[-_XIDS:]
