"""gpu_status: one question to the host and one to each of its containers, side by side."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from dflash_ops import gpu_join, gpus
from dflash_ops.command import Container, Host
from dflash_ops.errors import OpsError
from dflash_ops.shell import Shell

_SECONDS = gpus.SMI_SECONDS + 5.0


def gpu_status(
    shell: Shell, host: Host, containers: Sequence[Container], own: Container | None = None
) -> gpus.GpuStatus:
    """The GPUs of a host and who holds them. A container that can't be asked becomes a problem in the answer; the host
    must answer, or its error is raised. own: the container that a process's owner is told for."""
    here = [container for container in containers if container.host == host]
    if own is not None and own.host == host:
        here.insert(0, own)
    # Two names of the same container and folder would only say the same twice.
    here = list({(container.vmid, container.path): container for container in reversed(here)}.values())[::-1]
    with ThreadPoolExecutor(max_workers=len(here) + 1) as pool:
        view = pool.submit(shell.ask, host, gpus.host_query(), timeout=_SECONDS)
        # Every one of them: two may be the same container with its runs in two folders.
        asked = [(container.vmid, pool.submit(_ask, shell, container)) for container in here]
    answers = [(vmid, future.result()) for vmid, future in asked]
    insides = gpu_join.by_vmid([(vmid, it) for vmid, it in answers if not isinstance(it, OpsError)])
    status = gpu_join.join(str(host), view.result(), insides, own.vmid if own else None)
    problems = dict.fromkeys(str(it) for _, it in answers if isinstance(it, OpsError))
    return replace(status, problems=(*status.problems, *problems))


def _ask(shell: Shell, container: Container) -> dict[str, Any] | OpsError:
    try:
        return shell.ask(container, gpus.container_query(container), timeout=_SECONDS)
    except OpsError as error:
        return error
