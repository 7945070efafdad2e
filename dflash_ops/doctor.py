"""doctor: asks a host, its container and its GPUs side by side for what would stop a run; checks.py judges."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from dflash_ops import status
from dflash_ops.answers import answer
from dflash_ops.checks import Diagnosis, Facts, judge
from dflash_ops.command import Container, Query, pct
from dflash_ops.errors import OpsError
from dflash_ops.remote import bundle
from dflash_ops.shell import Shell

_SECONDS = 25.0
T = TypeVar("T")


def doctor(shell: Shell, container: Container, *, fix: bool = False) -> Diagnosis:
    """Examines the container and its host; the host must answer, or its error is raised. fix: first does what is
    safe."""
    began = time.time()
    with ThreadPoolExecutor(max_workers=3) as pool:
        host = pool.submit(shell.ask, container.host, _query("python3", None, container.vmid, fix), timeout=_SECONDS)
        inside = pool.submit(_try, lambda: shell.ask(container, _inside(container, fix), timeout=_SECONDS))
        seen = pool.submit(_try, lambda: status.gpu_status(shell, container.host, [container], container))
    told = host.result()
    if told["config"] is None:  # root's alone: pct may be what this user may run
        asked, _ = _try(lambda: shell.run(container.host, pct("config", str(container.vmid)), timeout=_SECONDS))
        if asked is not None and asked.code == 0:
            told["config"] = asked.out.decode("utf-8", "replace")
    told["lacks_pvesh"] = None if container.host.api is not None else shell.lacks_pvesh(container.host)
    # The clock was read some time between the question and the answer; the doubt is in the host's favour.
    skew = max(0.0, told["now"] - time.time()) or min(0.0, told["now"] - began)
    within, refused = inside.result()
    gpus, gpus_refused = seen.result()
    if refused is not None and gpus is not None:  # the check of the container says that already
        gpus = replace(gpus, problems=tuple(it for it in gpus.problems if not it.startswith(refused.what)))
    facts = Facts(told, within, gpus, skew, _words(refused), _words(gpus_refused), refused.next if refused else "")
    fixed = [f"{container.host}: {line}" for line in told["fixed"]]
    fixed += [f"{container}: {line}" for line in (within["fixed"] if within else ())]
    return Diagnosis(str(container), tuple(judge(container, facts)), tuple(fixed))


def _try(verb: Callable[[], T]) -> tuple[T | None, OpsError | None]:
    try:
        return verb(), None
    except OpsError as error:
        return None, error


def _words(error: OpsError | None) -> str:
    """What failed and why; the advice is told apart from it."""
    if error is None:
        return ""
    return f"{error.what}: {error.why}" if error.why else error.what


def _query(python: str, path: str | None, vmid: int, fix: bool) -> Query[dict[str, Any]]:
    parameters = {"path": path, "vmid": vmid, "fix": fix}
    return Query(bundle.command(python, "doctor", parameters, root=path is None), answer)


def _inside(container: Container, fix: bool) -> Query[dict[str, Any]]:
    return _query(container.python, container.path, container.vmid, fix)
