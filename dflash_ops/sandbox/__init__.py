"""A Proxmox look-alike on loopback: an SSH server whose `pct` and `lxc-attach` reach containers made of namespaces, and
Proxmox's API.

    machine                 hypervisor (mount, pid, uts namespace)          containers (namespaces inside)
    guard.py   -- forks --> init.py -- forks --> server.py (SSH, SFTP), one for each node of the cluster
      ends with its owner,    |                    exec: a shell, with        pct.py and attach.py enter them
      clears up after all     |                    pct, lxc-attach, pvesh
                              +-- forks --> api_server.py (HTTPS): api.py with calls.py, as pvesh.py asks them too
                              |               starts jobs.py's tasks, each a process of its own
                              +-- forks --> gpud.py (fake GPUs' ledger)
                              +-- starts -> container.py's init, one for each running container

The cluster's other node is the same machine under another host name, with containers of its own.

The death of the hypervisor's init ends everything in it, and the guard's death ends the init, so a crash of either end
leaves at most the state folder, which the next `up` or `down` removes.

`up`, `down` and `status` are loaded when first used: a reader of the state file needs none of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_ops.sandbox.lifecycle import down, status, up

__all__ = ["down", "status", "up"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dflash_ops.sandbox import lifecycle

        return getattr(lifecycle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
