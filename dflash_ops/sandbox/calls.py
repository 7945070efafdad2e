"""The calls that the look-alike's API has, each with what it needs; a row of CALLS is one. Runs in the hypervisor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ops.sandbox import containers, faults, guests, layout, tasks
from dflash_ops.sandbox.api import ApiError, Call, Page, Parameter, Request
from dflash_ops.sandbox.tasks import Task


def _index(*names: str, key: str = "subdir") -> Callable[[Request], Any]:
    return lambda _: [{key: name} for name in names]


# The cluster


def _version(_: Request) -> Any:
    return guests.VERSION


def _nodes(request: Request) -> Any:
    return [guests.node(name, request.may(f"/nodes/{name}", "Sys.Audit")) for name in layout.NODES]


def _cluster_status(_: Request) -> Any:
    down = faults.read().down
    cluster = {"type": "cluster", "id": "cluster", "name": "sandbox", "version": len(layout.NODES)}
    nodes = [
        {
            "type": "node",
            "id": f"node/{name}",
            "name": name,
            "nodeid": number,
            "ip": "127.0.0.1",
            "local": int(name == layout.NODE),
            "online": int(name not in down),
            "level": "",
        }
        for number, name in enumerate(layout.NODES, 1)
    ]
    return [cluster | {"nodes": len(nodes), "quorate": int(len(down) * 2 <= len(nodes))}, *nodes]


def _resources(request: Request) -> Any:
    down = faults.read().down
    rows: list[dict[str, Any]] = []
    if request.options.get("type", "vm") == "vm":
        for node in layout.NODES:
            for vmid in _visible(request, node):
                row = guests.status(vmid, node)
                row |= {"id": f"lxc/{vmid}", "node": node, "template": 0, "maxcpu": row.pop("cpus")}
                # A node that is silent: nobody knows.
                rows.append(row if node not in down else row | {"status": "unknown", "uptime": 0})
    if request.options.get("type", "node") == "node":
        rows += [guests.node(name, request.may(f"/nodes/{name}", "Sys.Audit")) for name in layout.NODES]
    return rows


def _permissions(request: Request) -> Any:
    who = request.options.get("userid", request.user)
    if who not in (request.user,) and not who.startswith(f"{request.user}!"):
        request.need("/access", "Sys.Audit")
    path = request.options.get("path")
    if path is None:
        return request.rights.everywhere(who)
    held = request.rights.at(who, path)
    return {path: {name: int(below) for name, below in sorted(held.items())}} if held else {}


# Containers


def _visible(request: Request, node: str) -> list[int]:
    return [vmid for vmid in containers.configured(node) if request.may(f"/vms/{vmid}", "VM.Audit")]


def _containers(request: Request) -> Any:
    # A real one gives them in no order.
    return [guests.status(vmid, request.node) for vmid in reversed(_visible(request, request.node))]


def _current(request: Request) -> Any:
    return guests.status(request.vmid, request.node) | {"ha": {"managed": 0}}


def _config(request: Request) -> Any:
    name = request.options.get("snapshot")
    if name is not None and name not in _snapshot_names(request):
        raise ApiError(500, f"snapshot '{name}' does not exist")
    return guests.config(request.vmid, request.node, name)


def _running(request: Request) -> bool:
    return containers.init_of(request.vmid, request.node) is not None


def _begin(request: Request, kind: str, job: str, **options: Any) -> str:
    return tasks.start(request.node, kind, request.vmid, request.user, job, options).upid


def _start(request: Request) -> Any:
    if _running(request):
        raise ApiError(500, f"CT {request.vmid} already running")
    return _begin(request, "vzstart", "start")


def _stop(request: Request) -> Any:
    _must_run(request)
    return _begin(request, "vzstop", "stop")


def _shutdown(request: Request) -> Any:
    _must_run(request)
    timeout, force = request.options.get("timeout", 60), request.options.get("forceStop", False)
    return _begin(request, "vzshutdown", "shutdown", timeout=timeout, force=force)


def _reboot(request: Request) -> Any:
    _must_run(request, "VM")
    return _begin(request, "vzreboot", "reboot", timeout=request.options.get("timeout", 60))


def _must_run(request: Request, what: str = "CT") -> None:
    if not _running(request):
        raise ApiError(500, f"{what} {request.vmid} not running")


def _migrate(request: Request) -> Any:
    target = request.options["target"]
    if target == request.node:
        raise ApiError(400, "Parameter verification failed.", {"target": "target is local node."})
    if target not in layout.NODES:
        raise ApiError(500, f"no such cluster node '{target}'")
    if target in faults.read().down:
        raise ApiError(500, f"node '{target}' is not online")
    restart = request.options.get("restart", False) or request.options.get("online", False)
    return _begin(request, "vzmigrate", "migrate", target=target, restart=restart)


# Snapshots


def _snapshot_names(request: Request) -> list[str]:
    return [row["name"] for row in guests.snapshots(request.vmid, request.node)[:-1]]


def _snapshots(request: Request) -> Any:
    return guests.snapshots(request.vmid, request.node)


def _snapshot(request: Request) -> Any:
    name = request.options["snapname"]
    if name in ("current", "vzdump"):
        raise ApiError(500, f"unable to use snapshot name '{name}' (reserved name)")
    description = request.options.get("description", "")
    return _begin(request, "vzsnapshot", "snapshot", snapname=name, description=description)


def _snapshot_config(request: Request) -> Any:
    name = request.words["snapname"]
    if name not in _snapshot_names(request):
        raise ApiError(500, f"snapshot '{name}' does not exist")
    return guests.config(request.vmid, request.node, name)


def _rollback(request: Request) -> Any:
    restart = request.options.get("start", False)
    return _begin(request, "vzrollback", "rollback", snapname=request.words["snapname"], restart=restart)


def _delsnapshot(request: Request) -> Any:
    return _begin(request, "vzdelsnapshot", "delsnapshot", snapname=request.words["snapname"])


# Tasks


def _task(request: Request) -> Task:
    """The task that the path names, for its owner and for whoever may audit the node."""
    task = Task.parse(request.words["upid"])
    if task is None:
        raise ApiError(400, "Parameter verification failed.", {"upid": "unable to parse worker upid"})
    if task.user != request.user and task.user.partition("!")[0] != request.user:
        request.need(f"/nodes/{request.node}", "Sys.Audit")
    if not Path(task.log).exists():
        raise ApiError(400, "Parameter verification failed.", {"upid": "no such task"})
    return task


def _task_status(request: Request) -> Any:
    task = _task(request)
    facts = task.facts()
    facts |= {"status": "running"} if task.running else {"status": "stopped", "exitstatus": task.verdict}
    user, _, token = task.user.partition("!")
    return facts | ({"user": user, "tokenid": token} if token else {})


def _task_log(request: Request) -> Any:
    start, limit = request.options.get("start", 0), request.options.get("limit", 50)
    rows = [{"n": number, "t": line} for number, line in enumerate(_task(request).lines(), 1)]
    # For the sake of the web page there is never no line.
    return Page(rows or [{"n": 1, "t": "no content"}], start, limit)


def _tasks(request: Request) -> Any:
    options = request.options
    auditor = request.may(f"/nodes/{request.node}", "Sys.Audit")
    rows: list[dict[str, Any]] = []
    for task in tasks.listed(request.node):
        source = options.get("source", "archive")
        if (source == "archive" and task.running) or (source == "active" and not task.running):
            continue
        if "vmid" in options and task.id != str(options["vmid"]):
            continue
        if not options.get("since", 0) <= task.began <= options.get("until", task.began):
            continue
        if options.get("typefilter", task.kind) != task.kind or options.get("userfilter", "") not in task.user:
            continue
        if not auditor and task.user.partition("!")[0] != request.user.partition("!")[0]:
            continue
        row = task.facts()
        if not task.running:
            row |= {"status": task.verdict, "endtime": int(Path(task.log).stat().st_mtime)}
        if not (options.get("errors") and row.get("status", "OK") == "OK"):
            rows.append(row)
    return Page(rows, options.get("start", 0), options.get("limit", 50))


_CT = "/nodes/{node}/lxc/{vmid}"
_VMS = "/vms/{vmid}"
_NUMBER, _SWITCH = Parameter("integer", 0), Parameter("boolean")
_SNAPNAME = Parameter("name", most=40, needed=True)
_TIMES = {"timeout": _NUMBER}

CALLS = (
    Call("GET", "/", _index("version", "cluster", "nodes", "access", key="subdir")),
    Call("GET", "/version", _version),
    Call("GET", "/cluster", _index("resources", "status", key="name")),
    Call("GET", "/cluster/status", _cluster_status, "/", ("Sys.Audit",)),
    Call(
        "GET",
        "/cluster/resources",
        _resources,
        options={"type": Parameter(words=("vm", "storage", "node", "sdn"))},
    ),
    Call("GET", "/access", _index("permissions")),
    Call("GET", "/access/permissions", _permissions, options={"path": Parameter(), "userid": Parameter()}),
    Call("GET", "/nodes", _nodes),
    Call("GET", "/nodes/{node}", _index("lxc", "status", "tasks", "version", key="name")),
    Call("GET", "/nodes/{node}/version", _version),
    Call("GET", "/nodes/{node}/status", lambda _: guests.node_status(), "/nodes/{node}", ("Sys.Audit",)),
    Call("GET", "/nodes/{node}/qemu", lambda _: []),
    Call("GET", "/nodes/{node}/lxc", _containers),
    Call("GET", _CT, _index("config", "status", "snapshot", "migrate"), _VMS, ("VM.Audit",)),
    Call("GET", f"{_CT}/config", _config, _VMS, ("VM.Audit",), {"current": _SWITCH, "snapshot": Parameter("name")}),
    Call("GET", f"{_CT}/status", _index("current", "start", "stop", "shutdown", "reboot")),
    Call("GET", f"{_CT}/status/current", _current, _VMS, ("VM.Audit",)),
    Call("POST", f"{_CT}/status/start", _start, _VMS, ("VM.PowerMgmt",), {"skiplock": _SWITCH, "debug": _SWITCH}),
    Call("POST", f"{_CT}/status/stop", _stop, _VMS, ("VM.PowerMgmt",), {"skiplock": _SWITCH}),
    Call("POST", f"{_CT}/status/shutdown", _shutdown, _VMS, ("VM.PowerMgmt",), {**_TIMES, "forceStop": _SWITCH}),
    Call("POST", f"{_CT}/status/reboot", _reboot, _VMS, ("VM.PowerMgmt",), _TIMES),
    Call(
        "POST",
        f"{_CT}/migrate",
        _migrate,
        _VMS,
        ("VM.Migrate",),
        {"target": Parameter(needed=True), "restart": _SWITCH, "online": _SWITCH, "timeout": _NUMBER},
    ),
    Call("GET", f"{_CT}/snapshot", _snapshots, _VMS, ("VM.Audit",)),
    Call(
        "POST",
        f"{_CT}/snapshot",
        _snapshot,
        _VMS,
        ("VM.Snapshot",),
        {"snapname": _SNAPNAME, "description": Parameter()},
    ),
    Call("GET", f"{_CT}/snapshot/{{snapname}}", _index("rollback", "config", key="cmd")),
    Call(
        "GET",
        f"{_CT}/snapshot/{{snapname}}/config",
        _snapshot_config,
        _VMS,
        ("VM.Snapshot", "VM.Snapshot.Rollback", "VM.Audit"),
    ),
    Call(
        "POST",
        f"{_CT}/snapshot/{{snapname}}/rollback",
        _rollback,
        _VMS,
        ("VM.Snapshot", "VM.Snapshot.Rollback"),
        {"start": _SWITCH},
        {"snapname": _SNAPNAME},
    ),
    Call(
        "DELETE",
        f"{_CT}/snapshot/{{snapname}}",
        _delsnapshot,
        _VMS,
        ("VM.Snapshot",),
        {"force": _SWITCH},
        {"snapname": _SNAPNAME},
    ),
    Call(
        "GET",
        "/nodes/{node}/tasks",
        _tasks,
        options={
            **{name: _NUMBER for name in ("start", "limit", "since", "until")},
            "vmid": Parameter("integer", 100, 999_999_999),
            "errors": _SWITCH,
            "source": Parameter(words=("archive", "active", "all")),
            "typefilter": Parameter(),
            "userfilter": Parameter(),
        },
    ),
    Call("GET", "/nodes/{node}/tasks/{upid}", _index("log", "status", key="name")),
    Call("GET", "/nodes/{node}/tasks/{upid}/status", _task_status),
    Call("GET", "/nodes/{node}/tasks/{upid}/log", _task_log, options={"start": _NUMBER, "limit": _NUMBER}),
)
