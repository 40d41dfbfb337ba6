"""What is written for DeepSpeed, read again: the same state, whatever the target's layout was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.training_states import TrainingState, adam_state, random_shapes
from ucp_core.boxes import Box
from ucp_core.checkpoint import Checkpoint, LocalTensor, load
from ucp_core.converters import open_source
from ucp_core.converters.deepspeed import universal_writer as deepspeed_universal_writer
from ucp_core.converters.deepspeed import writer as deepspeed_writer
from ucp_core.patterns import Cut, Pattern, Replicated
from ucp_core.rules import Rule, Rules
from ucp_core.storage import MemoryStore

MEMORY_BYTES = 32 << 20


def _state(seed: int, num_tensors: int, num_groups: int) -> TrainingState:
    rng = random.Random(seed)
    shapes = random_shapes(rng, num_tensors)
    state = adam_state(shapes, num_groups=num_groups, seed=seed)
    if rng.random() < 0.5:
        state.frozen = {"frozen.w": np.full((3, 4), 0.25, np.float32)}
    if rng.random() < 0.5:
        state.buffers = {"count": np.array([1, 2, 3], np.int64)}
    if rng.random() < 0.5:
        state.ties = {"alias": rng.choice(list(shapes))}
    if rng.random() < 0.5:
        state.extra = {"lr_scheduler": {"last_epoch": 3}, "client_state": {"mine": [1]}}
    return state


STATES = st.builds(_state, st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 2))


def _rules(state: TrainingState, rng: random.Random, tp: int) -> Rules:
    rules = [Rule(name, Replicated()) for name in state.buffers]
    for name, array in {**state.weights, **state.frozen}.items():
        choices: list[Pattern] = [Replicated()]
        choices += [Cut(dim) for dim, extent in enumerate(array.shape) if extent >= tp]
        choices += [
            Cut(dim, parts=(tp, extent - tp))
            for dim, extent in enumerate(array.shape)
            if extent % tp == 0 and extent >= 2 * tp
        ]
        rules.append(Rule(name.replace(".", r"\."), rng.choice(choices)))
    return Rules(tuple(rules))


def _assert_same(state: TrainingState, found: Checkpoint) -> None:
    need = [
        LocalTensor(
            fqn=name,
            slot=slot,
            dtype=found.state_map.entries[name, slot].dtype,  # type: ignore[index]
            shape=array.shape,
            box=Box.full(array.shape),
            data=memoryview(bytearray(array.nbytes)),
        )
        for name, slot, array in state.tensors()
    ]
    load(found, need)
    for tensor, (name, slot, array) in zip(need, state.tensors(), strict=True):
        assert bytes(tensor.data) == array.tobytes(), (name, slot)
    assert len(found.state_map.entries) == len(need)
    assert [dict(group) for group in found.param_groups] == state.groups
    assert found.manifest.ties == state.ties
    assert dict(found.manifest.roles) == {
        **dict.fromkeys(state.frozen, "frozen"),
        **dict.fromkeys(state.buffers, "buffer"),
    }
    assert found.step == state.step
    assert found.extra.get("lr_scheduler") == state.extra.get("lr_scheduler")
    assert found.extra.get("client_state", {}) == state.extra.get("client_state", {})


@settings(max_examples=30)
@given(
    state=STATES,
    stage=st.integers(1, 3),
    dp=st.integers(1, 9),
    tp=st.integers(1, 3),
    sub_group_size=st.sampled_from([3, 20, 10**9]),
    seed=st.integers(0, 1000),
)
def test_a_native_checkpoint_reads_back_as_it_was(
    state: TrainingState, stage: int, dp: int, tp: int, sub_group_size: int, seed: int
) -> None:
    """Reader and writer know the format each by itself, so they can differ."""
    rules = _rules(state, random.Random(seed), tp) if tp > 1 else None
    target: dict[str, Any] = {"stage": stage, "dp": dp, "tp": tp}
    store = MemoryStore()

    deepspeed_writer.write(
        state.save(MemoryStore(), "source"),
        store,
        "out",
        memory_bytes=MEMORY_BYTES,
        rules=rules,
        sub_group_size=sub_group_size,
        **target,
    )

    # What is written says itself how it is cut.
    _assert_same(state, open_source(store, "out"))


@settings(max_examples=15)
@given(state=STATES)
def test_a_universal_folder_reads_back_as_it_was(state: TrainingState) -> None:
    """It holds the metadata of two forms; a reader must not take it for a mixture of two runs."""
    store = MemoryStore()

    deepspeed_universal_writer.write(
        state.save(MemoryStore(), "source"), store, "out", memory_bytes=MEMORY_BYTES
    )

    _assert_same(state, open_source(store, "out"))
