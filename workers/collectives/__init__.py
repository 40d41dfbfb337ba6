"""Recorded, abortable process groups over gloo and NCCL.

``form`` creates an attempt's groups, which ``torch.distributed`` uses as usual, and ``leave``
releases them. ``abort`` ends every wait of an attempt from outside. The record ring shows every
process what the groups do.

torch 2.14 can re-form a group by itself (``dist._reconfigure``). everstep does not use that:

    four ranks over gloo, medians          these groups      torch's reconfigure
    abort ends a wait                      in 6 ms           no, the timeout does
    three survivors form                   15 ms             7 ms
    four form, one of them new             45 ms             18 ms
    a member dies while the rest form      abort ends that   ends at the timeout
    sub-groups and meshes                  re-formed         keep their old members
    sub-groups with a new process          yes               no, their names differ
    a new process with a new store         yes               no
    a stopped process shows its calls      yes               no

A wait that never ends keeps one of the two threads of a gloo group. After two such waits, the group
that reconfigure formed does no work until their timeout. The 8 to 27 ms that it saves are small
compared with a lost timeout. The figures are from ``tests/benchmarks/RESULTS.md``.
"""

from workers.collectives.errors import (
    AbortedError,
    CollectiveError,
    GroupError,
    causes,
    unreached,
)
from workers.collectives.forming import (
    abort,
    check,
    form,
    is_within_collective,
    leave,
    locate,
    places,
    set_timeout,
    span,
    wait_for_leftovers,
)
from workers.collectives.group import connect_pairs
from workers.collectives.nccl import is_recording_graph, share_device
from workers.collectives.places import described, is_of_script, script_frame, script_line
from workers.collectives.results import on_host, reading, settled
