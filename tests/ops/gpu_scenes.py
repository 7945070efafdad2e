"""Scenes of processes on GPUs: built in a container or on a host, looked at, and ended. Runs there by itself.

`python gpu_scenes.py FOLDER` reads one JSON document from stdin, {"build": scenes} or {"end": processes}, and answers
with one: what was made, or what of them was still alive. Each process is a `sleep` whose environment says what it is
of; what opened the device is charged with the memory, as CUDA's driver does it. Standard library only.
"""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from pathlib import Path

# What `build` knows, with the owner of each process that it makes.
KINDS = ("trainer", "dead parent", "double fork", "workers", "zombie", "reused pid", "stranger", "other folder", "live")


def main() -> None:
    asked = json.load(sys.stdin)
    if "build" in asked:
        print(json.dumps([process for scene in asked["build"] for process in Scene(Path(sys.argv[1]), scene).build()]))
    else:
        alive = [it for it in asked["end"] if start_of(it["pid"]) == it["start"]]
        print(json.dumps(alive))
        for it in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(it["pid"], signal.SIGKILL)


def start_of(pid: int) -> "int | None":
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def open_gpu(index: int, mib: int) -> None:
    device = os.open(f"/dev/nvidia{index}", os.O_RDWR)
    os.set_inheritable(device, True)
    with socket.socket(socket.AF_UNIX) as connection:
        for path in ("/dev/nvidia-sandbox", "/run/sandbox-gpu.sock"):
            with contextlib.suppress(OSError):
                connection.connect(path)
                break
        connection.sendall(json.dumps({"open": f"nvidia{index}", "mib": mib}).encode() + b"\n")
        slot = json.loads(connection.makefile("rb").readline())["slot"]
        import fcntl

        fcntl.fcntl(device, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))


class Scene:
    def __init__(self, path: Path, scene: dict) -> None:
        self.folder = path / "runs" / scene["run_id"]
        self.kind, self.gpu, self.mib, self.deaf = scene["kind"], scene["gpu"], scene["mib"], scene["deaf"]
        self.over = scene["over"]
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "DFLASH_RUN_ID": scene["run_id"],
            "DFLASH_RUN_DIR": str(self.folder),
        }
        self.found: list[dict] = []
        self.reader, self.writer = os.pipe()

    def build(self) -> list[dict]:
        getattr(self, self.kind.replace(" ", "_"))()
        os.close(self.writer)
        return self.found

    # -- the kinds

    def trainer(self) -> None:
        self.record()
        self.add(self.fork(lambda: (self.open(), self.sleep())), "earlier")

    def dead_parent(self) -> None:
        self.record()
        self.add(self.grandchild(lambda: self.open(), lambda: None), "earlier", dead=True)

    def double_fork(self) -> None:
        self.record()
        self.add(self.grandchild(lambda: None, lambda: (os.setsid(), self.open())), "earlier")

    def workers(self) -> None:
        self.record()

        def parent() -> None:
            self.open()
            pids = [self.fork(self.sleep) for _ in range(3)]
            self.tell(pids)
            self.sleep()

        self.add(self.fork(parent), "earlier")
        for pid in self.hear():
            self.add(pid, "earlier")

    def zombie(self) -> None:
        self.record()

        def parent() -> None:
            dead = self.fork(lambda: (self.open(), os._exit(0)))
            os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
            self.open()
            self.sleep()

        self.add(self.fork(parent), "earlier")

    def reused_pid(self) -> None:
        pid = self.fork(lambda: (self.open(), self.sleep({"PATH": "/usr/bin:/bin"})))
        self.add(pid, "unknown")
        self.record(child={"pid": pid, "start": self.found[-1]["start"] - 1})

    def stranger(self) -> None:
        self.add(self.fork(lambda: (self.open(), self.sleep({"PATH": "/usr/bin:/bin"}))), "unknown")

    def other_folder(self) -> None:
        self.record()
        other = {**self.environment, "DFLASH_RUN_DIR": "/opt/elsewhere/runs/x"}
        self.add(self.fork(lambda: (self.open(), self.sleep(other))), "unknown")

    def live(self) -> None:
        supervisor = self.fork(lambda: self.sleep({"PATH": "/usr/bin:/bin"}))
        self.add(supervisor, "run", holds=False)
        self.add(self.fork(lambda: (self.open(), self.sleep())), "run")
        self.record(supervisor=self.found[-2], child=self.found[-1])

    # -- their parts

    def open(self) -> None:
        open_gpu(self.gpu, self.mib)

    def sleep(self, environment: "dict[str, str] | None" = None) -> None:
        if self.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execve("/bin/sleep", ["sleep", "1000"], environment or self.environment)

    def fork(self, body) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(null, descriptor)
                body()
            finally:
                os._exit(1)
        return pid

    def grandchild(self, before, after) -> int:
        """Forks twice; `before` happens in the child, which is killed, `after` in its child, which stays."""

        def child() -> None:
            os.setpgid(0, 0)
            before()
            pid = self.fork(lambda: (after(), self.sleep()))
            self.tell([pid])
            os.kill(os.getpid(), signal.SIGKILL)

        os.waitpid(self.fork(child), 0)
        return self.hear()[0]

    def tell(self, pids: list[int]) -> None:
        os.write(self.writer, json.dumps(pids).encode() + b"\n")

    def hear(self) -> list[int]:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.reader, 1)
        return json.loads(data)

    def add(self, pid: int, owner: str, *, dead: bool = False, holds: bool = True) -> None:
        # Until it has become a sleep its environment is ours, and it may not have opened the device.
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}/comm").read_text().strip() != "sleep":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        it = {"pid": pid, "start": start_of(pid), "owner": owner, "kind": self.kind, "holds": holds}
        self.found.append({**it, "gpu": self.gpu, "dead_parent": dead, "run_id": self.folder.name})

    def record(self, **state: dict) -> None:
        """The run's folder. Without a living supervisor it is over: it ended, or it is lost."""
        self.folder.mkdir(parents=True)
        (self.folder / "run.json").write_text("{}")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        nobody = {"pid": 2**22 - 1, "start": 1}
        identity = {name: {"pid": it["pid"], "start": it["start"]} for name, it in state.items()}
        record = {"boot_id": boot, "supervisor": nobody, **identity}
        (self.folder / "state.json").write_text(json.dumps(record))
        if self.over == "ended" and self.kind != "live":
            (self.folder / "exit.json").write_text('{"code": 1}')


if __name__ == "__main__":
    assert re.fullmatch(r"/[\w/-]+", sys.argv[1])
    main()
