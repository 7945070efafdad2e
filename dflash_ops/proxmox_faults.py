"""What Proxmox VE refuses, as our errors: the same sentence whether it came through HTTPS or through pvesh. Pure.

The API puts its message into the reason phrase of HTTP; pvesh prints the same message on stderr.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dflash_ops.errors import (
    BusyError,
    LinkLostError,
    NotFoundError,
    OpsError,
    PreflightError,
    TimedOutError,
    UnreachableError,
)
from dflash_ops.proxmox_values import THIS_NODE, Call, Upid, rights_on_containers

# What a token needs for all that is asked of a container.
ROLE = "DFlashOps"
RIGHTS = ("VM.Audit", "VM.PowerMgmt", "VM.Snapshot", "VM.Snapshot.Rollback")

_FORBIDDEN = re.compile(r"Permission check failed(?: \((?P<path>/[^,)]*), (?P<rights>[^)]+)\))?")
_NO_CONFIG = re.compile(
    r"Configuration file 'nodes/(?P<node>[^/']+)/(?:lxc|qemu-server)/(?P<vmid>\d+)\.conf' does not exist"
)
_NO_HANDLER = re.compile(r"[Nn]o '\w+' handler (?:defined )?for|no such resource|Method '.*' not implemented")
_NO_NODE = re.compile(r"hostname lookup '(?P<node>[^']*)' failed|no such cluster node '(?P<other>[^']*)'")
_LOCKED = re.compile(r"(?:CT|VM) is locked(?: \((?P<by>[^)]+)\))?")
_LOCK_TIME_OUT = re.compile(r"can't lock file '(?P<file>[^']*)'.*got timeout")
_DEAD_NODE_SSH = re.compile(r"proxy handler failed|ssh: connect to host|Host key verification failed|lost connection")


@dataclass(frozen=True)
class Asked:
    """Whom we asked, as errors name it. who: the token (`bot@pve!dflash`), None for pvesh, which has root's rights."""

    where: str
    who: str | None


def refused(asked: Asked, call: Call, status: int, message: str, errors: object = None) -> OpsError:
    """What an HTTP status of 400 and above means. message: the reason phrase; errors: those of single parameters."""
    message = message.strip()
    if status == 401:
        return _unknown_token(asked, message)
    if (found := _FORBIDDEN.search(message)) is not None or status == 403:
        return _forbidden(asked, call, found, message)
    if (found := _NO_CONFIG.search(message)) is not None:
        return _missing(asked, found["vmid"], found["node"])
    if (found := _NO_NODE.search(message)) is not None:
        node = found["node"] or found["other"] or call.node or ""
        return NotFoundError(
            f"there is no node {node}",
            where=asked.where,
            why=message,
            next="on the host: pvecm nodes; then correct `node` of the host's [api] in the inventory",
        )
    if status in (595, 596, 597, 598, 599):
        return _dead_node(asked, call, f"{status} {message}".strip())
    if status == 501 or _NO_HANDLER.search(message):
        return OpsError(
            f"the API has no such call: {call}",
            where=asked.where,
            why=f"{status} {message}".strip(),
            next="pveversion on the host: Proxmox VE 8 or newer has it",
        )
    if status == 400:
        return OpsError(f"the API refuses {call}", where=asked.where, why=_parameters(message, errors))
    if (busy := locked(asked, message, call.vmid or "")) is not None:
        return busy
    if status in (407, 502, 503, 504):
        return UnreachableError(
            "something between us and the API answers in its place",
            where=asked.where,
            why=f"{status} {message}".strip(),
            next="ask the node itself, or remove the host's [api] from the inventory: pvesh over ssh is asked then",
        )
    return OpsError(f"{call} failed", where=asked.where, why=_parameters(message, errors) or f"status {status}")


def pvesh_refused(asked: Asked, call: Call, code: int, err: str) -> OpsError:
    """What pvesh's exit code and stderr mean. Its exit codes are accidents; only the text tells."""
    lines = [line.strip() for line in err.strip().split("\n") if line.strip()]
    last = lines[-1] if lines else f"exit code {code}, no output"
    if code == 127 and "pvesh" in err and "not found" in err:
        return PreflightError(
            "the host has no pvesh", where=asked.where, why=last, next="check that it is a Proxmox VE host"
        )
    if needs_root(err):
        return PreflightError(
            "pvesh needs root", where=asked.where, why=last, next="log in as root, or allow /usr/bin/pvesh in sudoers"
        )
    if any(line.startswith("sudo:") for line in lines):
        return PreflightError(
            "sudo does not let us ask pvesh",
            where=asked.where,
            why=last,
            next="on the host, as root: visudo -f /etc/sudoers.d/dflash-ops, with the line: USER ALL=(root) NOPASSWD: "
            "/usr/bin/pvesh",
        )
    if "ipcc_send_rec" in err or "Unable to load access control list" in err:
        return PreflightError(
            "the host's cluster file system does not run",
            where=asked.where,
            why=last,
            next="on the host: systemctl status pve-cluster",
        )
    if _DEAD_NODE_SSH.search(err):
        return _dead_node(asked, call, "; ".join(lines[-2:]))
    said = [line for line in lines if not re.match(r"(USAGE|pvesh\s+\w+\s|perl: warning|\s+LANG|\s+LC_)", line)]
    first = next((line for line in said if re.match(r"\d{3} ", line)), None)
    if first is None:
        return refused(asked, call, 500, said[-1] if said else last)
    others = [line for line in said if line is not first] if first.startswith("400 ") else []
    status, message = int(first[:3]), "; ".join([first[4:], *others])
    return refused(asked, call, status, message)


def needs_root(err: str) -> bool:
    """Whether pvesh was run by somebody else than root."""
    return "please run as root" in err or "Unknown error -1" in err


def locked(asked: Asked, message: str, vmid: str) -> BusyError | None:
    """The container is locked: by a backup, a snapshot, a migration; or by another command for too long."""
    if (found := _LOCKED.search(message)) is not None:
        by = found["by"] or "something"
        return BusyError(
            f"container {vmid} is locked ({by})" if vmid else message,
            where=asked.where,
            why=f"a {by} works on it, or one was cut off",
            next=f"wait for it; when nothing does any more, on the host: pct unlock {vmid}",
        )
    if (found := _LOCK_TIME_OUT.search(message)) is not None:
        return BusyError(
            "another command holds the container",
            where=asked.where,
            why=message,
            next=f"wait for it, then again; who it is, on the host: fuser -v {found['file']}",
        )
    return None


def task_failed(asked: Asked, doing: str, upid: Upid, exitstatus: str, log: list[str]) -> OpsError:
    """A task that was begun (the call was answered with 200) and failed. log: its last lines."""
    why = exitstatus.strip()
    if (busy := locked(asked, why, upid.id)) is not None:
        return busy
    told = [line for line in log if line.strip() and not line.startswith("TASK ") and line.strip() != why][-3:]
    return OpsError(
        f"{doing} failed",
        where=asked.where,
        why="; ".join([why, *([f"its log ends: {' / '.join(told)}"] if told else [])]),
        next=_advice(why, upid),
    )


def task_too_long(asked: Asked, doing: str, upid: Upid, seconds: float) -> TimedOutError:
    return TimedOutError(
        f"{doing} takes longer than {seconds:.0f} s",
        where=asked.where,
        why=f"its task goes on there: {upid.text}",
        next=f"on the host: pvesh get /nodes/{upid.node}/tasks/{upid.text}/log",
    )


def task_lost(asked: Asked, doing: str, upid: Upid, error: OpsError) -> LinkLostError:
    """The API has not answered for a while, and what became of the task is not known."""
    return LinkLostError(
        f"what becomes of {doing} is not known",
        where=asked.where,
        why=f"{error.what}: {error.why}; its task goes on there",
        next=f"on the host: pvesh get /nodes/{upid.node}/tasks/{upid.text}/status",
    )


def task_silent(asked: Asked, doing: str, call: Call, seconds: float) -> TimedOutError:
    """As `task_too_long`, where pvesh runs the task itself and says its id at the end."""
    return TimedOutError(
        f"{doing} has said nothing for {seconds:.0f} s",
        where=asked.where,
        why="its task may go on there",
        next=f"on the host: {active_tasks(call)}",
    )


def task_unknown(asked: Asked, doing: str, call: Call, error: OpsError) -> LinkLostError:
    """The call was sent, and no id of a task came back."""
    return LinkLostError(
        f"whether {doing} has begun is not known",
        where=asked.where,
        why=f"{error.what}: {error.why}; if it has, its task goes on there",
        next=f"on the host: {active_tasks(call)}",
    )


def active_tasks(call: Call) -> str:
    """What lists the tasks that go on with the container of a call."""
    return f"pvesh get /nodes/{call.node}/tasks --vmid {call.vmid} --source active"


def lacks_power(asked: Asked, permissions: object, vmid: int) -> PreflightError | None:
    """None when whom we ask as may start the container. permissions: what `/access/permissions` says of its path."""
    if asked.who is None or any("VM.PowerMgmt" in rights for rights in rights_on_containers(permissions).values()):
        return None
    return PreflightError(
        f"the token {asked.who} lacks VM.PowerMgmt on /vms/{vmid}",
        where=asked.where,
        why="going back stops the container, and it could not be started again",
        next=mend(f"/vms/{vmid}", asked.who),
    )


def sees_nothing(asked: Asked, permissions: object) -> PreflightError | None:
    """Why a list of containers may be empty with a 200: the token may see none. None when it may.

    permissions: what `/access/permissions` says of the token itself."""
    if asked.who is None or any("VM.Audit" in rights for rights in rights_on_containers(permissions).values()):
        return None
    return PreflightError(
        f"the token {asked.who} may see no container",
        where=asked.where,
        why="/access/permissions gives it VM.Audit on no path, and lists leave out silently what a token may not see; "
        "a token with privilege separation has only what is granted both to it and to its user",
        next=mend("/vms", asked.who),
    )


def mend(path: str, who: str, rights: tuple[str, ...] = RIGHTS) -> str:
    """The commands that give a token, and its user, what it needs on a path."""
    user, role = who.partition("!")[0], ROLE if rights == RIGHTS else f"{ROLE}Also"
    return (
        f"on the host, as root: pveum role add {role} --privs '{' '.join(rights)}' || "
        f"pveum role modify {role} --append 1 --privs '{' '.join(rights)}'; "
        f"pveum acl modify {path} --users {user} --roles {role}; "
        f"pveum acl modify {path} --tokens '{who}' --roles {role}"
    )


class NotTheApiError(OpsError):
    """It answered, but not as Proxmox VE does: something in between, while a proxy restarts, say."""


def not_the_api(asked: Asked, call: Call, why: str) -> NotTheApiError:
    return NotTheApiError(
        "what answers is not the Proxmox VE API",
        where=asked.where,
        why=f"{call}: {why}",
        next="correct `address` and `port` (8006) of the host's [api] in the inventory",
    )


def _unknown_token(asked: Asked, message: str) -> UnreachableError:
    who = asked.who or "no token"
    user, _, name = who.partition("!")
    return UnreachableError(
        f"the API does not know the token {who}",
        where=asked.where,
        why=f"401 {message or 'and not a word more'}: no such token, or another secret, or one of them is expired or "
        "disabled",
        next=f"on the host: pveum user token list {user}; a new secret: pveum user token remove {user} {name}; "
        f"pveum user token add {user} {name}",
    )


def _forbidden(asked: Asked, call: Call, found: "re.Match[str] | None", message: str) -> PreflightError:
    path, rights = (found["path"], found["rights"]) if found else (None, None)
    who = f"the token {asked.who}" if asked.who else "this user"
    if path is None or rights is None:
        return PreflightError(
            f"{who} may not {call}",
            where=asked.where,
            why=message or "403",
            next="remove the host's [api] from the inventory: pvesh over ssh, as root, may" if asked.who else "",
        )
    needs = tuple(rights.split("|"))
    is_container = path.startswith("/vms/")
    also = f"; or there is no container {path[5:]}: the API does not tell a token which" if is_container else ""
    return PreflightError(
        f"{who} lacks {' or '.join(needs)} on {path}",
        where=asked.where,
        why=f"403 {message}{also}",
        next=mend(path, asked.who, RIGHTS if is_container else needs) if asked.who else "log in as root",
    )


def _missing(asked: Asked, vmid: str, node: str) -> NotFoundError:
    return NotFoundError(
        f"there is no container {vmid} on node {node}",
        where=asked.where,
        why=f"{node} has no configuration of it",
        next="on the host: pct list; then correct `vmid` or `host` in the inventory",
    )


def _dead_node(asked: Asked, call: Call, why: str) -> UnreachableError:
    if call.node in (None, THIS_NODE):
        return UnreachableError(
            "the node that we ask does not answer its own proxy",
            where=asked.where,
            why=why,
            next="on the host: systemctl status pvedaemon pveproxy",
        )
    node = call.node
    return UnreachableError(
        f"node {node} does not answer the one we asked",
        where=asked.where,
        why=why,
        next=f"is it up? On the host: pvecm status; on {node}: systemctl status pveproxy pvedaemon",
    )


def _parameters(message: str, errors: object) -> str:
    """The message with what is wrong with single parameters."""
    if not isinstance(errors, Mapping):
        return message
    told = [f"{key}: {value}" for key, value in cast(Mapping[str, Any], errors).items() if key != "errors"]
    return "; ".join([message, *told])


def _advice(why: str, upid: Upid) -> str:
    if "Device /dev/nvidia" in why and "does not exist" in why:
        return "on the host: nvidia-modprobe -c0 -u (or nvidia-smi), then start it again"
    if upid.type == "vzshutdown":
        return "--timeout with more seconds, or --kill"
    if upid.type == "vzreboot":
        return "--timeout with more seconds, or dflash-ops ct stop --kill, then dflash-ops ct start"
    if "snapshot feature is not available" in why:
        return "its storage can't make snapshots (or a mount point can't); on the host: pct config " + upid.id
    if "not most recent snapshot" in why or "most recent snapshot" in why:
        return "the storage goes back to the newest snapshot only; remove the newer ones first"
    return f"its whole log, on the host: pvesh get /nodes/{upid.node}/tasks/{upid.text}/log"
