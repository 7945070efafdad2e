"""Who may do what: users, tokens, roles and access lists in the files where Proxmox VE keeps them.

/etc/pve/user.cfg has one `kind:fields` a line, /etc/pve/priv/token.cfg one `USER@REALM!NAME SECRET` a line. Runs in the
hypervisor; standard library only.
"""

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ops.sandbox import layout

ROOT = "root@pam"
_AUDIT = ("Datastore.Audit", "Mapping.Audit", "Pool.Audit", "SDN.Audit", "Sys.Audit", "VM.Audit")
_USE = ("VM.Backup", "VM.Config.CDROM", "VM.Config.Cloudinit", "VM.Console", "VM.PowerMgmt")
_VM = (
    "VM.Allocate", "VM.Clone", "VM.Config.CPU", "VM.Config.Disk", "VM.Config.HWType", "VM.Config.Memory",
    "VM.Config.Network", "VM.Config.Options", "VM.Migrate", "VM.Snapshot", "VM.Snapshot.Rollback",
)  # fmt: skip
_REST = (
    "Datastore.Allocate", "Datastore.AllocateSpace", "Datastore.AllocateTemplate", "Group.Allocate", "Mapping.Modify",
    "Mapping.Use", "Permissions.Modify", "Pool.Allocate", "Realm.Allocate", "Realm.AllocateUser", "SDN.Allocate",
    "SDN.Use", "Sys.AccessNetwork", "Sys.Console", "Sys.Incoming", "Sys.Modify", "Sys.PowerMgmt", "Sys.Syslog",
    "User.Modify",
)  # fmt: skip
PRIVILEGES: frozenset[str] = frozenset((*_AUDIT, *_USE, *_VM, *_REST))
_ROLES = {
    "Administrator": PRIVILEGES,
    "NoAccess": frozenset[str](),
    "PVEAdmin": PRIVILEGES - {"Permissions.Modify", "Realm.Allocate", "Sys.Modify", "Sys.PowerMgmt"},
    "PVEAuditor": frozenset(_AUDIT),
    "PVEVMAdmin": frozenset(("VM.Audit", *_USE, *_VM)),
    "PVEVMUser": frozenset(("VM.Audit", *_USE)),
}
# Where rights are told of even when nothing was granted there by name.
_PLACES = ("/", "/access", "/access/groups", "/nodes", "/pool", "/sdn", "/storage", "/vms")


@dataclass
class Entry:
    """A role granted to somebody on a path, and on all below it when `propagate`."""

    path: str
    who: str
    role: str
    propagate: bool


@dataclass
class Rights:
    """What the two files say. tokens: "USER@REALM!NAME" -> whether it has only what was granted to itself too."""

    users: dict[str, bool] = field(default_factory=dict[str, bool])
    tokens: dict[str, bool] = field(default_factory=dict[str, bool])
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    roles: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    entries: list[Entry] = field(default_factory=list[Entry])

    @classmethod
    def read(cls) -> "Rights":
        """The files as they are now; without them there is root alone."""
        rights = cls(users={ROOT: True})
        for line in _lines(Path(layout.USERS)):
            kind, *rest = line.split(":")
            match kind, rest:
                case "user", [name, enabled, *_]:
                    rights.users[name] = enabled == "1"
                case "token", [name, _, separated, *_]:
                    rights.tokens[name] = separated != "0"
                case "role", [name, privileges, *_]:
                    rights.roles[name] = frozenset(filter(None, privileges.split(",")))
                case "acl", [propagate, path, names, roles, *_]:
                    for who in names.split(","):
                        rights.entries += [Entry(path, who, role, propagate == "1") for role in roles.split(",")]
                case _:
                    pass
        rights.secrets = dict(line.split(" ", 1) for line in _lines(Path(layout.TOKENS)) if " " in line)
        return rights

    def write(self) -> None:
        """Put both files in their places; the secrets' one is for root alone."""
        lines = [f"user:{name}:{int(enabled)}:0:::::" for name, enabled in self.users.items()]
        lines += [f"token:{name}:0:{int(separated)}::" for name, separated in self.tokens.items()]
        lines += [f"role:{name}:{','.join(sorted(privileges))}:" for name, privileges in self.roles.items()]
        lines += [f"acl:{int(entry.propagate)}:{entry.path}:{entry.who}:{entry.role}:" for entry in self.entries]
        _replace(Path(layout.USERS), "".join(f"{line}\n" for line in lines), 0o640)
        tokens = Path(layout.TOKENS)
        tokens.parent.mkdir(mode=0o700, exist_ok=True)
        _replace(tokens, "".join(f"{name} {secret}\n" for name, secret in self.secrets.items()), 0o600)

    def refusal(self, token: str, secret: str) -> str | None:
        """Why this token does not log in; None when it does."""
        user, _, name = token.partition("!")
        if not name or "@" not in user:
            return "invalid token"
        if not self.users.get(user, False):
            return f"no such user ('{user}')" if user not in self.users else f"user '{user}' is disabled"
        if token not in self.tokens:
            return f"no such token '{name}' for user '{user}'"
        known = self.secrets.get(token, "")
        return None if known and hmac.compare_digest(known.encode(), secret.encode()) else "invalid token value!"

    def role(self, name: str) -> frozenset[str]:
        return _ROLES.get(name) or self.roles.get(name, frozenset())

    def at(self, who: str, path: str) -> dict[str, bool]:
        """privilege -> whether it holds below `path` too, of a user or a token on one path."""
        user, _, token = who.partition("!")
        if user == ROOT:
            of_user = dict.fromkeys(PRIVILEGES, True)
        else:
            of_user = self._granted(user, path) if self.users.get(user) else {}
        if not token or not self.tokens.get(who, True):
            return of_user
        own = self._granted(who, path)
        return {name: own[name] and of_user[name] for name in own.keys() & of_user.keys()}

    def _granted(self, who: str, path: str) -> dict[str, bool]:
        """What the access list gives: the entries nearest to the path replace those further up."""
        found: dict[str, bool] = {}
        for place in _upwards(path):
            entries = [entry for entry in self.entries if entry.who == who and entry.path == place]
            entries = [entry for entry in entries if entry.propagate or place == path]
            if any(entry.role == "NoAccess" for entry in entries):
                found = {}
            elif entries:
                found = {}
                for entry in entries:
                    for name in self.role(entry.role):
                        found[name] = found.get(name, False) or entry.propagate
        return found

    def everywhere(self, who: str) -> dict[str, dict[str, int]]:
        """What /access/permissions tells: path -> privilege -> 1 when it holds below too, without empty paths."""
        places = sorted({*_PLACES, *(entry.path for entry in self.entries)})
        held = {place: self.at(who, place) for place in places}
        return {
            place: {name: int(below) for name, below in sorted(mine.items())} for place, mine in held.items() if mine
        }


def _upwards(path: str) -> list[str]:
    """The path and those above it, from the root down: / , /vms, /vms/200."""
    parts = [part for part in path.split("/") if part]
    return ["/", *("/" + "/".join(parts[: number + 1]) for number in range(len(parts)))]


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text().split("\n") if line]
    except FileNotFoundError:
        return []


def _replace(file: Path, text: str, mode: int) -> None:
    draft = file.with_suffix(".tmp")
    draft.touch(mode)
    draft.chmod(mode)
    draft.write_text(text)
    draft.replace(file)
