"""Where the inventory lies, and its text."""

import os
import shlex
import stat
from pathlib import Path

from dflash_ops.errors import ConfigError

VARIABLE = "DFLASH_OPS_INVENTORY"
BOM = "\ufeff"
_WHERE_TO_PUT_ONE = f"dflash-ops init writes one; or set {VARIABLE}, or say --inventory FILE"
_MOST_BYTES = 1_000_000  # ten thousand containers


def find(explicit: Path | None = None, *, start: Path | None = None) -> Path:
    """The inventory file to use: `explicit`, else what DFLASH_OPS_INVENTORY says, else the nearest from `start` (the
    working folder) upwards, else the user's own. ConfigError when there is none, or something else has its name, or
    the nearest one is somebody else's."""
    named = explicit or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    try:
        if named is not None:
            return _named(named, "--inventory" if explicit else VARIABLE)
        start = start.absolute() if start else working_folder()
        for folder in (start, *start.parents):
            if (file := present(folder / "dflash-ops.toml") or _in_folder(folder / "inventory")) is not None:
                _refuse_strangers(file)
                return file
        places = users_own()
        for file in places:
            if present(file) is not None:
                return file
    except OSError as error:
        where = os.fsdecode(error.filename or "")
        raise ConfigError(
            "the inventory can't be looked for", where=where, why=error.strerror or str(error), next=_WHERE_TO_PUT_ONE
        ) from error
    where = " and ".join((f"{start} and above", *map(str, places)))
    raise ConfigError("no inventory", where=where, why="nothing says where to go", next=_WHERE_TO_PUT_ONE)


def _named(named: Path, said_by: str) -> Path:
    file = _in_folder(named) if named.is_dir() else present(named)
    if file is None:
        why = f"{said_by} names it"
        if named.is_dir():
            why += ", and neither default.toml nor sandbox.toml is in it"
        raise ConfigError(
            "there is no such inventory", where=str(named), why=why, next="correct it, or: dflash-ops init"
        )
    return file


def _refuse_strangers(file: Path) -> None:
    """ConfigError for a file that others put there, or may write: an inventory names an ssh configuration, and that
    names programs to run. Who says --inventory has chosen it, and nobody chooses what lies in a folder above."""
    ours = {0, os.geteuid()}
    if (caller := os.environ.get("SUDO_UID", "")).isdecimal() and os.geteuid() == 0:
        ours.add(int(caller))
    why = mend = ""
    for it in (file.lstat(), file.stat()):  # a link's owner says where it leads
        if it.st_uid not in ours:
            why = f"it is a file of {_user(it.st_uid)}, and was found by looking upwards"
        elif not stat.S_ISLNK(it.st_mode) and it.st_mode & stat.S_IWOTH:
            why, mend = "everybody may write it", f"chmod o-w {shlex.quote(str(file))}; or "
    if why:
        next = f"{mend}say --inventory {shlex.quote(str(file))} if you trust it, or set {VARIABLE}"
        raise ConfigError("this inventory is not used", where=str(file), why=why, next=next)


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _in_folder(folder: Path) -> Path | None:
    return present(folder / "default.toml") or present(folder / "sandbox.toml")


def present(file: Path) -> Path | None:
    """The file, when there is something of that name. ConfigError when that is no file: passing over it would use
    another inventory, and perhaps another box, than the one that is meant; opening a pipe would wait for a writer."""
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if not file.is_symlink():
            return None
        why = f"it is a link to {os.fsdecode(file.readlink())}, which is not there"
        raise ConfigError(
            "the inventory can't be read", where=str(file), why=why, next="correct or remove it"
        ) from error
    if not stat.S_ISREG(mode):
        why = f"it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}"
        raise ConfigError("the inventory can't be read", where=str(file), why=why, next="put a file there")
    return file


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFSOCK: "a socket"}


def users_own() -> list[Path]:
    """Where the user's own inventory may lie, for whatever folder they work in: the first place is the one to write."""
    import platformdirs  # here, since most find theirs nearer

    said = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        configuration = Path(said) if Path(said).is_absolute() else Path.home() / ".config"
    except RuntimeError:  # no home at all
        return []
    places = [configuration, platformdirs.user_config_path()]  # the second one is elsewhere on macOS
    return list(dict.fromkeys(place / "dflash-ops" / "inventory.toml" for place in places))


def working_folder() -> Path:
    """Where we are. ConfigError when that folder has been removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError(
            "the working folder is gone", why=error.strerror or str(error), next="cd to a folder that is there"
        ) from error


def read(file: Path) -> str:
    """The text of an inventory file. ConfigError when it can't be read, or is no text."""
    try:
        with file.open("rb") as stream:
            return decoded(stream.read(_MOST_BYTES + 1), file)
    except OSError as error:
        raise ConfigError(
            "the inventory can't be read", where=str(file), why=error.strerror or str(error), next="correct it"
        ) from error


def decoded(raw: bytes, file: Path) -> str:
    """The text that a file's bytes are, with their line endings, without the mark that some editors put first."""
    why = ""
    if len(raw) > _MOST_BYTES:
        why = f"it is larger than {_MOST_BYTES} bytes: not an inventory"
    elif raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        why = "it is UTF-16, as some editors and PowerShell write it"
    else:
        try:
            return raw.decode("utf-8").removeprefix(BOM)
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            why = f"line {line} is not UTF-8: {error.reason}"
    raise ConfigError("the inventory can't be read", where=str(file), why=why, next="save it as UTF-8 text")
