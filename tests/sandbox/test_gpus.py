"""The fake GPUs: charged to whom opened them, for as long as anybody holds what was opened, as CUDA does it."""

import os
from collections.abc import Generator

import pytest
from sandbox_client import Client, retry_until

from dflash_ops.sandbox import nvidia
from dflash_ops.sandbox.state import SandboxState

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has GPUs of its own")  # noqa: PTH110

APPS = "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name --format=csv,noheader,nounits"
USED = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
SLEEP = "import time; print(1, flush=True); time.sleep(1000)"
# The parent opens the devices, forks, and leaves a child that holds them.
FORK = "import os, time; pid = os.fork(); pid and print(pid, flush=True); time.sleep(1000)"


@pytest.fixture(autouse=True)
def _free_again(client: Client) -> Generator[None]:
    yield
    for vmid in (200, 201):
        client.inside(vmid, "pkill -9 -f time.sleep.1000")
    retry_until(lambda: client.run(USED).text.split() == ["0", "0"])


def start(
    client: Client, state: SandboxState, vmid: int, program: str = SLEEP, environment: str = ""
) -> tuple[int, int]:
    """Start a Python of a run in a container: its pid there, and the number that it prints."""
    script = 'rm -f /run/said; exec env -i DFLASH_RUN_ID=r $3 "$1" -c "$2" > /run/said 2>/dev/null & echo $!'
    pid = int(client.text(vmid, f"setsid sh -c '{script}' sh " + '"$@"', state.python, program, environment))
    said = retry_until(lambda: client.inside(vmid, "cat /run/said").text.strip())
    return pid, int(str(said))


def apps(client: Client, vmid: int | None = None) -> list[list[str]]:
    text = client.run(APPS).text if vmid is None else client.text(vmid, APPS)
    return [line.split(", ") for line in text.strip().split("\n") if line]


@pytest.mark.parametrize("vmid", [200, 201])
def test_each_side_sees_its_own_pids(client: Client, proxmox: SandboxState, vmid: int) -> None:
    pid, _ = start(client, proxmox, vmid, environment="CUDA_VISIBLE_DEVICES=1")
    uuids = [line.split("UUID: ")[1].rstrip(")") for line in client.run("nvidia-smi -L").text.strip().split("\n")]
    [inside] = apps(client, vmid)
    [outside] = apps(client)
    assert inside[:3] == [uuids[1], str(pid), "1542"]
    assert "python" in inside[3]
    assert client.run(f"grep NSpid /proc/{outside[1]}/status").text.split() == ["NSpid:", outside[1], str(pid)]
    # The neighbour sees the memory taken, and nobody who took it.
    assert apps(client, 401 - vmid) == []
    assert client.text(401 - vmid, USED).split() == ["0", str(1542 + nvidia.OVERHEAD_MIB)]
    holders = client.text(vmid, "find /proc/[0-9]*/fd -lname /dev/nvidia1 2>/dev/null | cut -d/ -f3")
    assert holders == str(pid)


def test_a_dead_parent_is_charged_and_its_living_child_is_not_listed(client: Client, proxmox: SandboxState) -> None:
    parent, child = start(client, proxmox, 200, FORK, "CUDA_VISIBLE_DEVICES=0 DFLASH_SANDBOX_GPU_MIB=700")
    client.text(200, 'kill -9 "$1"', str(parent))
    retry_until(lambda: client.inside(200, 'kill -0 "$1"', str(parent)).code)
    assert [row[1:] for row in apps(client, 200)] == [[str(parent), "700", "[Not Found]"]]
    assert [row[2:] for row in apps(client)] == [["700", "[Not Found]"]]
    client.text(200, 'kill -9 "$1"', str(child))
    retry_until(lambda: apps(client) == [])
    assert client.text(200, USED).split() == ["0", "0"]


def test_a_dead_container_frees_its_gpus(client: Client, proxmox: SandboxState) -> None:
    client.run("pct start 202")
    start(client, proxmox, 202)
    assert len(apps(client)) == 2
    client.run("pct stop 202")
    retry_until(lambda: apps(client) == [])


def test_without_a_run_nothing_is_opened(client: Client, proxmox: SandboxState) -> None:
    script = "import os; os.system(f'ls -l /proc/{os.getpid()}/fd')"
    for environment in ("A=b", "DFLASH_RUN_ID=r CUDA_VISIBLE_DEVICES="):
        listed = client.text(200, f'env {environment} "$1" -c "$2"', proxmox.python, script)
        assert "0 -> " in listed and "nvidia" not in listed


def test_an_inherited_program_of_another_kind_holds_too(client: Client, proxmox: SandboxState) -> None:
    become = "import os; print(1, flush=True); os.execvp('sleep', ['sleep', '987'])"
    pid, _ = start(client, proxmox, 201, become, "CUDA_VISIBLE_DEVICES=0")
    assert [row[1] for row in apps(client, 201)] == [str(pid)]
    client.text(201, "pkill -x sleep")


def test_answers_have_the_real_ones_forms(client: Client) -> None:
    answer = client.run("nvidia-smi --query-gpu=index,clocks.sm,fan.speed,memory.total --format=csv").text.split("\n")
    assert answer[0] == "index, clocks.current.sm [MHz], fan.speed [%], memory.total [MiB]"
    assert answer[1] == "0, 1200 MHz, [N/A], 24576 MiB"
    assert client.run(APPS.replace("gpu_uuid", "timestamp")).out == b""
    unknown = client.run("nvidia-smi --query-gpu=index,nonsense --format=csv")
    assert (unknown.code, unknown.err) == (2, b"")
    assert unknown.out.startswith(b'Field "nonsense" is not a valid field to query.')
    offered = client.text(200, "nvidia-smi --help-query-gpu")
    assert '"memory.used"' in offered and '"clocks_event_reasons.active"' in offered
    assert client.run("nvidia-smi -i 1 --query-gpu=index --format=csv,noheader").out == b"1\n"
    assert client.run("nvidia-smi --nonsense").code == 2
    assert client.run("nvidia-smi").code == 0
