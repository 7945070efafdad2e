"""paramiko, loaded without what it needs for little: whoever in here speaks SSH takes it from this file.

paramiko imports invoke (and with it asyncio, unittest.mock and a YAML reader: 45 of its 100 ms) for `Match exec` in its
own reader of ssh's configuration alone, and does without where invoke is missing. Where there is an ssh to ask, its
reader is not used.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (paramiko carries no types.)

import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from dflash_ops.errors import ConfigError
from dflash_ops.ssh_config import Jump

_spared = "invoke" not in sys.modules and shutil.which("ssh") is not None
if _spared:
    sys.modules["invoke"] = None  # pyright: ignore[reportArgumentType] (Python's word for "can't be imported")
try:
    import paramiko
    from paramiko.agent import AgentSSH
    from paramiko.pkey import PublicBlob
finally:
    if _spared:
        del sys.modules["invoke"]

# paramiko logs tracebacks of its thread; without a handler Python would print them on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

__all__ = ["AgentSSH", "PublicBlob", "paramiko", "read_config"]


def read_config(jump: Jump, file: Path | None) -> dict[str, list[str]]:
    """What paramiko's reader says of a host, for machines without an ssh to ask. ConfigError where it can't say."""
    files = [file] if file else [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    user, _, name = jump.name.rpartition("@")
    config = paramiko.SSHConfig()
    try:
        for each in files:
            if each.is_file() or each == file:
                text = each.read_text(errors="surrogateescape")
                if each == file or each == files[0]:
                    _refuse_includes(text, each)
                config.parse(text.split("\n"))
        found = config.lookup(name)
    except (paramiko.SSHException, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            "the ssh configuration can't be used",
            where=jump.name,
            why=str(error),
            next="correct ~/.ssh/config, or install the ssh client (openssh-client), which reads all of it",
        ) from error
    settings = {
        key: value if isinstance(value, list) else [value] for key, value in dict[str, Any](found).items() if value
    }
    if jump.user or user:
        settings["user"] = [jump.user or user]
    if jump.port is not None:
        settings["port"] = [str(jump.port)]
    return settings


def _refuse_includes(text: str, file: Path) -> None:
    found = re.search(r"^[ \t]*include[ \t=].*$", text, re.IGNORECASE | re.MULTILINE)
    if found:
        raise ConfigError(
            "Include can't be honoured without an ssh client",
            where=str(file),
            why=found[0].strip(),
            next="install openssh-client, or name a file without Include as `ssh_config` in the inventory",
        )
