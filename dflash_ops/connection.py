"""A Shell's connection to one host, and what the host was found to have."""

import contextlib
import copy
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_ops import sudo
from dflash_ops.command import Host
from dflash_ops.conversation import TICK_SECONDS
from dflash_ops.errors import OpsError, UnreachableError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dflash_ops.ssh import Link


@dataclass
class Connection:
    """timeout: seconds to be connected and logged in. Safe to use from several threads."""

    host: Host
    timeout: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: "Link | None" = None
    coming: "Future[Link] | None" = None  # an attempt to connect, until somebody has heard what became of it
    has_lxc_attach: bool | None = None
    without_sftp: bool = False
    rights: sudo.Rights | None = None
    asking: threading.Lock = field(default_factory=threading.Lock)  # for the rights, one at a time

    def begin(self) -> None:
        """Begins to connect, unless that is done or on its way."""
        with self.lock:
            if self.link is None and self.coming is None:
                self.coming = self._connecting()

    def connected(self) -> "Link":
        """The connection, made now if there is none. All who wait for one attempt share what becomes of it. It may have
        broken since it came, when that was begun long ago."""
        with self.lock:
            if self.coming is None:
                if self.link is not None and self.link.is_open:
                    return self.link
                self.coming = self._connecting()
            coming = self.coming
        try:
            return _heard(coming)
        except OpsError as error:
            raise copy.copy(error) from error  # whoever gets it may write more into it
        finally:
            with self.lock:
                if self.coming is coming and coming.done():
                    self.coming = None
                    self.link = None if coming.exception() else coming.result()

    def close(self) -> None:
        """Ends the connection. Whoever waits for one that is coming hears that at once."""
        from concurrent.futures import InvalidStateError

        with self.lock:
            link, coming = self.link, self.coming
        if link is not None:
            link.close()
        if coming is None:
            return
        try:
            coming.set_exception(UnreachableError("the connection was closed", where=str(self.host)))
        except InvalidStateError:  # it has come, or failed
            if coming.exception() is None:
                coming.result().close()

    def _connecting(self) -> "Future[Link]":
        from concurrent.futures import Future, InvalidStateError

        from dflash_ops.ssh import connect

        coming: Future[Link] = Future()

        def run() -> None:
            try:
                link = connect(self.host, timeout=self.timeout)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):  # nobody waits any more
                    coming.set_exception(error)
                return
            try:
                coming.set_result(link)
            except InvalidStateError:
                link.close()

        # Nobody waits for it at the end: a host may take long to say nothing.
        threading.Thread(target=run, name=f"connecting {self.host}", daemon=True).start()
        return coming


def _heard(coming: "Future[Link]") -> "Link":
    """Its result. Looks up now and then: see TICK_SECONDS."""
    while not coming.done():
        with contextlib.suppress(TimeoutError):
            return coming.result(TICK_SECONDS)
    return coming.result()
