"""Take evidence of a worker from outside: its stacks, even if it hangs, and its ring."""

from workers.evidence.evidence import RINGS, STACKS, Evidence, copies
from workers.evidence.kernel import kernel_facts
from workers.evidence.stacks import (
    Subject,
    forget_stacks,
    offer_stacks,
    stacks_path,
    take_stacks,
    write_stacks,
)
