"""`dflash-ops inventory`: what the inventory says, and whether that is so. cli.py mounts `app` as `inventory`."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from dflash_ops import cli_ct, leaving, render
from dflash_ops.cli_words import InventoryFile, Json, a_path, load_inventory
from dflash_ops.errors import CancelledError, ConfigError, OpsError, PreflightError, UsageFault

if TYPE_CHECKING:
    from dflash_ops import init as verbs
    from dflash_ops.checks import Check
    from dflash_ops.inventory import Inventory
    from dflash_ops.inventory_faults import Fault
    from dflash_ops.inventory_view import Entry

app = typer.Typer(help="The hosts and containers that commands go to.", no_args_is_help=True)
app.command()(cli_ct.discover)


@app.command("list")
def list_(inventory: InventoryFile = None, as_json: Json = False) -> None:
    """List containers, hosts and groups. * marks the container that is meant when none is named."""
    from dflash_ops import inventory_view as view

    book = load_inventory(inventory)
    render.show(view.listing(book), as_json=as_json, people=lambda: _list(book))


def _list(book: "Inventory") -> None:
    from dflash_ops import inventory_view as view

    groups = view.groups_of(book)
    rows = [
        (
            f"{name} *" if name == view.meant(book) else name,
            table.host,
            table.vmid,
            ",".join(map(str, table.gpus)) or None,
            table.path,
            ",".join(groups[name]) or None,
        )
        for name, table in book.tables.containers.items()
    ]
    columns = ("container", "host", "vmid", "GPUs", "path", "groups")
    render.table(columns, rows, right=("vmid",), spare=("groups", "path"))
    if empty := view.empty_hosts(book):
        render.say(f"hosts without containers: {', '.join(empty)}")
    render.say(f"in {book.file}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A container, a host, or a group.")],
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Show all that a name stands for: each key with its value, as the file says it or by default."""
    from dflash_ops import inventory_view as view

    book = load_inventory(inventory)
    found = view.about(book, name)
    render.show({"file": str(book.file), "found": found}, as_json=as_json, people=lambda: _show(book, found))


def _show(book: "Inventory", found: "list[Entry]") -> None:
    for entry in found:
        render.say(f"{entry.kind} {entry.name}")
        for row in entry.rows:
            value = "-" if row.value is None else json.dumps(row.value, ensure_ascii=False)
            render.say(f"  {row.key} = {value}{'' if row.said else '  (default)'}")
        if entry.kind != "container":
            render.say(f"  containers: {', '.join(entry.containers) or 'none'}")
    render.say(f"in {book.file}")


@app.command()
def schema() -> None:
    """Print the JSON schema of an inventory: what editors check and complete it by."""
    from dflash_ops.inventory_tables import schema_text

    with render.written():
        print(schema_text(), end="")


@app.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="With --connect: these alone; hosts and groups too.")
    ] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Ask each host and container too: is all there that the file says?")
    ] = False,
    inventory: InventoryFile = None,
    as_json: Json = False,
) -> None:
    """Check the whole file: what is wrong, with its line; once a table is mended, more of it may show.

    Exit code 3 when the file is wrong; with --connect 4 or 5 when a host can't be reached, 6 when something is not
    there. Nothing is changed anywhere."""
    from dflash_ops import inventory_check, many
    from dflash_ops.inventory import examine, load
    from dflash_ops.inventory_file import find, read

    file = find(inventory)
    found = examine(read(file))
    if isinstance(found, list):
        _wrong(file, found, as_json)
    book = load(file)
    faults, checks = inventory_check.files(book)
    if faults:
        _wrong(file, faults, as_json)
    inventory_check.wanted(book, names or [])  # are they there?
    checks += inventory_check.remarks(book.tables)
    errors: dict[str, OpsError] = {}
    if connect:
        from dflash_ops import render_many

        with render_many.board(list(book.tables.hosts), quiet=True, debug=False) as board:
            outcomes = inventory_check.ask(book, names or [], board=board)
        checks += [it for outcome in outcomes for it in outcome.value or ()]
        errors = {outcome.name: outcome.error for outcome in outcomes if outcome.error is not None}
    codes = [error.exit_code for error in errors.values()]
    codes += [PreflightError.exit_code for it in checks if it.level == "failure"]
    unreached = [{"host": name, "exit_code": error.exit_code, "error": error.line()} for name, error in errors.items()]
    document = {"file": str(file), "ok": not codes, "faults": [], "checks": checks, "unreached": unreached}
    leaving.due(code := many.worst(codes))
    render.show(document, as_json=as_json, people=lambda: _checks(book, checks, errors, connect))
    if code:
        raise typer.Exit(code)


def _wrong(file: Path, faults: "list[Fault]", as_json: bool) -> NoReturn:
    document = {"file": str(file), "ok": False, "faults": faults, "checks": [], "unreached": []}
    leaving.due(ConfigError.exit_code)
    render.show(document, as_json=as_json, people=lambda: _faults(file, faults))
    count = "one thing is" if len(faults) == 1 else f"{len(faults)} things are"
    raise ConfigError(f"{count} wrong in the inventory", where=str(file), next="correct the file, line by line")


def _faults(file: Path, faults: "list[Fault]") -> None:
    for fault in faults:
        where = str(file) if fault.line is None else f"{file}:{fault.line}"
        render.say(f"{where}: {f'{fault.key}: ' if fault.key else ''}{fault.why}")


def _checks(book: "Inventory", checks: "list[Check]", errors: "dict[str, OpsError]", connect: bool) -> None:
    for name, error in errors.items():
        render.say(f"failure: host ({name}): {error.line()}")
    for level in ("failure", "warning", "note", "ok"):
        for it in checks:
            if it.level == level:
                render.say(f"{level}: {it.name} ({it.where}): {it.evidence}")
                if it.fix:
                    render.say(f"  mend it: {it.fix}")
    tables = book.tables
    counts = ", ".join(
        render.count(len(named), thing)
        for named, thing in ((tables.hosts, "host"), (tables.containers, "container"), (tables.groups, "group"))
    )
    more = "" if connect else "; --connect asks them whether it is so"
    render.say(f"{book.file}: can be read; {counts}{more}")


# -- init


def init(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=a_path,
            help="The file to write, or to add to. Default: what DFLASH_OPS_INVENTORY says, else dflash-ops.toml here, "
            "or inventory/default.toml where there is a folder of that name.",
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="[USER@]ADDRESS", help="The Proxmox host, as ssh knows it.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="NAME", help="The host's name in the file; one that is there is used.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, max=65535, help="The port of its ssh server.")
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Who logs in there.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", parser=a_path, help="The private key.")] = None,
    known_hosts: Annotated[
        Path | None, typer.Option("--known-hosts", metavar="FILE", parser=a_path, help="Who knows the host's key.")
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option("--ssh-config", metavar="FILE", parser=a_path, help="Instead of ~/.ssh/config.")
    ] = None,
    vmid: Annotated[str | None, typer.Option(metavar="NUMBER", help="The container's number.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The container's name in the file.")] = None,
    path: Annotated[str | None, typer.Option(metavar="FOLDER", help="Its folder for releases and runs.")] = None,
    python: Annotated[str | None, typer.Option(metavar="PROGRAM", help="Its Python.")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N,N|none", help="The host's numbers of its GPUs, in the container's order.")
    ] = None,
    container_user: Annotated[
        str | None, typer.Option("--container-user", metavar="USER", help="Whose releases are in there; default root.")
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            metavar="USER@REALM!NAME|none",
            help="A token for the Proxmox API, without its secret; the node's CA is fetched over ssh.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            parser=a_path,
            help="With --api: the file of mode 0600 that holds the token's secret. Default: DFLASH_OPS_PVE_TOKEN.",
        ),
    ] = None,
    api_address: Annotated[
        str | None, typer.Option("--api-address", metavar="NAME", help="Where the API listens; default: the host.")
    ] = None,
    api_port: Annotated[
        int | None, typer.Option("--api-port", metavar="NUMBER", min=1, max=65535, help="Its port; default: 8006.")
    ] = None,
    api_node: Annotated[
        str | None, typer.Option("--api-node", metavar="NAME", help="The node's name in its cluster.")
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Asks nothing: what has a default gets it.")] = False,
    untested: Annotated[bool, typer.Option("--untested", help="Asks no machine whether it is so.")] = False,
    as_json: Json = False,
) -> None:
    """Write an inventory: asks what the options don't say, and tries each answer on the machine.

    A file that is there gets a host and a container more, and none of its lines is changed. Where one container was
    meant without a name, it gets a `default` too, so that this stays so. --host of one that is there with --api alone
    adds that. A host key that ssh does not know is shown with the command that adds it, and never added."""
    from dflash_ops import init as verbs
    from dflash_ops.shell import Shell

    file = (out or _place()).absolute()
    if out is not None and file.name != _NAME and _is_folder(file):
        file = file / _NAME
    reach = (address, port, user, key, known_hosts, ssh_config, host)
    there_is = (vmid, name, path, python, gpus, container_user)
    said = verbs.Said(*reach, *there_is, api, token_file, api_address, api_port, api_node)
    asker = _Asker(yes)
    there = os.path.lexists(file)
    with Shell() as shell:
        plan = verbs.plan(None if untested else shell, file, said, asker)
    if asker.can_ask:
        render.note(f"\n{verbs.preview(plan)}")
        try:
            agreed = typer.confirm(f"{'Add this to' if there else 'Write this as'} {file}?", default=True, err=True)
        except typer.Abort:
            agreed = False
        if not agreed:
            raise CancelledError("nothing was written")
    before = None if there else _in_use()
    also = verbs.write(plan)
    document = {
        "file": str(plan.file),
        "host": plan.host,
        "container": plan.container,
        "tried": plan.tried,
        "untried": plan.untried,
        "also_written": [str(path) for path in also],
    }
    render.show(document, as_json=as_json, people=lambda: _written(plan, also, before))


_NAME = "dflash-ops.toml"


def _place() -> Path:
    """Where an inventory goes when the command does not say where."""
    from dflash_ops.inventory_file import VARIABLE, working_folder

    if os.environ.get(VARIABLE):
        said = Path(os.environ[VARIABLE])
        return said / "default.toml" if _is_folder(said) else said  # as it is looked for
    here = working_folder()
    own, inside = here / _NAME, here / "inventory" / "default.toml"
    return inside if inside.parent.is_dir() and not own.exists() else own


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # what is wrong with it is told where it is read
        return False


def _in_use() -> Path | None:
    """The inventory that commands from here use until now."""
    from dflash_ops.inventory_file import find

    try:
        return find()
    except OpsError:
        return None


def _written(plan: "verbs.Plan", also: list[Path], before: Path | None) -> None:
    for line in plan.tried:
        render.say(f"tried: {line}")
    for line in plan.untried:
        render.say(f"not tried: {line}")
    for path in also:
        render.say(f"wrote {path}")
    what = "its [api]" if plan.container is None else f"container {plan.container}"
    render.say(f"wrote {plan.file}: {what} on host {plan.host}")
    for name in plan.default.values():
        render.say(f"{name} is its `default` now: the container that is meant where none is named")
    now = _in_use()
    options = "" if now == plan.file else f" --inventory {shlex.quote(str(plan.file))}"
    if before is not None and now == plan.file:
        render.say(f"from here, commands used {before} until now")
    if plan.container is None:
        render.say(f"next: dflash-ops inventory check --connect {plan.host}{options}")
    else:
        there = f"-t {plan.container}{options}"
        render.say(f"next: dflash-ops doctor {there}, then: dflash-ops deploy {there}")


class _Asker:
    """Asks at the terminal; without one, or with --yes, takes the defaults or says which option is missing."""

    def __init__(self, yes: bool) -> None:
        self._yes = yes
        self.can_ask = not yes and os.isatty(0) and os.isatty(2)

    def ask(self, what: str, flag: str, default: str | None) -> str:
        if self.can_ask:
            try:
                return str(typer.prompt(what, default=default, err=True)).strip()
            except typer.Abort:
                raise CancelledError("nothing was written") from None
        if self._yes and default is not None:
            return default
        else_ = "" if default is None or self._yes else f", or --yes for {default}"
        why = "--yes asks nothing" if self._yes else "there is no terminal to ask at"
        raise UsageFault(f"{flag} is not said", why=why, next=f"say {flag}{else_}")

    def again(self, error: OpsError) -> bool:
        if self.can_ask:
            render.note(f"  {error.line()}")
        return self.can_ask

    def tell(self, text: str) -> None:
        render.note(text)
