"""Starts one run in the container, or refuses before anything has changed.

One script, one lock: nothing of that name lives, the config is one that the release's trainer takes, what earlier runs
of ours left on the GPUs is freed; then the run folder appears whole, the supervisor starts in a session of its own, and
a tmux session shows the log. Asked again for a run id that exists, it answers with that run. With `check_only` it makes
all its checks and changes nothing: so a restart asks before it stops the run `instead_of`. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from dflash_ops.remote import answers, environment, owners, preflight, probe, processes, releases, rundir

# Set by the boot code: the sources that came with this script, by module name; the run keeps its own copy.
SOURCES: dict[str, str] = {}

TOOLS = (
    "answers", "cgroups", "gpuasked", "gpuproof", "kin", "logfile", "notify", "probe", "processes", "rundir", "stop",
    "supervisor", "view", "watch",
)  # fmt: skip
_TOOLS_MAIN = """\
# The tools that this run started with: `python3 ops supervisor RUN_DIR`, `python3 ops view RUN_DIR`.
import importlib, sys
sys.exit(importlib.import_module("dflash_ops.remote." + sys.argv[1]).main(sys.argv[2:]))
"""
_SPAWN_SECONDS = 15.0
_TMUX_SECONDS = 5.0  # two calls, together within the client's 15 s of silence
_FREE_GRACE = 5.0
# The longest that a start holds its lock: all its waits. Another one waits as long, for the holder may be its own first
# try, whose answer was lost.
HOLD_SECONDS = preflight.CHECK_SECONDS + 2 * _FREE_GRACE + _SPAWN_SECONDS + 2 * _TMUX_SECONDS
_SHOW_RELEASES = "dflash-ops releases"
_SHOW_RUNS = "dflash-ops train list"


def main(parameters: dict[str, Any]) -> int:
    return answers.answer_with_beats(Path(parameters["path"]), lambda: start(parameters))


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
        picture = preflight.look(parameters)
        unlocked = preflight.unlocked(parameters, picture)
        if unlocked and parameters["locks"] == "meant":
            return {"lock_instead": unlocked}
        _repeat(path, parameters)
        release = _release(path, parameters["release"])
        draft = folder.with_name(f".{folder.name}.tmp")
        resumed = _resumed(path, parameters["resume"])
        python = environment.python_of(path, parameters["python"])
        if parameters.get("environment"):
            environment.refuse_mismatch(path, release, python, parameters["environment"])
        try:
            said = _prepare(draft, folder, release, python, resumed, parameters)
            if parameters.get("check_only"):
                leaving = _will_be_freed(path, parameters)
                return {"notes": preflight.check(path, parameters, resumed, leaving, picture)}
            freed, removed = _free_stale(path, parameters["name"])
            notes = said + preflight.check(path, parameters, resumed, picture=picture)
            if resumed is not None:
                step = int(rundir.checkpoints(resumed)[-1].removeprefix("step-"))
                notes.append(f"goes on from {resumed.name}, step {step}")
            notes += [f"removed {file}, which an earlier run left" for file in removed]
            if unlocked:
                uuids = ", ".join(unlocked["uuids"])
                notes.append(f"the host's locks of {uuids} did not come in here: another container may take these GPUs")
            os.rename(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        finally:
            if parameters.get("check_only"):
                shutil.rmtree(draft, ignore_errors=True)
        rundir.sync_folder(folder.parent)
        _spawn_supervisor(folder, parameters["python"])
        window = _open_window(folder, parameters)
        return _answer(folder, existing=False, freed=freed, window=window, notes=notes)


def _answer(
    folder: Path, *, existing: bool, freed: list[dict[str, Any]], window: str | None, notes: list[str] | None = None
) -> dict[str, Any]:
    facts = rundir.facts(folder, processes.boot_id())
    return {"existing": existing, "freed": freed, "window": window, "notes": notes or [], "facts": facts}


def _repeat(path: Path, parameters: dict[str, Any]) -> None:
    """With `like`: what the start does not say itself is taken from that earlier run's folder, secrets included."""
    if not parameters.get("like"):
        return
    folder = rundir.find(path, parameters["like"])
    run = rundir.read_run(folder)
    if not run:
        raise answers.Fault("not_found", f"run {folder.name} has no record", f"{folder}/run.json", _SHOW_RUNS)
    try:
        parameters["config"] = (folder / "config.toml").read_bytes().decode("utf-8", "surrogateescape")
        for name in ("env", "notify"):
            if parameters.get(name) is None and (folder / name).exists():
                text = (folder / name).read_bytes().decode("utf-8", "surrogateescape")
                parameters[name] = text if name == "env" else [line for line in text.split("\n") if line]
                if name == "env":
                    parameters["env_names"] = run.get("env_names") or []
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise answers.Fault("not_found", f"run {folder.name} can't be repeated", why, _SHOW_RUNS) from None
    parameters["config_name"] = f"config.toml of {folder.name}"
    parameters["set"] = [*_settings(run), *parameters["set"]]
    for name in ("restart", "stall_minutes"):
        if parameters.get(name) is None:
            parameters[name] = run.get(name)
    if parameters["init_from"] is None:
        parameters["init_from"] = run.get("init_from")
    if parameters["resume"] is None:
        # Before its first checkpoint it stands where it began.
        parameters["resume"] = folder.name if rundir.checkpoints(folder) else run.get("resumes")


def _settings(run: dict[str, Any]) -> list[str]:
    """Its --set words; the run of an earlier dflash-ops has them in its command alone."""
    command: list[str] = run.get("command") or []
    return run.get("settings") or [command[at + 1] for at, word in enumerate(command[:-1]) if word == "--set"]


def _refuse_if_busy(path: Path, parameters: dict[str, Any]) -> None:
    wanted = set(parameters["gpus"] or [])
    for run in rundir.live_runs(path):
        run_id = run["run_id"]
        if run_id == parameters.get("instead_of"):
            continue
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


def _prepare(
    draft: Path, folder: Path, release: Path, python: str, resumed: Path | None, parameters: dict[str, Any]
) -> list[str]:
    """Makes the run's folder under a name that nobody looks at, and has the release check its config; gives what there
    is to say of that. python: the trainer's; `python` of the parameters is what runs the supervisor."""
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        rundir.write_file(draft / "config.toml", parameters["config"].encode("utf-8", "surrogateescape"))
        if parameters["env"] is not None:
            rundir.write_file(draft / "env", parameters["env"].encode("utf-8", "surrogateescape"), mode=0o600)
        if parameters.get("notify"):
            urls = "".join(f"{url}\n" for url in parameters["notify"])
            rundir.write_file(draft / "notify", urls.encode("utf-8", "surrogateescape"), mode=0o600)
        config = preflight.checked_config(draft / "config.toml", release, python, parameters)
        preflight.check_named(config, release, parameters, resumed)
        command = [python, "-m", "trainer", "train", str(folder / "config.toml"), str(folder)]
        if parameters["init_from"]:
            if not (release / parameters["init_from"]).is_dir():  # as the trainer, which runs in the release, finds it
                raise answers.Fault(
                    "not_found", f"no drafter at {parameters['init_from']}", "", "give a folder in the container"
                )
            command += ["--init-from", parameters["init_from"]]
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
            "settings": parameters["set"],
            "init_from": parameters["init_from"],
            "like": parameters.get("like"),
            "git": _git_state(release),
            "restart": parameters.get("restart") or 0,
            "restart_wait": parameters.get("restart_wait"),
            "stall_minutes": parameters.get("stall_minutes") or 0,
            "notified": len(parameters.get("notify") or []),
            "log_part_bytes": parameters.get("log_part_bytes"),
        }
        rundir.write_json(draft / "run.json", run)
        _write_tools(draft / "ops")
        return preflight.on_cpu_all_the_same(config, python, parameters["gpus"])
    except OSError as error:
        if error.errno == errno.EROFS:
            raise
        raise answers.Fault(
            "preflight",
            "the run's folder can't be made",
            f"{error.filename or draft}: {error.strerror}",
            "free disk space",
        ) from None


def _git_state(release: Path) -> dict[str, Any]:
    """What the release's manifest says of the git repository that it came from."""
    manifest = rundir.read_json(release / releases.MANIFEST) or {}
    return {name: manifest[name] for name in ("commit", "dirty", "branch") if name in manifest}


def _resumed(path: Path, run: str | None) -> Path | None:
    if run is None:
        return None
    folder = rundir.find(path, run)
    if not rundir.checkpoints(folder):
        raise answers.Fault("not_found", f"run {folder.name} has no checkpoint", "", "start without --resume")
    return folder


class _Rest:
    """What lives of the runs of this folder that are over and hold a GPU still, or had this name."""

    def __init__(self, path: Path, name: str) -> None:
        self._name, self._ours = name, owners.Owners(path)
        self._above = owners.ancestors()
        self.runs: set[str] = set()

    def processes(self) -> list[processes.Process]:
        left: list[tuple[processes.Process, str]] = []
        for process in processes.table():
            spared = process.ended or process.pid in self._above
            owner = owners.UNKNOWN if spared else self._ours.of(process)
            if owner.kind == "earlier" and owner.run_id is not None:
                left.append((process, owner.run_id))
                if rundir.name_of(owner.run_id) == self._name or probe.minors(process.pid):
                    self.runs.add(owner.run_id)
        return [process for process, run_id in left if run_id in self.runs]

    def clear_up(self) -> list[str]:
        """Removes the runs' empty control groups, and files that carry the id of a run that was ended."""
        self._ours.remove_groups()
        return owners.remove_files(self.runs)


def _will_be_freed(path: Path, parameters: dict[str, Any]) -> set[int]:
    """Pids of the run that will be stopped, and of what the start will end."""
    rest = _Rest(path, parameters["name"])
    run = rundir.facts(path / "runs" / parameters["instead_of"], processes.boot_id())
    return {process.pid for process in [*rest.processes(), *rundir.members(run)]}


def _free_stale(path: Path, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Ends what runs that are over left; says what it ended, and which of their files it removed."""
    rest = _Rest(path, name)
    freed = rest.processes()
    described = [processes.describe(process) for process in freed]
    for process in freed:
        processes.send(process, signal.SIGTERM)
        processes.send(process, signal.SIGCONT)

    def tell(left: float) -> None:
        answers.beat("ending what an earlier run left", left)

    if freed and not processes.wait_until(lambda: not rest.processes(), _FREE_GRACE, every=0.2, on_wait=tell):
        left = processes.kill_all(rest.processes, _FREE_GRACE, on_wait=tell)
        if left:
            first = processes.describe(left[0])
            why = f"process {first['pid']} ({first['command']}) is in state {first['state']}, in {first['wchan']}"
            raise answers.Fault(
                "busy", "an earlier run still holds the GPU and can't be killed", why, "dflash-ops gpu-status"
            )
    return described, rest.clear_up()


def _write_tools(folder: Path) -> None:
    """The run's own copy of what watches it: a newer dflash-ops can't change it under its feet."""
    package = folder / "dflash_ops" / "remote"
    package.mkdir(parents=True)
    (folder / "__main__.py").write_text(_TOOLS_MAIN)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in TOOLS:
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

    def tell(left: float) -> None:
        answers.beat("the supervisor starts", left)

    settled_in_time = processes.wait_until(settled, _SPAWN_SECONDS, every=0.02, on_wait=tell)
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
