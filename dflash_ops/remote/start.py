"""Starts one run in the container, or refuses before anything has changed.

One script, one lock: nothing of that name lives, the config is one that the release's trainer takes, what earlier runs
of ours left on the GPUs is freed; then the run folder appears whole, the supervisor starts in a session of its own, and
a tmux session shows the log. Asked again for a run id that exists, it answers with that run. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, processes, releases, rundir

# Set by the boot code: the sources that came with this script, by module name; the run keeps its own copy.
SOURCES: dict[str, str] = {}

_TOOLS = ("answers", "processes", "rundir", "supervisor", "stop", "view")
_TOOLS_MAIN = """\
# The tools that this run started with: `python3 ops supervisor RUN_DIR`, `python3 ops view RUN_DIR`.
import importlib, sys
sys.exit(importlib.import_module("dflash_ops.remote." + sys.argv[1]).main(sys.argv[2:]))
"""
_CHECK_SECONDS = 60.0
_SPAWN_SECONDS = 15.0
_TMUX_SECONDS = 15.0
_FREE_GRACE = 5.0
# The longest that a start holds its lock: all its waits. Another one waits as long, for the holder may be its own first
# try, whose answer was lost.
HOLD_SECONDS = _CHECK_SECONDS + 2 * _FREE_GRACE + _SPAWN_SECONDS + 2 * _TMUX_SECONDS
_SHOW_RELEASES = "dflash-ops releases"


def main(parameters: dict[str, Any]) -> int:
    return answers.answer(Path(parameters["path"]), lambda: start(parameters))


def start(parameters: dict[str, Any]) -> dict[str, Any]:
    path = Path(parameters["path"])
    if shutil.which("tmux") is None:
        raise answers.Fault(
            "preflight", "no tmux in the container", "the run would have no window", "apt-get install tmux"
        )
    with rundir.start_lock(path, HOLD_SECONDS):
        folder = path / "runs" / parameters["run_id"]
        if folder.exists():
            return _answer(folder, existing=True, freed=[], window=None)
        _refuse_if_busy(path, parameters)
        release = _release(path, parameters["release"])
        draft = folder.with_name(f".{folder.name}.tmp")
        try:
            _prepare(draft, folder, release, parameters)
            freed = _free_stale(path, parameters["name"])
            os.rename(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        rundir.sync_folder(folder.parent)
        _spawn_supervisor(folder, parameters["python"])
        return _answer(folder, existing=False, freed=freed, window=_open_window(folder, parameters))


def _answer(folder: Path, *, existing: bool, freed: list[dict[str, Any]], window: str | None) -> dict[str, Any]:
    facts = rundir.facts(folder, processes.boot_id())
    return {"existing": existing, "freed": freed, "window": window, "facts": facts}


def _refuse_if_busy(path: Path, parameters: dict[str, Any]) -> None:
    wanted = set(parameters["gpus"] or [])
    for run in rundir.live_runs(path):
        run_id = run["run_id"]
        if rundir.name_of(run_id) == parameters["name"]:
            raise answers.Fault(
                "busy", f"run {run_id} goes on", "", f"dflash-ops train stop {run_id}, or another --name"
            )
        shared = sorted(wanted & set(run["run"].get("gpus") or []))
        if shared:
            which = ", ".join(map(str, shared))
            raise answers.Fault(
                "busy", f"GPU {which} is taken", f"run {run_id} uses it", f"dflash-ops train stop {run_id}"
            )


def _release(path: Path, wanted: str | None) -> Path:
    """The folder of the release by its real path: `current` may be swapped while the run goes on."""
    every = path / "releases"
    if wanted is not None and not releases.is_release_id(wanted):
        raise answers.Fault("not_found", f"there is no release {wanted!r}", "that is no release id", _SHOW_RELEASES)
    link = path / "current" if wanted is None else every / wanted
    folder = Path(os.path.realpath(link))
    if not folder.is_dir():
        if wanted is None:
            raise answers.Fault("not_found", "nothing is deployed", f"{link} is missing", "dflash-ops deploy")
        raise answers.Fault("not_found", f"there is no release {wanted}", f"{link} is missing", _SHOW_RELEASES)
    if folder.parent != Path(os.path.realpath(every)) or not releases.is_release_id(folder.name):
        raise answers.Fault("preflight", "that is no release of ours", f"{link} leads to {folder}", "dflash-ops deploy")
    return folder


def _prepare(draft: Path, folder: Path, release: Path, parameters: dict[str, Any]) -> None:
    """Makes the run's folder under a name that nobody looks at, and has the release check its config."""
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        rundir.write_file(draft / "config.toml", parameters["config"].encode("utf-8", "surrogateescape"))
        if parameters["env"] is not None:
            rundir.write_file(draft / "env", parameters["env"].encode("utf-8", "surrogateescape"), mode=0o600)
        _check_config(draft / "config.toml", release, parameters)
        command = [parameters["python"], "-m", "trainer", "train", str(folder / "config.toml"), str(folder)]
        if parameters["init_from"]:
            if not Path(parameters["init_from"]).is_dir():
                raise answers.Fault(
                    "not_found", f"no drafter at {parameters['init_from']}", "", "give a folder in the container"
                )
            command += ["--init-from", parameters["init_from"]]
        resumed = _resumed(folder.parent.parent, parameters["resume"])
        if resumed is not None:
            command += ["--resume", str(resumed)]
        for setting in parameters["set"]:
            command += ["--set", setting]
        run = {
            "schema_version": rundir.SCHEMA_VERSION,
            "run_id": parameters["run_id"],
            "name": parameters["name"],
            "release": release.name,
            "gpus": parameters["gpus"],
            "command": command,
            "cwd": str(release),
            "created_at": rundir.now(),
            "client": parameters["client"],
            "env_names": parameters["env_names"],
            "resumes": resumed.name if resumed else None,
        }
        rundir.write_json(draft / "run.json", run)
        _write_tools(draft / "ops")
    except OSError as error:
        raise answers.Fault(
            "preflight",
            "the run's folder can't be made",
            f"{error.filename or draft}: {error.strerror}",
            "free disk space",
        ) from None


def _check_config(config: Path, release: Path, parameters: dict[str, Any]) -> None:
    words = [parameters["python"], "-m", "trainer", "check", str(config)]
    for setting in parameters["set"]:
        words += ["--set", setting]
    try:
        done = subprocess.run(words, cwd=release, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise answers.Fault(
            "preflight", "the release can't check the config", str(error), "dflash-ops deploy"
        ) from None
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.decode("utf-8", "replace").strip().split("\n") if line.strip()]
    # The user knows the file by the name on their own machine.
    why = (lines[-1] if lines else f"exit code {done.returncode}").replace(str(config), parameters["config_name"])
    if done.returncode == 3:
        raise answers.Fault("config", "the trainer refuses the config", why, "correct it and start again")
    raise answers.Fault("preflight", f"the trainer of release {release.name} does not run", why, "dflash-ops deploy")


def _resumed(path: Path, run: str | None) -> Path | None:
    if run is None:
        return None
    folder = rundir.find(path, run)
    if not rundir.checkpoints(folder):
        raise answers.Fault("not_found", f"run {folder.name} has no checkpoint", "", "start without --resume")
    return folder


def _free_stale(path: Path, name: str) -> list[dict[str, Any]]:
    """Ends what dead runs of this folder left: whatever holds a GPU, and the rest of an earlier run of this name."""
    boot = processes.boot_id()
    dead = {run["run_id"] for run in (rundir.facts(f, boot) for f in rundir.folders(path)) if not rundir.lives(run)}

    def stale() -> list[processes.Process]:
        found: list[processes.Process] = []
        for process in processes.table():
            environment = processes.environment(process.pid)
            run_id = os.fsdecode(environment.get(processes.RUN_ID, b""))
            ours = run_id in dead and environment.get(processes.RUN_DIR) == os.fsencode(path / "runs" / run_id)
            if process.ended or not ours:
                continue
            if rundir.name_of(run_id) == name or processes.device_minors(processes.open_files(process.pid)):
                found.append(process)
        return found

    freed = stale()
    described = [processes.describe(process) for process in freed]
    for process in freed:
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)
    if freed and not processes.wait_until(lambda: not stale(), _FREE_GRACE, every=0.2):
        left = processes.kill_all(stale, _FREE_GRACE)
        if left:
            first = processes.describe(left[0])
            why = f"process {first['pid']} ({first['command']}) is in state {first['state']}, in {first['wchan']}"
            raise answers.Fault(
                "busy", "an earlier run still holds the GPU and can't be killed", why, "dflash-ops gpu-status"
            )
    return described


def _write_tools(folder: Path) -> None:
    """The run's own copy of what watches it: a newer dflash-ops can't change it under its feet."""
    package = folder / "dflash_ops" / "remote"
    package.mkdir(parents=True)
    (folder / "__main__.py").write_text(_TOOLS_MAIN)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in _TOOLS:
        (package / f"{name}.py").write_text(SOURCES[name], encoding="utf-8")


def _spawn_supervisor(folder: Path, python: str) -> None:
    """Starts the supervisor with the hypervisor's GPU locks and no other descriptor of ours."""
    with open(folder / "supervisor.err", "wb") as errors:
        supervisor = subprocess.Popen(
            [python, "-B", str(folder / "ops"), "supervisor", str(folder)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            close_fds=True,
            pass_fds=_lock_descriptors(),
        )

    def settled() -> bool:
        return (folder / "state.json").exists() or (folder / "exit.json").exists() or supervisor.poll() is not None

    settled_in_time = processes.wait_until(settled, _SPAWN_SECONDS, every=0.02)
    if (folder / "state.json").exists() or (folder / "exit.json").exists():
        supervisor.returncode = 0  # it outlives this script: nobody waits for it here
        return
    words = (folder / "supervisor.err").read_text(errors="replace").strip().split("\n")[-1]
    supervisor.kill()
    supervisor.wait()
    why = words or ("it ended at once" if settled_in_time else f"no word from it in {_SPAWN_SECONDS:.0f} s")
    rundir.write_json(folder / "exit.json", rundir.exit_record(folder.name, 126, last_lines=[why]))
    raise answers.Fault("failed", "the supervisor did not start", why, "dflash-ops train status", str(folder))


def _lock_descriptors() -> list[int]:
    """Descriptors of the hypervisor's GPU lock files; the kernel frees a lock when the last of them is closed."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
        if os.path.basename(target).startswith(rundir.GPU_LOCK):
            found.append(int(name))
    return found


def _open_window(folder: Path, parameters: dict[str, Any]) -> str | None:
    """The tmux session that shows the log; None when tmux would not (the run goes on without)."""
    session = f"dflash-{parameters['name']}"
    viewer = [parameters["python"], "-B", str(folder / "ops"), "view", str(folder)]
    tmux = ["tmux", "-L", "dflash"]
    try:
        # An earlier run's window, whose run has ended. `=` asks for this very name, else run-a would match run-ab.
        subprocess.run([*tmux, "kill-session", "-t", f"={session}"], capture_output=True, timeout=_TMUX_SECONDS)
        made = subprocess.run(
            [*tmux, "new-session", "-d", "-s", session, "-x", "200", "-y", "50", *viewer],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TMUX_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"dflash-ops: no tmux window: {error}\n")
        return None
    if made.returncode != 0:
        sys.stderr.write(f"dflash-ops: no tmux window: {made.stderr.decode(errors='replace').strip()}\n")
        return None
    return session
