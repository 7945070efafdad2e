"""What OpenSSH's configuration says about one host: the reading of `ssh -G`, and what we can honour of it. Pure.

`ssh -G NAME` prints every setting as it applies to NAME, with Include, Match and canonical names done; most files and
commands come with their tokens (%h, %r ...) still in them. A setting that we can't honour and that decides where or as
whom one would arrive is refused with the way out; what only makes ssh laxer than we are (StrictHostKeyChecking no) or
has no meaning here (RequestTTY, ControlMaster, forwardings) is passed over.
"""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_ops.errors import ConfigError

# The values of these files are named tuples: a dataclass of many fields takes milliseconds to make at each start.
Settings = Mapping[str, Sequence[str]]  # a keyword in lower case -> its values, in the order of the file

_IDENTITIES = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519"))
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
_MAX_JUMPS = 8


class Here(NamedTuple):
    """Who and where we are: what `~` and tokens mean. home: that of the user database, as ssh takes it."""

    home: str
    user: str
    uid: int
    hostname: str
    env: Mapping[str, str]


class Jump(NamedTuple):
    """One stop of a ProxyJump, as it is written there."""

    name: str
    user: str | None = None
    port: int | None = None


class Hop(NamedTuple):
    """All that is needed to log in on one host.

    name: as the user or a ProxyJump calls it; plain: the words after `ssh` that lead there without us. known_as: what
    known_hosts calls it; known_bare: the same without a port, where a matching key is good enough for ssh. jumps: the
    stops before it, none where proxy_command is or the way is straight. agent: the socket's path. Algorithms: what is
    allowed, best first; None: as the library likes. lacks: settings that we pass over, told when logging in fails.
    """

    name: str
    hostname: str
    port: int
    user: str
    known_as: str
    known_bare: str | None
    user_known_hosts: tuple[Path, ...]
    global_known_hosts: tuple[Path, ...]
    revoked: Path | None
    identities: tuple[Path, ...]
    certificates: tuple[Path, ...]
    identities_only: bool
    agent: str | None
    proxy_command: str | None
    jumps: tuple[Jump, ...]
    family: int = socket.AF_UNSPEC
    bind_address: str | None = None
    connect_timeout: float | None = None
    ask: bool = True
    compression: bool = False
    check_address: bool = False
    host_key_algorithms: tuple[str, ...] | None = None
    key_algorithms: tuple[str, ...] | None = None
    kex: tuple[str, ...] | None = None
    ciphers: tuple[str, ...] | None = None
    macs: tuple[str, ...] | None = None
    lacks: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


def parse(text: str) -> dict[str, list[str]]:
    """Reads what `ssh -G` printed: a keyword and its value a line, a keyword again for a further value."""
    settings: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, _, value = line.rstrip("\r").partition(" ")
        if key:
            settings.setdefault(key.lower(), []).append(value)
    return settings


def parse_jumps(text: str, where: str) -> tuple[Jump, ...]:
    """Reads ProxyJump: `[user@]host[:port]`, `ssh://...`, with IPv6 in brackets, in the order of travel."""
    jumps: list[Jump] = []
    for word in text.split(","):
        rest = word.strip().removeprefix("ssh://").rstrip("/")
        user, at, rest = rest.rpartition("@")
        match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:\[\]]+)(?::(\d+))?|([^\[\]]*:[^\[\]]*:[^\[\]]*)", rest)
        name = match and (match[1] or match[3] or match[5])
        port = match and (match[2] or match[4])
        if not name or (at and not user) or name.startswith("-") or (port and not 0 < int(port) < 65536):
            raise ConfigError("ProxyJump can't be read", where=where, why=word.strip() or text, next=_correct(where))
        jumps.append(Jump(name, user or None, int(port) if port else None))
    return tuple(jumps)


def hop(name: str, settings: Settings, here: Here, *, jumped: bool = False) -> Hop:
    """What the settings for `name` ask for. ConfigError: they ask for what we can't do.

    jumped: the way to it is given by the ProxyJump that names it, whatever its own settings say of one.
    """

    def one(key: str, default: str = "") -> str:
        values = settings.get(key)
        return values[0] if values else default

    def named(key: str) -> str | None:
        value = one(key)
        return value if value and value.lower() != "none" else None

    def flag(key: str) -> bool:
        return one(key).lower() in ("yes", "true")

    def names(key: str) -> tuple[str, ...] | None:
        return tuple(one(key).split(",")) if named(key) else None

    def files(values: Sequence[str]) -> tuple[Path, ...]:
        return tuple(_file(_expand(value, tokens, here, name), here) for value in values if value.lower() != "none")

    hostname = one("hostname", name)
    port = _number(one("port", "22"), "Port", name)
    user = one("user", here.user)
    alias = named("hostkeyalias")
    tokens = {
        "%": "%", "d": here.home, "h": hostname, "i": str(here.uid), "j": one("proxyjump"), "k": alias or name,
        "L": here.hostname.partition(".")[0], "l": here.hostname, "n": name, "p": str(port), "r": user, "u": here.user,
    }  # fmt: skip
    _refuse(name, named)
    proxy_command = named("proxycommand")
    jump = named("proxyjump")
    if jumped:
        proxy_command = jump = None
    elif proxy_command is not None and jump is None:
        proxy_command = _expand(proxy_command, tokens, here, name, variables=False)
    revoked = named("revokedhostkeys")
    timeout = one("connecttimeout")
    return Hop(
        name=name,
        hostname=hostname,
        port=port,
        user=user,
        known_as=(alias or (hostname if port == 22 else f"[{hostname}]:{port}")).lower(),
        known_bare=hostname.lower() if port != 22 and not alias else None,
        user_known_hosts=files(_paths(one("userknownhostsfile", _USER_KNOWN_HOSTS))),
        global_known_hosts=files(_paths(one("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))),
        revoked=_file(revoked, here) if revoked else None,
        identities=files(settings.get("identityfile") or _IDENTITIES),
        certificates=files(settings.get("certificatefile") or ()),
        identities_only=flag("identitiesonly"),
        agent=_agent(one("identityagent", "SSH_AUTH_SOCK"), tokens, here, name),
        proxy_command=None if jump else proxy_command,
        jumps=parse_jumps(_expand(jump, tokens, here, name, variables=False), f"ProxyJump of {name}") if jump else (),
        family=_FAMILIES.get(one("addressfamily", "any").lower(), socket.AF_UNSPEC),
        bind_address=named("bindaddress"),
        connect_timeout=float(timeout) if re.fullmatch("[0-9]+", timeout) and int(timeout) else None,
        ask=not flag("batchmode"),
        compression=flag("compression"),
        check_address=flag("checkhostip") and not (jump or proxy_command or alias),
        host_key_algorithms=names("hostkeyalgorithms"),
        key_algorithms=names("pubkeyacceptedalgorithms") or names("pubkeyacceptedkeytypes"),
        kex=names("kexalgorithms"),
        ciphers=names("ciphers"),
        macs=names("macs"),
        lacks=tuple(
            word for word, key in (("KnownHostsCommand", "knownhostscommand"), ("PKCS11Provider", "pkcs11provider"))
            if named(key)
        ),
    )  # fmt: skip


def route(to: Jump, ask: Callable[[Jump], Settings], here: Here) -> tuple[Hop, ...]:
    """The hops to a host, in the order of travel, itself last. `ask` gives the settings of one.

    As ssh does: of "a,b" the last is reached through the first, the first by its own settings' ProxyJump.
    """
    return _route(to, None, ask, here, ())


def _route(
    to: Jump,
    before: tuple[Jump, ...] | None,
    ask: Callable[[Jump], Settings],
    here: Here,
    seen: tuple[Jump, ...],
) -> tuple[Hop, ...]:
    if to in seen or len(seen) > _MAX_JUMPS:
        way = " -> ".join(jump.name for jump in (*seen, to))
        raise ConfigError("ProxyJump goes round in a circle", where=seen[0].name, why=way, next=_correct(to.name))
    port = ("-p", str(to.port)) if to.port is not None else ()
    plain = (*port, f"{to.user}@{to.name}" if to.user is not None else to.name)
    last = hop(to.name, ask(to), here, jumped=bool(before))._replace(plain=plain)
    jumps = before or last.jumps
    if not jumps:
        return (last,)
    return (*_route(jumps[-1], jumps[:-1] or None, ask, here, (*seen, to)), last)


def _refuse(name: str, named: Callable[[str], str | None]) -> None:
    """Stops at settings without which ssh would arrive elsewhere, or as somebody else."""
    allowed = named("preferredauthentications")
    if (named("pubkeyauthentication") or "").lower() in ("no", "false"):
        raise _unable(name, "PubkeyAuthentication no", "we log in with keys only")
    if allowed and "publickey" not in allowed.split(","):
        raise _unable(name, f"PreferredAuthentications {allowed}", "we log in with keys only")
    if (named("proxyusefdpass") or "").lower() in ("yes", "true"):
        raise _unable(name, "ProxyUseFdpass", "a ProxyCommand has to carry the connection itself")
    if named("bindinterface"):
        raise _unable(name, "BindInterface", "name an address by BindAddress")


def _unable(name: str, setting: str, why: str) -> ConfigError:
    return ConfigError(f"{setting} can't be honoured", where=name, why=why, next=_correct(name))


def _correct(name: str) -> str:
    return f"correct your ssh configuration (`ssh -G {name}` shows what applies), or name another file as `ssh_config`"


def _number(text: str, what: str, name: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise ConfigError(f"{what} is no number", where=name, why=text, next=_correct(name))
    return int(text)


def _paths(text: str) -> list[str]:
    """Several files on a line. ssh -G prints them without quotes: a space begins another only before a path's start."""
    return re.split(r" (?=[/~%$]|none$)", text) if text else []


def _agent(value: str, tokens: Mapping[str, str], here: Here, name: str) -> str | None:
    if value.lower() == "none":
        return None
    if value == "SSH_AUTH_SOCK":
        return here.env.get(value) or None
    if value.startswith("$") and not value.startswith("${"):
        return here.env.get(value[1:]) or None
    # ssh -G has expanded what it could.
    return str(_file(_expand(value, tokens, here, name, strict=False), here))


def _expand(
    text: str, tokens: Mapping[str, str], here: Here, name: str, *, variables: bool = True, strict: bool = True
) -> str:
    """The text with %x and ${NAME} replaced. ConfigError for what stands for nothing that we know."""

    def value(match: re.Match[str]) -> str:
        token, variable = match[1], match[2]
        of_env = here.env.get(variable or "") if variables else match[0]
        found = of_env if token is None else tokens.get(token)
        if found is not None:
            return found
        if not strict:
            return match[0]
        raise ConfigError(
            f"{match[0]} stands for nothing", where=name, why=f"in {text} of its ssh configuration", next=_correct(name)
        )

    return re.sub(r"%(.|$)|\$\{([^}]*)\}", value, text)


def _file(text: str, here: Here) -> Path:
    """The path with its `~` resolved; as it is when there is no such user."""
    if text == "~" or text.startswith("~/"):
        return Path(here.home + text[1:])
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)
