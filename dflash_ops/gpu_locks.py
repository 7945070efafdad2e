"""The locks of GPUs on a host, so that two starts can't share one: how they are taken, and who holds them. Pure.

A lock is a file named after the GPU's UUID, and one named after the host's index, which earlier versions of dflash-ops
take alone: both exclude each other. Which UUID an index of the inventory has is looked up on the host, in the same
command; the start in the container, where nvidia-smi shows what the run will really use, says so when it is another
one, and is then asked again with UUIDs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dflash_ops import answers
from dflash_ops.command import Container, Result
from dflash_ops.gpus import parse_indices
from dflash_ops.remote import rundir

# /run/lock exists on every Proxmox host; flock makes the file. The kernel frees it with its last holder.
_LOCKS = "/run/lock"
TAKEN = 7

# Becomes `flock FILE flock FILE ... COMMAND`: each flock becomes the next, whose descriptors go on through lxc-attach
# to the supervisor. Words: the indices or UUIDs, --, the command. Every start takes its locks in the host's order, so
# that two can't refuse each other crosswise. The driver's own table answers at once and also when nvidia-smi hangs; it
# is what nvidia-smi counts by, less what was excluded. Before its first use a card has no UUID there (question marks).
# nvidia-smi must not read the command's stdin.
_SCRIPT = (
    'table() { n=0; for f in /proc/driver/nvidia/gpus/*/information; do [ -r "$f" ] || return 1; u= x=; '
    'while IFS= read -r l; do case $l in "GPU UUID:"*GPU-*) u=GPU-${l##*GPU-};; "GPU Excluded:"*Yes*) x=1;; esac; '
    'done < "$f"; [ "$x" ] && continue; case $u in ""|*[?]*) return 1;; esac; echo "$n $u"; n=$((n+1)); done; }; '
    "rows=$(LC_ALL=C; table) || rows=$(timeout -k 1 8 nvidia-smi --query-gpu=index,uuid --format=csv,noheader "
    "</dev/null 2>/dev/null | tr , ' '); "
    'want=; until [ "$1" = -- ]; do want="$want $1"; shift; done; shift; i= found= locks=; '
    'for w in $rows; do case $w in GPU-*[/.]*) ;; GPU-*) case "$want " in *" $i "*|*" $w "*) found="$found $i $w"; '
    'locks="$w ${i:+$i }$locks";; esac;; [0-9]|[0-9][0-9]|[0-9][0-9][0-9]) i=$w;; *) i=;; esac; done; '
    'for w in $want; do case "$found " in *" $w "*) ;; *) locks="$w $locks";; esac; done; '
    f'for l in $locks; do set -- flock -n -E {TAKEN} -F "{_LOCKS}/{rundir.GPU_LOCK}$l.lock" "$@"; done; exec "$@"'
)


@dataclass(frozen=True)
class LockHolder:
    """Who holds the locks of a GPU. pid: as whoever was asked sees it; index: the host's, None where only the UUID is
    known; since: RFC 3339, UTC, when the holder began."""

    index: int | None
    pid: int
    run_id: str | None
    vmid: int | None
    uuid: str | None = None
    since: str | None = None


def words(container: Container, gpus: Sequence[int], uuids: Sequence[str] | None = None) -> tuple[str, ...]:
    """What stands before a command that shall have these GPUs' locks: `gpus` as the container numbers them, or by their
    UUIDs where they are known. flock ends with TAKEN when one is held."""
    if not container.gpus or not (gpus or uuids):
        return ()
    wanted = sorted(uuids) if uuids else [str(index) for index in sorted(container.gpus[gpu] for gpu in gpus)]
    return ("sh", "-c", _SCRIPT, "gpu-locks", *wanted, "--")


@dataclass(frozen=True)
class Instead:
    """What a start wants locked instead of what was. held: the UUIDs whose locks it has; none when the host could not
    tell UUIDs."""

    uuids: tuple[str, ...]
    held: tuple[str, ...]


def instead(result: Result) -> Instead | None:
    """Which other locks a start wants; None when it has done its work."""
    asked = answers.answer(result).get("lock_instead")
    return Instead(tuple(asked["uuids"]), tuple(asked["held"])) if asked else None


def holders(view: Mapping[str, Any]) -> list[LockHolder]:
    """Who holds which GPU's locks, from the view of a host (or of a container, where locks lie in there)."""
    smi = view["smi"]["gpus"]
    index_of = {uuid: index for uuid, index in parse_indices(_two_fields(smi)).items()}
    uuid_of = {index: uuid for uuid, index in index_of.items()}
    found: dict[tuple[int, str | int], LockHolder] = {}
    for holder in view["holders"]:
        since = datetime.fromtimestamp(view["now"] - holder["age_s"], UTC) if "now" in view else None
        for lock in (*holder.get("locked_uuids", ()), *holder["locks"]):
            uuid = lock if isinstance(lock, str) else uuid_of.get(lock)
            index = index_of.get(lock) if isinstance(lock, str) else lock
            found.setdefault(
                (holder["pid"], uuid if uuid is not None else lock),
                LockHolder(
                    index,
                    holder["pid"],
                    holder["locks_for"],
                    holder["vmid"],
                    uuid,
                    since.isoformat(timespec="seconds").replace("+00:00", "Z") if since else None,
                ),
            )
    return sorted(found.values(), key=lambda it: (it.index is None, it.index or 0, it.uuid or "", it.pid))


def of(held: Sequence[LockHolder], indices: Sequence[int], uuids: Sequence[str]) -> list[LockHolder]:
    """Those of the holders that have one of these GPUs. uuids, where they are known, say more than indices."""
    if uuids:
        return [it for it in held if it.uuid in uuids or (it.uuid is None and it.index in indices)]
    return [it for it in held if it.index in indices]


def _two_fields(smi: Mapping[str, Any]) -> str:
    """The rows of an answer that begins with index and uuid, without the rest."""
    return "\n".join(",".join(line.split(",")[:2]) for line in smi["out"].split("\n"))
