"""The token that the API is asked with: from a file that nobody else can read, or from a variable.

Its secret leaves this program in one header alone: it is checked to be a UUID before anything else sees it, since a
library that refuses a header says the header's text.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ops.command import Api
from dflash_ops.errors import ConfigError

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_USER = re.compile(r"[^\s:/!@=]+(?:@[^\s:/!@=]+)*@[A-Za-z][A-Za-z0-9._-]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]+", re.ASCII)
_FORM = "the secret alone (a UUID), or USER@REALM!NAME=UUID"
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Token:
    """user: with its realm, `bot@pve`; name: the token's own."""

    user: str
    name: str
    secret: str = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.user}!{self.name}"


def read_token(api: Api, host: str) -> Token | None:
    """The token of a host's API: from its file, where the inventory names one, else from its variable. None when there
    is neither.

    ConfigError: others can read the file, or what is there is no token. host: its name in the inventory, for errors.
    """
    if api.token_file is not None:
        return _token(_private_text(api.token_file, host), api, host, str(api.token_file))
    text = os.environ.get(api.token_env, "").strip("\ufeff \t\r\n")
    return _token(text, api, host, api.token_env) if text else None


def _token(text: str, api: Api, host: str, where: str) -> Token:
    whole, _, secret = text.removeprefix("PVEAPIToken=").rpartition("=")
    if _UUID.fullmatch(secret) is None:  # and not a word of what it is
        raise ConfigError("this is no token of the Proxmox VE API", where=where, why=f"it must hold {_FORM}")
    user, _, name = whole.partition("!")
    key = f"hosts.{host}.api"
    if whole and not (_USER.fullmatch(user) and _NAME.fullmatch(name)):
        raise ConfigError("this is no token of the Proxmox VE API", where=where, why=f"it must hold {_FORM}")
    for said, wanted, word in ((user, api.user, "user"), (name, api.token_name, "token_name")):
        if whole and wanted is not None and said != wanted:
            raise ConfigError(
                f"the token is another one than the inventory's {key}.{word}",
                where=where,
                why=f"it is {user}!{name}, the inventory says {wanted!r}",
                next=f"remove `{word}` from the inventory, or put the other token there",
            )
    user, name = user or api.user or "", name or api.token_name or ""
    if not user or not name:
        raise ConfigError(
            "nothing says whose token it is",
            where=where,
            why="it holds the secret alone",
            next=f"`user` and `token_name` in [{key}], or write it as USER@REALM!NAME=UUID",
        )
    if not (_USER.fullmatch(user) and _NAME.fullmatch(name)):
        raise ConfigError(
            "no name of a token", where=key, why=f"user {user!r}, token_name {name!r}", next="bot@pve and dflash, say"
        )
    return Token(user, name, secret)


def _private_text(file: Path, host: str) -> str:
    """What is in a file that its owner alone can read."""
    key = f"`token_file` of hosts.{host}.api"
    try:
        # A FIFO must not make us wait for its writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            "the token's file can't be read", where=str(file), why=error.strerror or str(error), next=f"correct {key}"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("the token's file is no file", where=str(file), next=f"correct {key}")
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                "the token's file is somebody else's",
                where=str(file),
                why=f"it belongs to user {found.st_uid}",
                next=f"chown {os.geteuid()} {file}",
            )
        if loose := stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                "others can read the token's file" if loose & 0o044 else "others can reach the token's file",
                where=str(file),
                why=f"its mode is {stat.S_IMODE(found.st_mode):04o}",
                next=f"chmod 600 {file}",
            )
        return os.read(descriptor, _MAX_BYTES).decode("utf-8-sig", "replace").strip()
    finally:
        os.close(descriptor)
