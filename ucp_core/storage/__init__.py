"""Where bytes are kept: one protocol, with stores for local files, fsspec URLs and memory."""

from ucp_core.storage.appended import (
    PieceWriter,
    appended_sizes,
    read_all_appended,
    read_appended,
)
from ucp_core.storage.base import (
    Buffer,
    ReadRange,
    RefusingStore,
    Stamp,
    Store,
    ask_ahead,
    join,
    kept_open,
)
from ucp_core.storage.holding import held
from ucp_core.storage.local import (
    LocalStore,
    is_full,
    is_link,
    is_local,
    may_reserve,
    within,
)
from ucp_core.storage.memory import MemoryStore
from ucp_core.storage.ownership import RECENT_S, Owner, claim, claims, next_claim
from ucp_core.storage.passing import retried
from ucp_core.storage.undoing import tidied, undone
from ucp_core.storage.url import open_store
