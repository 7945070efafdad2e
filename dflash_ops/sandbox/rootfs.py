"""What a hypervisor or container sees as its `/`: a private tmpfs, and a short list of the machine, read-only.

Built twice over: the hypervisor's root from the machine's `/`, each container's root from the hypervisor's `/`; the
same paths stand for the same things in both, so the same functions serve. Runs as the machine's root in a mount
namespace of its own; standard library only.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ops.sandbox import kernel, layout

# Copied, since a container may change them. Left out on purpose: shadow, ssh, environment, pip.conf, and whatever
# else may hold a secret of the machine.
ETC_FILES = (
    "passwd", "group", "nsswitch.conf", "ld.so.cache", "ld.so.conf", "localtime", "timezone", "os-release",
    "debian_version", "lsb-release", "login.defs", "profile", "bash.bashrc", "inputrc", "services", "protocols",
    "resolv.conf", "host.conf", "gai.conf", "mime.types", "magic", "shells", "locale.alias", "ssl/openssl.cnf",
    "ca-certificates.conf",
)  # fmt: skip
# Bound: too many files to copy each time.
ETC_FOLDERS = ("alternatives", "ssl/certs", "terminfo", "ld.so.conf.d", "pam.d", "security")

PRIVATE_FOLDERS = (
    "root", "opt", "srv", "home", "mnt", "media", "etc", "etc/ssl", "proc", "sys", "dev", "run", "usr", "var",
    "var/lib", "var/log", "var/cache", "var/spool",
)  # fmt: skip
TEMPORARY_FOLDERS = ("tmp", "var/tmp")

DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


@dataclass
class Layer:
    """What differs in one folder of programs: files added (name -> the file) and names taken away."""

    add: dict[str, Path] = field(default_factory=dict[str, Path])
    remove: set[str] = field(default_factory=set[str])


def populate(root: Path, hostname: str, owner: int) -> None:
    """Make the private folders and files of a fresh root; `owner` is the machine's id of its user 0."""
    for name in PRIVATE_FOLDERS:
        (root / name).mkdir(exist_ok=True)
    (root / "root").chmod(0o700)
    for name in TEMPORARY_FOLDERS:
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")
    for name in ETC_FILES:
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), root / "etc" / name)
    (root / "etc/hostname").write_text(f"{hostname}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost ip6-localhost\n")
    (root / "etc/mtab").symlink_to("../proc/self/mounts")
    for path in Path("/").iterdir():
        # /bin -> usr/bin and its like, where /usr is merged.
        if path.is_symlink() and Path(os.path.normpath(path.parent / path.readlink())).is_relative_to("/usr"):
            (root / path.name).symlink_to(path.readlink())
    if owner:
        for folder, names, files in os.walk(root):
            for name in (".", *names, *files):
                os.lchown(Path(folder, name), owner, owner)


def show_machine(root: Path, binds: Iterable[str], owner: int) -> None:
    """Mount what shows of the machine: `/usr`, unmerged links, some of `/etc`, `/sys`, and `binds`; all read-only."""
    bind_at(root, "/usr", owner)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_dir() and not Path("/", name).is_symlink():
            bind_at(root, f"/{name}", owner)
    for name in ETC_FOLDERS:
        if Path("/etc", name).is_dir():
            bind_at(root, f"/etc/{name}", owner)
    kernel.bind("/sys", str(root / "sys"), recursive=False)
    for path in binds:
        bind_at(root, path, owner)


def bind_at(root: Path, path: str, owner: int, source: str | None = None, *, read_only: bool = True) -> None:
    """Show `source` (default: the same path) at `path` below `root`, making what is missing on the way."""
    origin, target = Path(source or path), root / path.lstrip("/")
    make_folders(root, target.parent, owner)
    if origin.is_dir():
        make_folders(root, target, owner)
    elif not target.exists():
        target.touch()
        os.chown(target, owner, owner)
    kernel.bind(str(origin), str(target), read_only=read_only)


def make_folders(root: Path, folder: Path, owner: int) -> None:
    """`mkdir -p`, with everything made owned by the container's user 0."""
    missing = [path for path in (folder, *folder.parents) if path.is_relative_to(root) and not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=0o755)
        os.chown(path, owner, owner)


def make_devices(root: Path, owner: int) -> None:
    """A `/dev` of its own with the harmless nodes; devpts and shm are mounted by the init, in its own namespaces."""
    dev = root / "dev"
    kernel.mount("dev", str(dev), "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
    for name, (major, minor) in DEVICES.items():
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, to in links.items():
        (dev / name).symlink_to(to)
    for path in (dev, *dev.iterdir()):
        os.lchown(path, owner, owner)


def mount_kernel_views(root: Path) -> None:
    """`/proc`, `/run` and what belongs below `/dev`; called by an init, in its own namespaces."""
    kernel.mount("proc", str(root / "proc"), "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("tmpfs", str(root / "run"), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    (root / "run/lock").mkdir()
    (root / "run/lock").chmod(0o1777)
    options = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    kernel.mount("devpts", str(root / "dev/pts"), "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    kernel.mount("tmpfs", str(root / "dev/shm"), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")


def take_away(root: Path, names: Iterable[str], layers: dict[str, Layer]) -> None:
    """Note in `layers` that programs of these names go, wherever programs are looked for."""
    for name in names:
        for folder in layout.PROGRAM_FOLDERS:
            if (root / folder.lstrip("/") / name).exists() and not Path(folder).is_symlink():
                layers.setdefault(folder, Layer()).remove.add(name)


def apply_layers(root: Path, layers: Mapping[str, Layer], scratch: Path) -> None:
    """Add programs to folders of the machine and take others away, in this root alone.

    scratch: an empty folder on a tmpfs, kept as long as the root. Where the kernel has no overlay file system, what is
    added goes to /usr/local/sbin, and what is taken away stays as a file that can't be executed.
    """
    for number, (folder, layer) in enumerate(layers.items()):
        target = root / folder.lstrip("/")
        if not target.is_dir() or not (layer.add or layer.remove):
            continue
        top = scratch / str(number)
        top.mkdir(parents=True)
        for name, source in layer.add.items():
            shutil.copy(source, top / name)
        for name in layer.remove:
            # What overlayfs calls a whiteout: the name is gone from the merged folder.
            os.mknod(top / name, stat.S_IFCHR, os.makedev(0, 0))
        try:
            kernel.mount("overlay", str(target), "overlay", kernel.MS_RDONLY, f"lowerdir={top}:{target}")
        except OSError:
            _apply_without_overlay(root, target, layer, top)


def _apply_without_overlay(root: Path, target: Path, layer: Layer, top: Path) -> None:
    if layer.add:
        programs = root / "usr/local/sbin"
        for path in programs.iterdir():
            if not (top / path.name).exists():
                shutil.copy(path, top / path.name, follow_symlinks=False)
        kernel.bind(str(top), str(programs))
    blank = top.with_suffix(".blank")
    blank.touch(mode=0o000)
    for name in layer.remove:
        if (target / name).exists():
            kernel.bind(str(blank), str(target / name))
