"""``ucp diff`` compares, ``ucp export`` writes another format, ``ucp extract`` shows a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucp_core.commands.console import (
    EXIT_CHECKPOINT,
    Json,
    Memory,
    RenameFile,
    RulesFile,
    Source,
    Tag,
    app,
    memory_size,
    names_of,
    open_all,
    open_any,
    print_facts,
    print_json,
    progress,
    read_rules,
    size,
)
from ucp_core.numerics import format_bytes
from ucp_core.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucp_core.inspection import DiffReport, TensorDiff
    from ucp_core.native import Checkpoint

#: Lines of each kind for people; programs get everything.
_ROWS_MAX = 50
_VALUE_CHARS_MAX = 60


@app.command("diff", epilog="Example: ucp diff step-00001200 exported --only 'layers[.]0[.]'")
def diff_command(  # noqa: PLR0913 - options of a command
    first: Source,
    second: Source,
    *,
    only: Annotated[
        str | None, typer.Option(help="Only tensors with a match of this expression in the name.")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Only these slots, such as weight,exp_avg.")
    ] = None,
    absolute: Annotated[float, typer.Option(help="Ignore differences |a-b| up to this ...")] = 0.0,
    relative: Annotated[float, typer.Option(help="... plus this times |b|.")] = 0.0,
    cast: Annotated[
        bool, typer.Option("--cast", help="Compare floats of two dtypes as the coarser one.")
    ] = False,
    read_all: Annotated[
        bool, typer.Option("--read-all", help="Also read what checksums prove equal.")
    ] = False,
    memory: Memory = "256MiB",
    threads: Annotated[int, typer.Option(min=1, help="At most this many readers.")] = 2,
    rules: RulesFile = None,
    rename: RenameFile = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints of any formats, tensor by tensor; exit code 1 if they differ.

    Rules and renamings apply to both; each must match a name of one of them. Small values are
    compared as well, unless --only or --slots select tensors.
    """
    from ucp_core.inspection import Tolerance, diff

    memory_bytes = memory_size(memory)
    opened = open_all([first, second], rules=rules, rename=rename)
    with progress("comparing", as_json=as_json) as bar:
        report = diff(
            *opened,
            tolerance=Tolerance(absolute, relative),
            names=only,
            slots=None if slots is None else frozenset(map(str.strip, slots.split(","))),
            cast=cast,
            read_all=read_all,
            threads=threads,
            memory_bytes=memory_bytes,
            progress=bar,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.equal:
        raise typer.Exit(EXIT_CHECKPOINT)


def _show(report: DiffReport) -> None:
    for row in report.tensors[:_ROWS_MAX]:
        typer.echo(f"{row.fqn} ({row.slot}): {_told(row)}")
    for value in report.values[:_ROWS_MAX]:
        missing = f"only in {value.only_in}: " if value.only_in else ""
        both = [value.in_b] if value.only_in == "b" else [value.in_a]
        if not value.only_in:
            both.append(value.in_b)
        typer.echo(f"{value.path}: {missing}{' and '.join(map(_cut, both))}")
    hidden = max(0, len(report.tensors) - _ROWS_MAX) + max(0, len(report.values) - _ROWS_MAX)
    if hidden:
        typer.echo(f"... and {hidden} more; --json lists all")
    typer.echo(
        f"{report.num_equal} tensors equal ({report.num_proven} by their checksums), "
        f"{len(report.tensors)} differ, {len(report.values)} small values differ; "
        f"{format_bytes(report.compared_bytes)} compared in {report.seconds:.1f} s"
    )


def _told(row: TensorDiff) -> str:
    if row.first_index is None or row.first_values is None:
        sides = [
            "-" if shape is None else f"{dtype}{list(shape)}"
            for dtype, shape in zip(row.dtypes, row.shapes, strict=True)
        ]
        return row.kind if "-" in sides else f"{row.kind}: {sides[0]} and {sides[1]}"
    parts = [f"{row.num_different} of {row.num_elements} elements"]
    if row.max_abs is not None:
        steps = "" if row.max_ulp is None else f" ({row.max_ulp} ulp)"
        parts.append(f"by at most {_short(row.max_abs)}{steps}")
    if row.num_nan:
        parts.append(f"{row.num_nan} of them not a number")
    one, two = map(_short, row.first_values)
    parts.append(f"first {list(row.first_index)}: {one} and {two}")
    return ", ".join(parts)


def _cut(value: Any) -> str:
    """Return a value as a short text: the state of a generator has 5 KB."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."


def _short(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


_To = Annotated[str, typer.Option("--format", help="universal, huggingface, dcp, deepspeed, ...")]
_Dtype = Annotated[str | None, typer.Option(help="Convert floats to fp32, fp16 or bf16.")]
_ShardSize = Annotated[
    str | None, typer.Option(help=("huggingface: size of the largest file; default 5GB."))
]
_KeepTied = Annotated[
    bool, typer.Option("--keep-tied", help="huggingface: write tied tensors twice.")
]
_ModelKey = Annotated[
    str | None, typer.Option(help="dcp: key of the model; default model; may be empty.")
]
_OptimizerKey = Annotated[
    str | None, typer.Option(help="dcp: key of the optimizer; default optim.")
]
_Flatten = Annotated[
    bool, typer.Option("--flatten-optimizer", help="dcp: groups by tensor, not by number.")
]
_Stage = Annotated[int | None, typer.Option(help="deepspeed: ZeRO stage.")]
_Dp = Annotated[int | None, typer.Option(help="deepspeed: data-parallel ranks.")]
_Tp = Annotated[int | None, typer.Option(help="deepspeed: tensor-parallel ranks.")]
_Ep = Annotated[int | None, typer.Option(help="deepspeed, megatron-core: expert-parallel ranks.")]
_QueryGroups = Annotated[
    int | None,
    typer.Option(help="megatron-core: number of k and v heads, if no config.json has it."),
]
_SubGroup = Annotated[
    int | None, typer.Option(help="deepspeed: sub_group_size of stage 3, if not the default.")
]
_Stages = Annotated[
    str | None, typer.Option(help="deepspeed: first layer of each pipeline stage, such as 0,12.")
]
_Tied = Annotated[
    list[str] | None,
    typer.Option(help="deepspeed: layers of a pipeline's tied module, such as embed=0,23."),
]
_TargetRules = Annotated[
    str | None, typer.Option(help="deepspeed: file of rules for tensor-parallel ranks.")
]
_TargetTag = Annotated[str | None, typer.Option(help="deepspeed: name of the folder.")]


#: Flags whose name differs from the library's.
_FLAGS = {
    "model": "--model-key",
    "optimizer": "--optimizer-key",
    "rules": "--target-rules",
    "shard_bytes": "--shard-size",
    "tag": "--target-tag",
    "tied_layers": "--tied",
}


@app.command(
    "export", epilog="Example: ucp export step-00001200 hf --format huggingface --dtype bf16"
)
def export_command(  # noqa: PLR0913 - options of a command
    source: Source,
    destination: Annotated[
        str, typer.Argument(help="Directory or URL that holds no checkpoint yet.")
    ],
    *,
    to: _To,
    dtype: _Dtype = None,
    shard_size: _ShardSize = None,
    keep_tied: _KeepTied = False,
    model_key: _ModelKey = None,
    optimizer_key: _OptimizerKey = None,
    flatten_optimizer: _Flatten = False,
    stage: _Stage = None,
    dp: _Dp = None,
    tp: _Tp = None,
    ep: _Ep = None,
    query_groups: _QueryGroups = None,
    sub_group_size: _SubGroup = None,
    stages: _Stages = None,
    tied: _Tied = None,
    target_rules: _TargetRules = None,
    target_tag: _TargetTag = None,
    memory: Memory = "512MiB",
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in the format of another framework.

    Formats: universal, huggingface, dcp (torch.distributed.checkpoint), megatron-core (torch_dist),
    deepspeed, deepspeed-universal. An option of one format is refused with another.
    """
    from ucp_core.formats import FORMATS, export

    if to not in FORMATS:
        raise typer.BadParameter(f"{to!r} is none of {', '.join(FORMATS)}", param_hint="--format")
    ties = [text.partition("=") for text in tied or ()]
    given = {
        "dtype": dtype,
        "shard_bytes": None if shard_size is None else size(shard_size),
        "keep_tied": keep_tied or None,
        "model": model_key,
        "optimizer": optimizer_key,
        "flatten_optimizer": flatten_optimizer or None,
        "stage": stage,
        "dp": dp,
        "tp": tp,
        "ep": ep,
        "query_groups": query_groups,
        "sub_group_size": sub_group_size,
        "stages": None if stages is None else _numbers(stages, "--stages"),
        "tied_layers": {key: _numbers(layers, "--tied") for key, _, layers in ties} or None,
        "rules": read_rules(target_rules),
        "tag": target_tag,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    _refuse_options(to, options)
    options["memory_bytes"] = memory_bytes = memory_size(memory)
    opened = open_any(source, rules=rules, rename=rename, tag=tag, memory_bytes=memory_bytes)
    if "rules" in options:
        options["rules"].refuse_idle(names_of(opened))
    store, directory = open_store(destination)
    with progress("exporting", as_json=as_json) as bar:
        export(opened, store, directory, format=to, progress=bar, **options)
    _show_export(opened, destination, to, dtype, as_json=as_json)


def _refuse_options(to: str, given: Iterable[str]) -> None:
    """Refuse options that the format does not have, by their flags."""
    from ucp_core.formats import options_of

    def flags(names: Iterable[str]) -> str:
        return ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names)

    known = options_of(to)
    wrong = [name for name in given if name not in known]
    if wrong:
        has = flags(sorted(known)) or "no options"
        raise typer.BadParameter(f"{flags(wrong)}: not for this format; {to} has {has}")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of layers like 0,12", param_hint=option)
    return tuple(int(part) for part in parts)


def _show_export(
    opened: Checkpoint, destination: str, to: str, dtype: str | None, *, as_json: bool
) -> None:
    from ucp_core.formats import exported, left_behind, warnings_of

    entries = exported(opened, format=to)
    num_bytes = sum(entry.num_bytes for entry in entries)
    missing = left_behind(opened, format=to)
    warnings = warnings_of(opened, format=to, dtype=dtype)
    if as_json:
        facts = {"destination": destination, "format": to, "tensors": len(entries)}
        print_json(facts | {"bytes": num_bytes, "left_behind": missing, "warnings": warnings})
        return
    typer.echo(f"{destination}: {len(entries)} tensors, {format_bytes(num_bytes)} as {to}")
    if missing:
        typer.echo(f"not in this format: {', '.join(missing)}")
    for warning in warnings:
        typer.echo(f"warning: {warning}")


@app.command(
    "extract",
    epilog="Example: ucp extract step-00001200 lm_head.weight --box 0:4,2:8 --out head.npy",
)
def extract_command(  # noqa: PLR0913 - options of a command
    source: Source,
    tensor: Annotated[str, typer.Argument(help="Name of a tensor.")],
    *,
    slot: Annotated[str, typer.Option(help="weight, exp_avg, ...")] = "weight",
    box: Annotated[str, typer.Option(help="Part of it, such as 0:4,:,3; default: all.")] = "",
    out: Annotated[
        str | None, typer.Option(help="Write it to this .safetensors or .npy file.")
    ] = None,
    memory: Memory = "256MiB",
    rules: RulesFile = None,
    rename: RenameFile = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Show a tensor or a box of it; write it to a file if one is given."""
    from ucp_core.inspection import extract, find, json_value, parse_box

    memory_bytes = memory_size(memory)
    opened = open_any(source, rules=rules, rename=rename, tag=tag)
    entry = find(opened, tensor, slot)
    wanted = parse_box(box, entry.shape)
    target = open_store(out) if out is not None else None
    first, crc32 = extract(opened, entry, wanted, memory_bytes=memory_bytes, out=target)
    facts = {
        "fqn": entry.key.fqn,
        "slot": slot,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "box": [list(bounds) for bounds in zip(*wanted, strict=True)],
        "num_elements": wanted.num_elements,
        "crc32": f"{crc32:08x}",
        "first": json_value(first),
    }
    facts |= {"out": out} if out else {}
    if as_json:
        print_json(facts)
    else:
        print_facts(facts | {"box": str(wanted)})
