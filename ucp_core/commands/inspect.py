"""``ucp inspect`` shows what a checkpoint holds; ``ucp verify`` reads every byte of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.commands.console import (
    EXIT_CHECKPOINT,
    Json,
    RenameFile,
    RulesFile,
    Source,
    Tag,
    app,
    open_any,
    print_facts,
    print_json,
    progress,
)
from ucp_core.manifest import Kind
from ucp_core.numerics import format_bytes

if TYPE_CHECKING:
    from ucp_core.native import Checkpoint


@app.command("inspect", epilog="Example: ucp inspect runs/demo/checkpoints/step-00001200 --tensors")
def inspect_command(
    checkpoint: Source,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    items: Annotated[
        bool,
        typer.Option("--items", help=("List what happens to everything that is not a tensor.")),
    ] = False,
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint of any format holds; read only its manifest or headers."""
    opened = open_any(checkpoint, rules=rules, rename=rename, tag=tag)
    facts = _facts(opened, checkpoint)
    if as_json:
        facts["tensors"] = _tensor_facts(opened)
        facts["items"] = {n: item._asdict() for n, item in sorted(opened.manifest.items.items())}
        print_json(facts)
        return
    print_facts(facts)
    if tensors:
        typer.echo()
        for item in _tensor_facts(opened):
            shape = "x".join(map(str, item["shape"])) or "scalar"
            typer.echo(
                f"{item['fqn']} {item['slot']} {item['dtype']} {shape} "
                f"in {item['fragments']} fragment(s)"
            )
    if items:
        typer.echo()
        for name, (policy, note) in sorted(opened.manifest.items.items()):
            typer.echo(f"{name}: {policy}, {note}")


@app.command("verify", epilog="Example: ucp verify runs/demo/checkpoints/step-00001200")
def verify_command(
    checkpoint: Source,
    rules: RulesFile = None,
    tag: Tag = None,
    as_json: Json = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Read every byte of a checkpoint and name any damage; exit code 1 if there is some."""
    from ucp_core.inspection import unchecked_bytes, verify

    opened = open_any(checkpoint, rules=rules, tag=tag)
    with progress("verifying", as_json=as_json) as bar:
        problems = verify(opened, progress=bar)
    num_bytes = sum(entry.num_bytes for entry in opened.manifest.files.values())
    unchecked = 0
    if opened.manifest.kind is Kind.FOREIGN:
        entries = opened.state_map.entries.values()
        num_bytes = sum(f.num_bytes for entry in entries for f in entry.fragments)
        unchecked = unchecked_bytes(opened)
    if as_json:
        found = [{"path": problem.path, "message": problem.message} for problem in problems]
        facts = {"ok": not problems, "bytes": num_bytes, "unchecked_bytes": unchecked}
        print_json(facts | {"problems": found})
    else:
        for problem in problems:
            typer.echo(str(problem))
        typer.echo(f"{format_bytes(num_bytes)} read, {len(problems)} problem(s)")
        if unchecked:
            typer.echo(
                f"{format_bytes(unchecked)} have no checksum in this format: damage in them "
                "cannot be found"
            )
    if problems:
        raise typer.Exit(EXIT_CHECKPOINT)


def _format(opened: Checkpoint) -> str:
    """Return the kind of a checkpoint of ours, or the name of its foreign format."""
    manifest = opened.manifest
    if manifest.kind is Kind.FOREIGN:
        return str(manifest.source.get("format", manifest.kind))
    return str(manifest.kind)


def _facts(opened: Checkpoint, url: str) -> dict[str, Any]:
    manifest = opened.manifest
    entries = manifest.state_map.entries
    return {
        "checkpoint": url,
        "format": _format(opened),
        # None if the checkpoint does not say: steps, attempts and ranks count from 1.
        "step": manifest.step or None,
        "attempt": manifest.attempt or None,
        "ranks": manifest.world_size or None,
        "parameters": sum(1 for key in entries if key.slot == "weight"),
        "slots": sorted({key.slot for key in entries}),
        "bytes": manifest.state_map.num_bytes,
        "fragments": sum(len(entry.fragments) for entry in entries.values()),
        # A foreign checkpoint has no table of files.
        "files": len(manifest.files)
        or len({fragment.file for entry in entries.values() for fragment in entry.fragments}),
        "groups": len(manifest.param_groups),
        "ties": dict(manifest.ties),
        "frozen": sorted(n for n, role in manifest.roles.items() if role == "frozen"),
        "buffers": sorted(n for n, role in manifest.roles.items() if role == "buffer"),
        "extra_tensors": sorted(n for n, role in manifest.roles.items() if role == "extra"),
        "extra": sorted(manifest.extra),
        "source": {name: value for name, value in manifest.source.items() if value},
    }


def _tensor_facts(opened: Checkpoint) -> list[dict[str, Any]]:
    aliases: dict[str, list[str]] = {}
    for alias, fqn in sorted(opened.manifest.ties.items()):
        aliases.setdefault(fqn, []).append(alias)
    return [
        {
            "fqn": key.fqn,
            "slot": key.slot,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "fragments": len(entry.fragments),
            "ties": aliases.get(key.fqn, []),
            "pattern": opened.manifest.patterns.get(key),
        }
        for key, entry in sorted(opened.state_map.entries.items())
    ]
