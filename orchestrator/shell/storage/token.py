"""The token of a run: only users who can read its directory may change the run."""

import os
import secrets
from pathlib import Path

from orchestrator.report import TOKEN
from ucp_core.storage import LocalStore, Store, join, retried


def run_token(store: Store, run_path: str) -> str:
    """Return the token of the run in a directory; create one if there is none.

    On a file system only its owner can read it. In a bucket, the bucket's permissions decide.
    """
    path = join(run_path, TOKEN)
    if not store.exists(path):
        made = secrets.token_hex(16).encode()
        if isinstance(store, LocalStore):
            retried(lambda: _write_private(Path(path), made))
        else:
            store.write_atomic(path, made, fsync=False, exclusive=True)
    return store.read(path).decode().strip()


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that no other user can read at any time, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    # A repeated call finds the first token; both callers read it from the file.
    if path.exists():
        temporary.unlink()
    else:
        temporary.replace(path)
