"""Google's storage through gcsfs, against an emulator in a process of its own.

The emulator knows no preconditions: of two writers of one instant both win there. The service
itself refuses the second (``ifGenerationMatch=0``), which gcsfs asks for.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import assert_loaded, save, small_state, whole_need
from tests.support.object_servers import gcs_server
from tests.support.store_conformance import StoreConformance
from ucp_core.checkpoint import find_committed, load, verify
from ucp_core.errors import StorageError
from ucp_core.storage import Store, join, open_store

pytest.importorskip(
    "gcp_storage_emulator", reason="gcp-storage-emulator is missing: pip install 'everstep[dev]'"
)
gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is missing: pip install 'everstep[gcs]'")

# gcsfs hands bytes to aiohttp as they are.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

_BUCKET = "everstep-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    gcsfs.GCSFileSystem.clear_instance_cache()
    with gcs_server(tmp_path_factory.mktemp("gcs") / "log", _BUCKET) as url:
        yield url
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def root(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    return f"gs://{_BUCKET}/{uuid.uuid4().hex}"


class TestGcs(StoreConformance):
    looks_first = True

    @pytest.fixture(autouse=True)
    def _root(self, root: str) -> None:
        self.root = root

    def make(self, tmp_path: Path) -> tuple[Store, str]:
        del tmp_path
        return open_store(self.root)


def test_a_checkpoint_lives_in_a_bucket(root: str) -> None:
    """Save, commit, find, load and verify, with nothing but the URL."""
    store, path = open_store(root)
    state = small_state()
    save(store, state, step=7, root=path)
    found = find_committed(store, path, lineage=[(1, 0)])
    assert found is not None
    need = whole_need(state)

    load(found.checkpoint, need)

    assert_loaded(state, need)
    assert verify(found.checkpoint) == []


def test_a_missing_bucket_is_not_made(root: str) -> None:
    """Its name may be a slip."""
    store, path = open_store(root.replace(_BUCKET, f"{_BUCKET}-slip"))

    with pytest.raises(StorageError, match=r"/f is in a bucket that does not exist"):
        store.write_file(join(path, "f"), [b"x"], fsync=False)
