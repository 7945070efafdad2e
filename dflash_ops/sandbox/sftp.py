"""SFTP on the hypervisor's files, as OpenSSH's sftp-server answers it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (paramiko carries no types.)

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
from paramiko.sftp import SFTP_EOF, SFTP_FAILURE, SFTP_OK

from dflash_ops.sandbox import users

_LIBC = ctypes.CDLL(None, use_errno=True)


def _answering_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an OSError into SFTP's code for it."""

    @functools.wraps(method)
    def wrapped(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)

    return wrapped


class _File(paramiko.SFTPHandle):
    def __init__(self, descriptor: int, flags: int) -> None:
        super().__init__(flags)
        self.descriptor = descriptor
        self.appending = bool(flags & os.O_APPEND)

    @_answering_errors
    def read(self, offset: int, length: int) -> bytes | int:
        return os.pread(self.descriptor, length, offset) or SFTP_EOF

    @_answering_errors
    def write(self, offset: int, data: bytes) -> int:
        while data:
            written = os.write(self.descriptor, data) if self.appending else os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written
        return SFTP_OK

    @_answering_errors
    def stat(self) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.descriptor))

    @_answering_errors
    def chattr(self, attr: paramiko.SFTPAttributes) -> int:
        return _set_attributes(self.descriptor, attr)

    def close(self) -> None:
        os.close(self.descriptor)


class Server(paramiko.SFTPServer):
    """Its thread acts on files as the user who logged in, who also owns what it makes. Ends as OpenSSH's does, with an
    exit code: without one, `scp` takes all that it did for failed."""

    def start_subsystem(self, name: str, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        account = users.account(transport.get_username() or "")
        if account is not None and account.uid != 0:
            _LIBC.setfsgid(account.gid)  # of this thread alone; root's power over files goes with the second
            _LIBC.setfsuid(account.uid)
        super().start_subsystem(name, transport, channel)

    def finish_subsystem(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # the client has gone already
            assert self.sock is not None  # it has started
            self.sock.send_exit_status(0)
        super().finish_subsystem()


class HypervisorFiles(paramiko.SFTPServerInterface):
    """Relative names start in the user's home."""

    def __init__(self, server: paramiko.ServerInterface, *more: Any, **options: Any) -> None:
        super().__init__(server, *more, **options)
        connection: Any = server
        account = users.account(connection.transport.get_username() or "")
        self._home = account.home if account else "/"

    @_answering_errors
    def list_folder(self, path: str) -> list[paramiko.SFTPAttributes]:
        return [paramiko.SFTPAttributes.from_stat(entry.lstat(), entry.name) for entry in self._at_home(path).iterdir()]

    @_answering_errors
    def stat(self, path: str) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(self._at_home(path).stat())

    @_answering_errors
    def lstat(self, path: str) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(self._at_home(path).lstat())

    @_answering_errors
    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> _File:
        mode = 0o666 if attr.st_mode is None else attr.st_mode & 0o7777
        return _File(os.open(self._at_home(path), flags | os.O_CLOEXEC, mode), flags)

    @_answering_errors
    def remove(self, path: str) -> int:
        self._at_home(path).unlink()
        return SFTP_OK

    @_answering_errors
    def rename(self, oldpath: str, newpath: str) -> int:
        # The plain rename never replaces; link and unlink keep that true when another takes the name meanwhile.
        source, target = self._at_home(oldpath), self._at_home(newpath)
        if source.is_dir():
            if os.path.lexists(target):
                return SFTP_FAILURE
            source.rename(target)
        else:
            os.link(source, target, follow_symlinks=False)
            source.unlink()
        return SFTP_OK

    @_answering_errors
    def posix_rename(self, oldpath: str, newpath: str) -> int:
        self._at_home(oldpath).rename(self._at_home(newpath))
        return SFTP_OK

    @_answering_errors
    def mkdir(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        self._at_home(path).mkdir(0o777 if attr.st_mode is None else attr.st_mode & 0o7777)
        return SFTP_OK

    @_answering_errors
    def rmdir(self, path: str) -> int:
        self._at_home(path).rmdir()
        return SFTP_OK

    @_answering_errors
    def chattr(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        return _set_attributes(self._at_home(path), attr)

    @_answering_errors
    def symlink(self, target_path: str, path: str) -> int:
        self._at_home(path).symlink_to(target_path)
        return SFTP_OK

    @_answering_errors
    def readlink(self, path: str) -> str:
        return str(self._at_home(path).readlink())

    def _at_home(self, path: str) -> Path:
        return Path(self._home, path)

    def canonicalize(self, path: str) -> str:
        return str(self._at_home(path).resolve())


def _set_attributes(where: Path | int, attr: paramiko.SFTPAttributes) -> int:
    if attr.st_size is not None:
        os.truncate(where, attr.st_size)
    if attr.st_mode is not None:
        os.chmod(where, attr.st_mode & 0o7777)  # noqa: PTH101 - a descriptor too
    if attr.st_uid is not None and attr.st_gid is not None:
        os.chown(where, attr.st_uid, attr.st_gid)
    if attr.st_atime is not None and attr.st_mtime is not None:
        os.utime(where, (attr.st_atime, attr.st_mtime))
    return SFTP_OK
