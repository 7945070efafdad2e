"""What a run is to start with: the request, what can be wrong with it before anything is sent, and its one command."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

from dflash_ops import gpu_locks
from dflash_ops.answers import answer
from dflash_ops.command import Command, Container, Result
from dflash_ops.errors import ConfigError, UsageFault
from dflash_ops.remote import bundle

STALL_MINUTES = 30.0  # without a new step, until a run is called stalled

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class StartRequest:
    """What `train start` was asked for. gpus: container indices; None: all that the inventory declares, or what the
    container has when it declares none."""

    name: str
    config: str | None
    """None with `like`: that run's own."""
    config_name: str
    """The config's file name on this machine, for its errors."""
    gpus: tuple[int, ...] | None = None
    settings: tuple[str, ...] = ()
    env: str | None = field(default=None, repr=False)
    """The env file's text."""
    resume: str | None = None
    init_from: str | None = None
    release: str | None = None
    client: str = ""
    like: str | None = None
    """A run to repeat: config, settings, secrets and the rest are its own, where this request does not say."""
    restart: int | None = None
    """How often the trainer is started again after an end that can heal."""
    restart_wait: float | None = None
    """Seconds before the first of these starts, doubled each time; None: 10."""
    stall_minutes: float | None = None
    """Without a new step for so long the run is stalled; 0 or None: it never is."""
    notify: tuple[str, ...] | None = field(default=None, repr=False)
    """URLs to tell of its end: webhooks, or what apprise knows."""
    share_gpus: bool = False
    """Whether it starts though others use its GPUs."""


def check_name(name: str) -> str:
    """The name; UsageFault when it can't be one."""
    if not _NAME.fullmatch(name):
        raise UsageFault(
            f"a run can't be called {name!r}",
            why="a name has lower-case letters, digits and inner dashes, at most 40",
            next="--name with such a name",
        )
    return name


def new_run_id(name: str, now: datetime | None = None) -> str:
    """`<name>-YYYYMMDD-HHMMSS-<4 hex>`, UTC. Chosen by the client, so that a retry can't start a second trainer."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_url(url: str) -> str:
    """A URL to notify; UsageFault, which doesn't show it, when it can't be one."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", url):
        raise UsageFault(
            "--notify needs a URL", why="what was given has no scheme, or spaces", next="--notify https://..."
        )
    try:
        parts = urlsplit(url)
        named = parts.scheme not in ("http", "https") or (parts.hostname and (parts.port is None or parts.port))
    except ValueError:
        parts, named = None, False
    if parts is None or not named:
        raise UsageFault(
            "--notify needs a URL", why="what was given names no host or a bad port", next="--notify https://..."
        )
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        raise UsageFault(
            "a webhook takes no user and password in its URL",
            why="they would not be sent",
            next="apprise sends them, with them percent-encoded: --notify jsons://USER:PASSWORD@HOST/PATH",
        )
    return url


def parse_gpus(text: str, container: Container) -> tuple[int, ...] | None:
    """`all`, `none` or container indices such as `0,2`; None means all that are declared."""
    if text == "all":
        return None
    if text == "none":
        return ()
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageFault(f"--gpus {text!r} is not a list of GPUs", next="--gpus 0,1 or all or none")
    gpus = tuple(int(word) for word in words)
    if len(set(gpus)) != len(gpus):
        raise UsageFault(f"--gpus {text} names a GPU twice", next="name each once")
    known = len(container.gpus)
    if known and max(gpus) >= known:
        raise UsageFault(
            f"--gpus {text} names a GPU that the container does not have",
            where=str(container),
            why=f"the inventory gives it {known}, numbered from 0",
            next=f"--gpus {','.join(map(str, range(known)))}",
        )
    return gpus


def env_names(text: str, file: str) -> list[str]:
    """The names that an env file sets; ConfigError with file and line for what is no KEY=VALUE line.

    Values are taken to the end of the line as they are: no quotes, no expansion. They never appear in an error.
    """
    names: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if "\0" in line:
            raise ConfigError(
                "the env file has a NUL byte, which no environment can hold",
                where=f"{file}:{number}",
                next="remove it; the file is text",
            )
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, _ = line.partition("=")
        if not sign or not _ENV_NAME.fullmatch(name.strip()):
            raise ConfigError(
                "the env file has a line that sets nothing", where=f"{file}:{number}", next="write it as KEY=VALUE"
            )
        names.append(name.strip())
    return names


def start_command(
    container: Container,
    request: StartRequest,
    run_id: str,
    *,
    check_instead_of: str | None = None,
    uuids: Sequence[str] | None = None,
) -> Command:
    """The one command of a start: GPU locks on the host, the start script in the container. check_instead_of: a run
    that goes on and whose place this one shall take: then nothing is started, locked or changed, but all is checked.
    uuids: of the GPUs to lock, where they are known; else the inventory's indices say which."""
    declared = tuple(range(len(container.gpus))) or None
    gpus = declared if request.gpus is None else request.gpus
    parameters = {
        "path": container.path,
        "python": container.python,
        "run_id": run_id,
        "name": request.name,
        "release": request.release,
        "gpus": gpus,
        "config": request.config,
        "config_name": request.config_name,
        "env": request.env,
        "env_names": env_names(request.env, "env file") if request.env is not None else [],
        "set": list(request.settings),
        "resume": request.resume,
        "init_from": request.init_from,
        "client": request.client,
        "like": request.like,
        "restart": request.restart,
        "restart_wait": request.restart_wait,
        "stall_minutes": request.stall_minutes,
        "notify": request.notify,
        "share_gpus": request.share_gpus,
        "check_only": check_instead_of is not None,
        "instead_of": check_instead_of,
        "locks": None
        if check_instead_of is not None or not (container.gpus and gpus)
        else "told"
        if uuids
        else "meant",
        # As environment.wanted, which is above this file.
        "environment": {
            "pins": asdict(container.pins),
            "check": container.env_check,
            "gpus": bool(container.gpus),
        },
    }
    if check_instead_of is not None:
        return bundle.command(container.python, "start", parameters)
    return bundle.command(
        container.python, "start", parameters, mark=run_id, host_prefix=gpu_locks.words(container, gpus or (), uuids)
    )


def checked(result: Result) -> tuple[str, ...]:
    """What a start that only checked could not check; OpsError for what is in its way."""
    return tuple(answer(result)["notes"])
