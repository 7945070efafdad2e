"""The borders that the design draws between the parts: who may import what, and what loads what."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPS, TRAINER = ROOT / "dflash_ops", ROOT / "trainer"
EVERY_FILE = sorted([*OPS.rglob("*.py"), *TRAINER.rglob("*.py")])
REMOTE = sorted((OPS / "remote").glob("*.py"))

STARTS_PROCESSES = (
    "dflash_ops/local_process.py", "dflash_ops/ssh_local.py", "dflash_ops/sandbox/", "dflash_ops/remote/",
    "trainer/__main__.py", "trainer/export.py", "trainer/selftest.py",
)  # fmt: skip
SPEAKS_SSH = ("dflash_ops/ssh_library.py", "dflash_ops/sandbox/")
# What a file may import of dflash_ops, for those that know nothing of what is above them.
PURE = {
    "errors": set(),
    "shell_text": set(),
    "command": {"errors", "shell_text"},
    "sudo": {"command", "errors", "gate"},
    "inventory_tables": set(),
    "inventory_lines": set(),
    "inventory_faults": {"inventory_lines", "inventory_tables"},
    "inventory_file": {"errors"},
    "inventory": {
        "command",
        "errors",
        "inventory_faults",
        "inventory_file",
        "inventory_lines",
        "inventory_tables",
        "sandbox",
    },
    "inventory_write": {"errors", "inventory", "inventory_file", "inventory_lines", "inventory_tables"},
    "inventory_probe": {"command", "errors"},
    "proxmox_values": set(),
    "proxmox_gpus": set(),
    "proxmox_faults": {"errors", "proxmox_values"},
    "proxmox_token": {"command", "errors"},
    "release": {"errors", "remote"},
    "known_hosts": set(),
    "ssh_config": {"errors"},
    "ssh_local": {"errors", "ssh_config"},
    "ssh_library": {"errors", "ssh_config"},
    "leaving": set(),
    "ssh_ask": {"errors", "leaving"},
    "ssh_keys": {"ssh_ask", "ssh_config", "ssh_library"},
    "ssh_opening": {"errors", "ssh_config", "ssh_local"},
    "ssh_host_key": {"errors", "known_hosts", "ssh_config", "ssh_opening"},
    "ssh_login": {"errors", "ssh_config", "ssh_keys", "ssh_library", "ssh_local", "ssh_opening"},
    "ssh_hop": {"errors", "known_hosts", "ssh_host_key", "ssh_library", "ssh_local", "ssh_login", "ssh_opening"},
    "ssh_link": {"command", "errors", "ssh_hop", "ssh_library"},
    "ssh": {"command", "errors", "ssh_config", "ssh_hop", "ssh_library", "ssh_link", "ssh_local", "ssh_opening"},
    "terminal": {"leaving"},
    "conversation": {"command", "errors"},
    "gate": {"command", "errors"},
    "connection": {"command", "conversation", "errors", "ssh", "sudo"},
    "upload": {"command", "conversation", "errors", "ssh"},
    "local_process": {"command"},
    "framing": {"command", "conversation", "errors", "shell_text"},
    "shell": {
        "command",
        "connection",
        "conversation",
        "errors",
        "framing",
        "gate",
        "local_process",
        "ssh",
        "sudo",
        "terminal",
        "upload",
    },
    "answers": {"command", "errors"},
    "hints": set(),
    "render": {"errors", "hints"},
}


@functools.cache
def imports(file: Path) -> set[str]:
    """Every module that a file names in an import, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def tops(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", EVERY_FILE, ids=name)
def test_only_the_doors_start_processes_and_speak_ssh(file: Path) -> None:
    if not name(file).startswith(STARTS_PROCESSES):
        assert "subprocess" not in tops(file)
    if not name(file).startswith(SPEAKS_SSH):
        assert not tops(file) & {"paramiko", "fabric"}


@pytest.mark.parametrize("file", sorted(TRAINER.rglob("*.py")), ids=name)
def test_the_trainer_knows_nothing_of_ops(file: Path) -> None:
    assert "dflash_ops" not in tops(file)


@pytest.mark.parametrize("file", sorted((TRAINER / "remote_code").glob("*.py")), ids=name)
def test_what_travels_with_a_drafter_needs_torch_and_transformers_only(file: Path) -> None:
    assert tops(file) <= {"torch", "transformers"} | sys.stdlib_module_names


@pytest.mark.parametrize("file", sorted(OPS.rglob("*.py")), ids=name)
def test_ops_knows_of_the_trainer_only_its_config_and_records(file: Path) -> None:
    # The demo drives the trainer as a user would, by its command line.
    of_trainer = {name for name in imports(file) if name.partition(".")[0] == "trainer"}
    allowed = ("trainer.config", "trainer.records")
    assert {name for name in of_trainer if name != "trainer" and not name.startswith(allowed)} == set()
    assert "torch" not in tops(file) or name(file).startswith("dflash_ops/demo/")


@pytest.mark.parametrize("module", PURE)
def test_a_lower_file_knows_nothing_of_those_above(module: str) -> None:
    ours = {name for name in imports(OPS / f"{module}.py") if name.startswith("dflash_ops.")}
    assert {name.split(".")[1] for name in ours} <= PURE[module]


@pytest.mark.parametrize("file", REMOTE, ids=name)
def test_what_runs_on_the_box_needs_an_old_python_and_nothing_else(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=(3, 9))
    if file.name == "bundle.py":  # packs the others, here
        return
    foreign = {top for top in tops(file) if top not in sys.stdlib_module_names and top != ""}
    assert foreign <= {"dflash_ops"}
    assert {
        name for name in imports(file) if name.startswith("dflash_ops") and not name.startswith("dflash_ops.remote")
    } == set()


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh Python has after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    return set(done.stdout.split("\n")[-2].split())


def test_the_command_line_loads_no_heavy_library() -> None:
    heavy = {"torch", "transformers", "numpy", "paramiko", "fabric", "proxmoxer", "requests", "pydantic"}
    assert loaded_by("import dflash_ops.cli") & heavy == set()


def test_the_trainers_config_loads_no_torch() -> None:
    loaded = loaded_by("import trainer.config, trainer.records")
    assert loaded & {"torch", "transformers", "numpy", "dflash_ops"} == set()
