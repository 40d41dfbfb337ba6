"""Whatever nonsense the files of a checkpoint hold, reading it ends in an error of ours or not."""

import copy
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.deepspeed_folders import Folder, Param, native, read, tensor, universal
from tests.support.mutations import places
from ucp_core.errors import UcpError
from ucp_core.torch_files import Instance, TensorData

MODEL = [
    Param("1.up.weight", (4, 6), 0),
    Param("1.down.weight", (6, 4), 1, group=1),
    Param("1.norm.weight", (6,), role="frozen"),
    Param("1.scale", (3,), role="buffer"),
]
INFO = {
    "universal_checkpoint_version": 0.3,
    "tp_replicated_parameter_patterns": [r"\d+\.norm"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
    "parameter_with_sub_params": [{"patterns": ["x"], "shape": ((2, 2), 4), "partition_dim": 0}],
    "sub_param_shard_widths": {"x": [[1, 1], [1, 1]]},
}
JUNK = [None, -1, 3, 2**70, 0.5, "x", "", (), [], [3], {}, {"x": 1}, True, b"x", (1, 2)]


def _folder(kind: str) -> Folder:
    if kind == "universal":
        return universal()
    if kind == "universal3":
        return universal(stage=3)
    stage = 3 if kind == "zero3" else 1
    pp = 2 if kind == "pipeline" else 1
    folder = native(MODEL, stage=stage, dp=2, tp=2, pp=pp, info=INFO, more={"num_experts": [1]})
    if kind == "plain":
        tree = folder.trees["mp_rank_00_model_states.pt"]
        state = {0: {"exp_avg": tensor(np.zeros((2, 6), np.float32)), "step": 3}}
        groups = [{"params": [0], "lr": 0.1}]
        tree["optimizer"] = {"state": state, "param_groups": groups}
        tree["param_shapes"] = None
    return folder


def _tensors() -> list[TensorData | Instance]:
    name = "deepspeed.utils.tensor_fragment.fragment_address"
    return [
        tensor(np.zeros(0, np.float32)),
        tensor(np.zeros((2, 3), np.float32)),
        tensor(np.array(1, np.int64)),
        Instance(name, (), {"numel": 5, "start": 10**9}),
        Instance(name, (), {"numel": -5, "start": "a"}),
    ]


@settings(max_examples=3 * settings().max_examples, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["zero1", "zero3", "pipeline", "plain", "universal", "universal3"]),
    data=st.data(),
)
def test_junk_anywhere_in_the_files_is_an_error_of_ours(kind: str, data: st.DataObject) -> None:
    """A pickle's structure is the writer's word only."""
    folder = _folder(kind)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(folder.trees)))
        # The files share parts of their trees.
        folder.trees[name] = copy.deepcopy(folder.trees[name])
        found = places(folder.trees[name])
        if not found:
            continue
        holder, key = found[data.draw(st.integers(0, len(found) - 1))]
        if data.draw(st.booleans()):
            holder[key] = data.draw(st.sampled_from([*JUNK, *_tensors()]))
        else:
            del holder[key]
    with tempfile.TemporaryDirectory() as directory:
        for name in folder.trees:
            (Path(directory) / name).parent.mkdir(parents=True, exist_ok=True)
        folder.write(Path(directory))

        with suppress(UcpError):
            read(Path(directory))
