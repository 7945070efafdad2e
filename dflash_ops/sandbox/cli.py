"""`dflash-ops sandbox up|down|status|demo`: thin; mounted by the main command line."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_ops import sandbox
from dflash_ops.errors import NotFoundError, PreflightError, UsageFault
from dflash_ops.sandbox.state import SandboxState

app = typer.Typer(help="A Proxmox look-alike on this machine, for the demo and the tests.", no_args_is_help=True)

Name = Annotated[str, typer.Option("--name", help="Which sandbox, when there are several.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.callback()
def on_linux_only() -> None:
    """It is made of Linux's namespaces."""
    if sys.platform != "linux":
        raise PreflightError(
            "the sandbox needs Linux",
            why="it is made of Linux's namespaces",
            next="run it on a Debian machine, or in a virtual one",
        )


@app.command()
def up(
    name: Name = "default",
    owner: Annotated[int | None, typer.Option(help="End the sandbox when this process ends.", metavar="PID")] = None,
    pct_delay: Annotated[float, typer.Option(help="The least seconds a pct call takes; a real one: 0.6.")] = 0.0,
    lxc_attach: Annotated[bool, typer.Option("--lxc-attach/--no-lxc-attach", help="Whether it exists.")] = True,
    disk: Annotated[
        list[str] | None, typer.Option(help="Bound a disk: 200:64M or host:64M.", metavar="ID:SIZE")
    ] = None,
    without: Annotated[list[str] | None, typer.Option(help="Take a program away: 200:tar.", metavar="ID:NAME")] = None,
    bind: Annotated[list[Path] | None, typer.Option(help="Show this folder, read-only, at its own path.")] = None,
    as_json: Json = False,
) -> None:
    """Start a sandbox: a hypervisor with containers 200 and 201 (unprivileged) running and 202 stopped."""
    from dflash_ops.sandbox import lifecycle

    removed: dict[str, list[str]] = {}
    for vmid, program in map(_pair, without or []):
        removed.setdefault(vmid, []).append(program)
    state = sandbox.up(
        name,
        owner=owner,
        pct_delay=pct_delay,
        lxc_attach=lxc_attach,
        disks=dict(map(_pair, disk or [])),
        without=removed,
        binds=bind or [],
    )
    _show(state, as_json)
    if not as_json and not any(lifecycle.models_folder().glob("*/config.json")):
        option = "" if name == "default" else f" --name {shlex.quote(name)}"
        make = f"{shlex.quote(sys.executable)} -m trainer import-gguf"
        again = f"dflash-ops sandbox down{option} && dflash-ops sandbox up{option}"
        typer.echo(f"  no model to train on is in it; a small real one, with torch installed: {make} && {again}")


@app.command()
def down(name: Name = "default") -> None:
    """End a sandbox, and remove whatever a crashed one left."""
    if not sandbox.down(name):
        option = "" if name == "default" else f" --name {name}"
        raise NotFoundError(
            "no sandbox to end", where=name, next=f"dflash-ops sandbox status{option}, or dflash-ops sandbox up{option}"
        )
    typer.echo(f"sandbox {name} is down", err=True)


@app.command()
def status(name: Name = "default", as_json: Json = False) -> None:
    """Show where the sandbox listens and how its containers are."""
    _show(sandbox.status(name), as_json)


@app.command()
def demo(
    picture: Annotated[
        Path | None, typer.Option(help="Also save what the terminal showed there, as an SVG.", metavar="FILE")
    ] = None,
) -> None:
    """Show the whole job, in a sandbox of its own: deploy, train, watch, stop, resume, decode, roll back."""
    from rich.console import Console

    from dflash_ops.demo.run import demo as show

    if picture is None:
        show(Console(highlight=False))
    else:
        show(Console(highlight=False, record=True, width=110, force_terminal=True, color_system="truecolor"), picture)


def _pair(text: str) -> tuple[str, str]:
    place, colon, value = text.partition(":")
    if not colon or not value:
        raise UsageFault("an option needs a place and a value", where=text, next="write it as 200:64M or 200:tar")
    return place, value


def _show(state: SandboxState, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_facts(state)))
        return
    typer.echo(f"sandbox {state.name}: {state.user}@{state.host} port {state.port}, pid {state.pid}")
    typer.echo(f"  ssh -p {state.port} -i {state.key} -o UserKnownHostsFile={state.known_hosts} root@{state.host}")
    typer.echo(f"  API: https://{state.host}:{state.api_port}, signed by {state.api_ca}, tokens in {state.api_tokens}")
    for vmid, entry in sorted(state.containers.items()):
        kind = "unprivileged" if entry["unprivileged"] else "privileged"
        typer.echo(f"  container {vmid}: {entry['hostname']}, {kind}, {entry['status']}")
    named = f"DFLASH_OPS_SANDBOX={shlex.quote(state.name)} " if state.name != "default" else ""
    typer.echo(f"  use it, in the checkout: {named}dflash-ops gpu-status --inventory inventory/sandbox.toml")


def _facts(state: SandboxState) -> dict[str, Any]:
    return {
        "schema_version": state.schema_version,
        "name": state.name,
        "pid": state.pid,
        "host": state.host,
        "port": state.port,
        "user": state.user,
        "key": str(state.key),
        "known_hosts": str(state.known_hosts),
        "containers": state.containers,
        "nodes": state.nodes,
        "api_port": state.api_port,
        "api_ca": str(state.api_ca),
        "api_tokens": str(state.api_tokens),
    }
