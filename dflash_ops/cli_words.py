"""The options that most commands share, and what they stand for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops import hints
from dflash_ops.errors import UsageFault

if TYPE_CHECKING:
    from dflash_ops.command import Container
    from dflash_ops.inventory import Inventory


def a_path(word: str | Path) -> Path:
    """A path on the command line. UsageFault for an empty word, which Path takes for the working folder: a script hands
    it over as "$DIR" when it has none."""
    if word == "":
        raise UsageFault("an empty word names no file", next="name one, or . for the working folder")
    return Path(word)


def _typed(context: typer.Context, parameter: typer.CallbackParam) -> bool:
    """Whether the command line itself says it: what the environment says holds for the next command too."""
    source = context.get_parameter_source(parameter.name or "")
    return source is not None and source.name == "COMMANDLINE"


def _keep_target(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    hints.said_target(value if _typed(context, parameter) else None)
    return value


def _keep_inventory(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    hints.said_inventory(str(value) if _typed(context, parameter) else None)
    return value


Target = Annotated[
    str | None,
    typer.Option(
        "-t",
        "--target",
        metavar="NAME",
        envvar="DFLASH_OPS_TARGET",
        help="The inventory's container to use.",
        callback=_keep_target,
    ),
]
InventoryFile = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        metavar="FILE",
        parser=a_path,
        help="The inventory, instead of the nearest one upwards.",
        callback=_keep_inventory,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def load_inventory(explicit: Path | None) -> "Inventory":
    from dflash_ops.inventory import load

    return load(explicit)


def find_container(explicit: Path | None, target: str | None) -> "Container":
    """The container that -t names in the inventory, or its default."""
    return load_inventory(explicit).container(target)
