"""The command line as a process: what it prints where, its exit codes, one line for each mistake."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import tomllib
from pathlib import Path

import pytest
from conftest import Box, Cli, write_inventory
from in_process import InProcess

from dflash_ops.render import clean, size


def one_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """What stderr says, when that is one line, and stdout nothing."""
    assert done.stdout == b""
    text = done.stderr.decode()
    assert text.startswith("dflash-ops: ") and text.endswith("\n") and text.count("\n") == 1
    return text


def tree(folder: Path) -> Path:
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__init__.py").write_text("")
    (folder / "trainer" / "a.py").write_text("a = 1\n")
    return folder


# -- deploy, releases, rollback, put


def test_a_day_of_deploys(cli: Cli, tmp_path: Path) -> None:
    here = tree(tmp_path / "here")
    done = cli("deploy", cwd=here)
    assert done.returncode == 0 and done.stderr == b""
    words = done.stdout.decode().split()
    first = words[1]
    assert "2 files," in done.stdout.decode() and done.stdout.decode().endswith(" s\n")
    (here / "trainer" / "b.py").write_text("b = 1\n")
    cli = InProcess(cli.inventory)  # what follows proves words, not the process
    document = json.loads(cli("deploy", str(here), "--json").stdout)
    assert document["schema_version"] == 1 and document["previous"] == first
    assert (document["files"], document["size"], document["commit"]) == (3, 12, None)
    assert document["sent"] > 0 and document["seconds"] > 0
    second = document["release"]
    listed = json.loads(cli("releases", "--json").stdout)
    assert [(item["id"], item["current"]) for item in listed["releases"]] == [(first, False), (second, True)]
    table = cli("releases").stdout.decode()
    assert first in table and f"*   {second}" in table.replace("*  ", "*   ").replace("    ", "   ")
    assert f"{first} is current" in cli("rollback").stdout.decode()
    assert json.loads(cli("rollback", second, "--json").stdout)["previous"] == first
    file = tmp_path / "data.jsonl"
    file.write_text("{}\n")
    assert b"/shared/data/data.jsonl\n" in cli("put", str(file), "shared/data/").stdout
    assert json.loads(cli("put", str(file), "shared/data/", "--json").stdout)["unchanged"] == 1


def test_a_careful_deploy(box: Box, tmp_path: Path) -> None:
    cli, here = InProcess(box.inventory), tree(tmp_path / "here")
    (here / ".env").write_text("TOKEN=x\n")
    done = cli("deploy", "--dry-run", cwd=here)
    assert b"would send 2 files, 6 B" in done.stdout and b"+ trainer/__init__.py\n" in done.stdout
    assert done.stderr.decode().startswith("dflash-ops: left out .env: it looks like a secret; --include names")
    assert json.loads(cli("releases", "--json").stdout)["releases"] == []
    first = json.loads(cli("deploy", "--via", "stream", "--json", cwd=here).stdout)
    assert (first["left_out"], first["via"]) == ([{"path": ".env", "why": "a secret"}], "stream")
    (here / "trainer" / "__init__.py").write_text("b = 2\n")
    done = cli("deploy", "--diff", "--include", ".env", cwd=here)
    assert b"--- current/trainer/__init__.py\n+++ here/trainer/__init__.py\n" in done.stdout and done.stderr == b""
    assert b"+TOKEN=x\n" in done.stdout
    done = cli("deploy", "--no-activate", "--user", "nobody", cwd=here)
    second = done.stdout.decode().split()[1]
    assert f"it is not current; dflash-ops rollback {second} makes it so\n" in done.stdout.decode()
    assert json.loads(cli("deploy", "--dry-run", "--json", cwd=here).stdout)["current"] == first["release"]
    wrong = cli("rollback", second[:-1] + "g")
    assert wrong.returncode == 8 and f"nearest: {second}" in one_line(wrong)
    assert f"would remove {second}" not in cli("prune", "--keep", "1", "--dry-run").stdout.decode()
    assert f"{second} is current" in cli("rollback", second).stdout.decode()
    assert json.loads(cli("prune", "--keep", "0", "--json").stdout)["removed"] == [first["release"]]
    for words in (("rollback", ""), ("deploy", "--user", ""), ("prune",), ("prune", "--keep", "-1")):
        assert cli(*words, cwd=here).returncode == 2, words


def test_the_inventorys_source_is_sent_by_default(box: Box, cli: Cli, tmp_path: Path) -> None:
    tree(tmp_path / "code")
    box.inventory.write_text('source = "code"\n' + box.inventory.read_text())
    done = cli("deploy", cwd=Path("/"))
    assert b"2 files," in done.stdout and b" KiB sent, " in done.stdout and done.stderr == b""
    warned = InProcess(box.inventory)("deploy", "--dry-run", str(tmp_path / "code" / "trainer"))
    assert warned.returncode == 0 and b"warning: there is no trainer/ in " in warned.stderr


def test_the_packaged_trainer_is_sent_where_nothing_else_is_said_and_runs(box: Box, cli: Cli) -> None:
    assert b" files," in cli("deploy", cwd=Path("/")).stdout
    container = box.container
    program = "import trainer; print(trainer.__file__)"
    words = ("sh", "-c", 'cd "$1" && exec "$2" -c "$3"', "sh", f"{container.path}/current/", container.python, program)
    assert cli("exec", "--", *words).stdout.decode().startswith(f"{container.path}/")


def test_steps_are_shown_with_debug_only(cli: Cli, tmp_path: Path) -> None:
    here = tree(tmp_path / "here")
    assert InProcess(cli.inventory)("deploy", cwd=here).stderr == b""
    (here / "new").write_text("new\n")
    steps = [line.split()[0] for line in cli("--debug", "deploy", cwd=here).stderr.decode().split("\n") if line]
    again = ["pct"] * (len(steps) - 6)  # the first did not wait long enough: the machine was busy
    assert steps == ["reading", "staging", "asking", "sending", "pct", *again, "unpacking"]


# -- exec


def test_exec_passes_words_input_output_and_code(cli: Cli) -> None:
    done = cli(
        "exec", "--", "sh", "-c", 'cat; printf "[%s]" "$@" >&2; exit 9', "sh", "a b", "", "$(id)", stdin=b"\0\xff"
    )
    assert (done.returncode, done.stdout, done.stderr) == (9, b"\0\xff", b"[a b][][$(id)]")


def test_exec_passes_words_of_any_bytes(cli: Cli) -> None:
    odd = [b"\xff\x80", "é".encode(), b"--", b"-n", b"\n", b"'"]
    assert cli("exec", "printf", "[%s]", *odd).stdout == b"".join(b"[" + word + b"]" for word in odd)
    assert cli("exec", "--", "printf", "[%s]", "--").stdout == b"[--]"


def test_exec_streams_and_a_reader_that_leaves_is_no_error(cli: Cli) -> None:
    client = cli.start("exec", "--", "sh", "-c", "while echo y; do :; done")
    assert client.stdout is not None and client.stderr is not None and client.stdin is not None
    assert client.stdout.readline() == b"y\n"
    client.stdout.close()
    assert client.wait(timeout=30) == 141
    assert client.stderr.read() == b""
    client.stderr.close()
    client.stdin.close()


def test_streams_that_are_closed_or_full(cli: Cli) -> None:
    def through_a_shell(*words: str, redirected: str) -> subprocess.CompletedProcess[bytes]:
        line = shlex.join([os.fsdecode(word) for word in cli.words(*words)]) + " " + redirected
        return subprocess.run(["sh", "-c", line], env=cli.environment(), capture_output=True)

    for redirected, out, err in (("<&-", b"out\n", b"err\n"), (">&-", b"", b"err\n"), ("2>&-", b"out\n", b"")):
        done = through_a_shell("exec", "sh", "-c", "cat; echo out; echo err >&2; exit 5", redirected=redirected)
        assert (done.returncode, done.stdout, done.stderr) == (5, out, err), redirected
    assert through_a_shell("releases", redirected=">&-").stderr == b""
    failed = through_a_shell("put", "x", redirected="2>&-")
    assert (failed.returncode, failed.stdout) == (2, b"")
    for words in (("releases",), ("releases", "--json"), ("exec", "echo", "hi"), ("train", "start", "--help")):
        done = through_a_shell(*words, redirected=">/dev/full")
        assert done.returncode == 1 and "the output can't be written: No space left on device" in one_line(done)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_told_of_by_the_exit_code_alone(cli: Cli, unbuffered: str, soak: bool) -> None:
    """That of a program which SIGPIPE ends, be it help, a line, a table, or a document that waits for the last flush;
    of a command that failed, its own."""
    cases = {("--help",): 141, ("--version",): 141, ("releases",): 141, ("releases", "--json"): 141, ("rollback",): 8}
    if unbuffered and not soak:  # a line, which ends at its first byte then, and a failure
        cases = {words: code for words, code in cases.items() if words in (("--version",), ("rollback",))}
    for words, code in cases.items():
        reading, writing = os.pipe()
        os.close(reading)
        environment = {**cli.environment(), "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(cli.words(*words), env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=60)
        os.close(writing)
        assert (done.returncode, done.stderr == b"") == (code, code == 141), (words, done.stderr)


@pytest.mark.parametrize("stream", ["gone", "/dev/full"])
def test_a_failure_keeps_its_own_code_where_it_can_not_be_told(
    cli: Cli, tmp_path: Path, stream: str, soak: bool
) -> None:
    """Wrong words, an error, and a verdict that is shown on stdout, in a document or for people."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("hosts = 1\n")
    check = ("inventory", "check", "--inventory", str(wrong))
    cases = {
        ("nosuch",): 2,
        ("train", "start", "--bogus"): 2,
        ("releases", "--inventory", "/nonexistent"): 3,
        check: 3,
        (*check, "--json"): 3,
        ("exec", "--timeout", "nan", "true"): 2,
        (): 2,
    }
    if stream == "gone" and not soak:  # one each of what the full disk below has all of
        cases = {words: code for words, code in cases.items() if words in (("nosuch",), check, (*check, "--json"))}
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full:
        for words, code in cases.items():
            output = writing if stream == "gone" else full
            done = subprocess.run(cli.words(*words), env=cli.environment(), stdout=output, stderr=output, timeout=60)
            assert done.returncode == code, words
    os.close(writing)


def test_ctrl_c_ends_it_with_a_line(cli: Cli) -> None:
    client = cli.start("exec", "--", "sh", "-c", "echo started; sleep 60")
    assert client.stdout is not None
    assert client.stdout.readline() == b"started\n"
    client.send_signal(signal.SIGINT)
    out, err = client.communicate(timeout=30)
    assert (client.returncode, out) == (130, b"")
    assert err.startswith(b"dflash-ops: left sh -c 'echo started; sleep 60'") and err.count(b"\n") == 1, err


PRESSED = """
import os, signal, sys
class Pressed:  # while the module of that name is looked for
    def find_spec(self, name, path=None, target=None):
        if name == pressed_at:
            os.kill(os.getpid(), signal.SIGINT)
pressed_at = sys.argv.pop(1)
sys.meta_path.insert(0, Pressed())
"""


@pytest.mark.parametrize("module", ["dflash_ops.cli", "typer", "dflash_ops.render", "dflash_ops.cli_deploy"])
def test_ctrl_c_while_it_loads_ends_it_in_silence(module: str, soak: bool) -> None:
    """As the installed script begins; who started it may have Ctrl-C ignored (`&` in a script)."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    entry, _, function = project["project"]["scripts"]["dflash-ops"].partition(":")
    words = [sys.executable, "-c", f"{PRESSED}from {entry} import {function}\n{function}()", module]
    done = subprocess.run([*words, "deploy", "--help"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    if module != "dflash_ops.render" and not soak:
        return
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", ignored, *words, "deploy", "--help"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_exec_gives_up_after_silence(cli: Cli) -> None:
    done = cli("exec", "--timeout", "0.5", "--", "sleep", "60")
    assert done.returncode == 124 and "no answer within 0.5 s" in one_line(done)


@pytest.mark.parametrize("seconds", ["nan", "0", "-1"])
def test_a_time_to_wait_is_above_nothing(cli: Cli, seconds: str) -> None:
    done = cli("exec", "--timeout", seconds, "true")
    assert done.returncode == 2 and "no time to wait" in one_line(done)


def test_its_version_needs_no_inventory() -> None:
    done = subprocess.run([sys.executable, "-m", "dflash_ops", "--version"], capture_output=True, timeout=60)
    assert done.returncode == 0 and re.fullmatch(rb"dflash-ops \d+\.\d+\S*\n", done.stdout), done


# -- mistakes


def test_a_user_that_no_passwd_file_knows(cli: Cli, tmp_path: Path) -> None:
    # Nor a service beside the file: without nsswitch.conf there is none.
    line = 'for file in passwd nsswitch.conf; do mount --bind /dev/null /etc/$file || exit; done; exec "$@"'
    words = ("unshare", "-m", "sh", "-c", line, "sh", *cli.words("deploy"))
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    environment = {name: value for name, value in cli.environment().items() if name not in names}
    done = subprocess.run(words, cwd=tree(tmp_path / "here"), env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    environment.setdefault("XDG_STATE_HOME", str(Path("~/.local/state").expanduser()))  # where the sandbox's state is
    del environment["HOME"]
    done = subprocess.run(words, cwd=tmp_path / "here", env=environment, capture_output=True)
    assert done.returncode == 3 and "Next: set HOME" in one_line(done)


def test_the_working_folder_is_gone(cli: Cli, tmp_path: Path) -> None:
    environment = cli.environment()
    for words, named in ((("releases",), False), (("deploy",), True)):
        gone = tmp_path / "gone"
        gone.mkdir()
        line = 'rmdir "$PWD"; exec ' + shlex.join([os.fsdecode(word) for word in cli.words(*words)])
        known = environment if named else {**environment, "DFLASH_OPS_INVENTORY": ""}
        done = subprocess.run(["sh", "-c", line], cwd=gone, env=known, capture_output=True)
        assert done.returncode == 3 and "the working folder is gone" in one_line(done)


def test_no_inventory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_OPS")}
    words = Cli(tmp_path).words("releases")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 3 and "no inventory" in one_line(done)


def test_every_mistake_is_one_line_and_its_code(box: Box, cli: Cli, tmp_path: Path) -> None:
    right = box.inventory.read_text()
    host = box.host
    assert host.known_hosts is not None

    def direct(**changes: object) -> str:
        """The same host without the sandbox's help, so that each thing can be wrong."""
        keys = {"address": host.address, "port": host.port, "user": "root", "key": str(host.key)}
        keys |= {"known_hosts": str(host.known_hosts)} | changes
        table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        explicit = right.replace('python = "sandbox"', f'python = "{box.container.python}"')
        return explicit.replace(f'sandbox = "{box.sandbox.name}"', table)

    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    changed = tmp_path / "changed"
    changed.write_text(f"[{host.address}]:{host.port} {other.with_suffix('.pub').read_text()}")
    cases: list[tuple[int, str, str]] = [
        (3, "is not TOML", "hosts = ["),
        (3, "nearest: vmid", right + "vmdi = 200\n"),
        (3, "containers.trainer.vmid", right.replace("vmid = 200", 'vmid = "200"')),
        (3, "hosts: box; nearest: box", right.replace('host = "box"', 'host = "bx"')),
        (4, "the host can't be reached", direct(port=1)),
        (4, "no such host", direct(address="nowhere.invalid")),
        (4, "the host refused our key", direct(key=str(other))),
        (5, "is not known", direct(known_hosts=str(tmp_path / "none"))),
        (5, "has changed", direct(known_hosts=str(changed))),
        (6, "container 202 is stopped", right.replace("vmid = 200", "vmid = 202")),
        (8, "there is no container 777", right.replace("vmid = 200", "vmid = 777")),
        (6, "there is no Python", right.replace('"sandbox"\npath', '"/no/python3"\npath')),
        (8, "dflash-ops sandbox up", right.replace(box.sandbox.name, "not-there")),
    ]
    here, ran = tree(tmp_path / "here"), set[int]()
    for code, says, text in cases:
        box.inventory.write_text(text)
        run = InProcess(box.inventory) if code in ran else cli  # of each code the first one is a process
        ran.add(code)
        done = run("deploy", cwd=here)
        assert (done.returncode, says in one_line(done)) == (code, True), (says, done)
    box.inventory.write_text(right)
    empty = tmp_path / "empty"
    empty.mkdir()
    for code, says, words in [
        (6, "nothing to deploy", ["deploy", str(empty)]),
        (8, "no such folder", ["deploy", str(tmp_path / "gone")]),
        (8, r"gone\xff", ["deploy", os.fsencode(tmp_path / "gone") + b"\xff\n"]),  # only a process gets such a word
        (8, "nearest: trainer", ["releases", "-t", "trianer"]),
        (8, "there are no releases yet", ["rollback"]),
        (2, "put needs a file and a place", ["put", "x"]),
        (2, "only below shared/", ["put", "/etc/hostname", "/etc/"]),
    ]:
        text = all(isinstance(word, str) for word in words)
        done = (InProcess(box.inventory) if text else cli)(*words)
        assert (done.returncode, says in one_line(done)) == (code, True), (says, done)
    assert cli("exec").returncode == 2 and cli("no-such-verb").returncode == 2


def test_a_traceback_comes_with_debug_only_and_shows_no_variable(cli: Cli, tmp_path: Path) -> None:
    gone = str(tmp_path / "secret-gone")
    quiet, loud = cli("deploy", gone).stderr.decode(), cli("--debug", "deploy", gone).stderr.decode()
    assert "Traceback" not in quiet
    assert "Traceback" in loud and loud.endswith(quiet)
    assert loud.count("secret-gone") == 2  # in the exception's line and in ours


def test_the_environment_chooses_container_and_sandbox(box: Box, cli: Cli, tmp_path: Path, monkeypatch) -> None:
    box.inventory.write_text(
        box.inventory.read_text().replace(box.sandbox.name, "not-there")
        + '[containers.other]\nhost = "box"\nvmid = 201\npython = "sandbox"\n'
    )
    monkeypatch.setenv("DFLASH_OPS_SANDBOX", box.sandbox.name)
    monkeypatch.setenv("DFLASH_OPS_TARGET", "other")
    assert cli("exec", "cat", "/etc/hostname").stdout == b"train201\n"
    assert cli("exec", "-t", "trainer", "cat", "/etc/hostname").stdout == b"train200\n"


def test_an_inventory_may_be_named(box: Box, cli: Cli, tmp_path: Path) -> None:
    elsewhere = write_inventory(tmp_path / "..", box.sandbox.name, vmid=201)
    assert cli("exec", "--inventory", str(elsewhere), "cat", "/etc/hostname").stdout == b"train201\n"
    elsewhere.unlink()


# -- showing


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (2 << 50, "2048.0 TiB")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


def test_what_a_terminal_would_obey_is_shown_as_text() -> None:
    assert clean("a\x1b[31mb\udcff\u202e é ✓") == r"a\x1b[31mb\udcff\u202e é ✓"


def test_help_names_every_verb(cli: Cli) -> None:
    text = cli("--help").stdout.decode()
    verbs = ("deploy", "releases", "rollback", "prune", "put", "get", "exec", "sandbox", "train", "gpu-status")
    assert [verb for verb in verbs if f"  {verb} " not in text] == []


def test_on_a_terminal_the_command_gets_one_too(cli: Cli) -> None:
    """Its size, a new size, keys (Ctrl-C too) and the exit code pass."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(
            sys.executable,
            [os.fsencode(word) for word in cli.words("exec", "--", "sh", "-c", ON_TERMINAL)],
            cli.environment(),
        )
    heard = bytearray()

    def hear(words: bytes) -> None:
        while words not in heard:
            heard.extend(os.read(terminal, 1000))
        heard.clear()

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    hear(b"ready")
    os.write(terminal, b"\n")
    hear(b"20 70")
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    hear(b"33 99")
    os.write(terminal, b"\x03")
    hear(b"interrupted")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)


ON_TERMINAL = """
trap 'stty size' WINCH
trap 'echo interrupted; exit 7' INT
echo ready; read line; stty size
while :; do sleep 0.1; done
"""
