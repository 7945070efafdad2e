"""The JSON schema that `init` puts beside an inventory, for editors."""

import contextlib
from pathlib import Path

from dflash_ops.inventory_file import present


def head(file: Path) -> str:
    """What a new inventory begins with."""
    return f"#:schema ./{path(file).name}\n# Written by dflash-ops init. Every key: dflash-ops inventory schema\n"


def path(file: Path) -> Path:
    """Where editors find the schema of an inventory in this folder."""
    beside = file.parent / "schema.json"
    with contextlib.suppress(OSError):
        if beside.read_bytes() == _schema():
            return beside
    return own(file)


def own(file: Path) -> Path:
    """Where we write the schema; nobody else has files of this name."""
    return file.parent / "dflash-ops.schema.json"


def _schema() -> bytes:
    from dflash_ops.inventory_tables import schema_text

    return schema_text().encode()


def files(file: Path) -> dict[Path, bytes]:
    """The schema for editors: beside a new inventory, and where an older one of ours lies beside one that is there."""
    ours, schema = own(file), _schema()
    try:
        if not present(file):
            return {path(file): schema}
        return {ours: schema} if ours.is_file() and ours.read_bytes() != schema else {}
    except OSError:
        return {}
