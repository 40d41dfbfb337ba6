"""Results of collectives are used only after a check: an abort leaves garbage in them."""

import ast
from collections.abc import Iterator

from tests.arch.tree import python_files, relative

#: ``torch.distributed``'s functions that leave a result, and the place of the result.
RESULT_AT = {
    "all_reduce": 0,
    "reduce": 0,
    "broadcast": 0,
    "all_gather": 0,
    "all_gather_single": 0,
    "all_gather_into_tensor": 0,
    "all_to_all": 0,
    "all_to_all_single": 0,
    "gather": 1,
    "reduce_scatter": 0,
    "reduce_scatter_single": 0,
    "reduce_scatter_tensor": 0,
    "scatter": 0,
    "recv": 0,
    "irecv": 0,
}
#: Those that read a result on the host by themselves, without a check.
OF_OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "recv_object_list",
}
READERS = {"on_host", "reading", "settled"}
#: Parts of a pass: what they leave becomes activations and gradients, and the host checks the sums
#: of the step before an update uses those.
PASSES = {
    "workers/models/attention.py: _Exchange.forward: received",
    "workers/models/attention.py: _Gather.forward: parts",
    "workers/models/attention.py: _Gather.backward: received",
    "workers/parallel/plain_styles.py: _sum_of: total",
    "workers/parallel/plain_styles.py: _Gather.forward: parts",
    "workers/train/executor/reduction.py: _OwnReduceScatter.__call__: received",
}
#: Gathered on the host, where waiting for a collective raises.
ON_HOST = {"workers/train/loading/restore.py: GroupTransport.all_gather: received"}


def test_every_result_of_a_collective_is_read_behind_a_check() -> None:
    """``tolist`` and ``cpu`` wait for a device, and do not see that an abort ended it by force."""
    unchecked: set[str] = set()
    num_checked = 0
    for path in python_files("workers"):
        for name, function in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            read = {held for argument in _read(function) for held in _names(argument)}
            for result in _results(function):
                if read & set(_names(result)):
                    num_checked += 1
                else:
                    unchecked.add(f"{relative(path)}: {name}: {ast.unparse(result)}")

    assert unchecked == PASSES | ON_HOST
    assert num_checked > 12, "the walk no longer finds the calls"


def test_no_collective_reads_its_result_by_itself() -> None:
    """torch's collectives of objects unpickle what arrived, before anything can be checked."""
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files("workers")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name) and _called(node) in OF_OBJECTS
    ]

    assert found == []


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{outer}{node.name}"
            if isinstance(node, ast.FunctionDef):
                yield name, node
            else:
                yield from _functions(node, f"{name}.")


def _results(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what the collectives in a function leave."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "dist"
            if is_torch and node.func.attr in RESULT_AT:
                yield node.args[RESULT_AT[node.func.attr]]


def _read(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function gives to the readers."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _called(node.func) in READERS:
            yield from node.args


def _called(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id not in {"self", "torch"}:
            yield one.id
