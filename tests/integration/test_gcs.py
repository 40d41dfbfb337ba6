"""Google's storage through gcsfs, against an emulator in a process of its own.

The emulator knows no preconditions: of two writers of one instant both win there. The service
itself refuses the second (``ifGenerationMatch=0``), which gcsfs asks for.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_servers import Fault, Proxy, gcs_server, proxied
from tests.support.store_conformance import StoreConformance
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


@pytest.fixture
def proxy(server: str, root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Stand between the server, where ``root`` is, and whoever opens a store after this."""
    del root
    with proxied(server) as begin:
        proxy = begin()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield proxy
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, r"/f is not permitted.*check the bucket's policy"),
        (401, r"/f cannot be reached with these credentials.*service account"),
    ],
)
def test_a_refusal_says_what_to_check(status: int, message: str, root: str, proxy: Proxy) -> None:
    """It is not taken for a file that is not there."""
    store, path = open_store(root)
    proxy.faults = [Fault(method=m, times=99, status=status) for m in ("GET", "POST")]

    for act in (
        lambda: store.read(join(path, "f")),
        lambda: store.size(join(path, "f")),
        lambda: store.exists(join(path, "f")),
        lambda: store.write_file(join(path, "f"), [b"x"], fsync=False),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            act()
        assert not caught.value.facts["missing"]


def test_what_fails_for_a_moment_is_repeated(root: str, proxy: Proxy) -> None:
    """By the client, once in these requests, because it waits for seconds between two."""
    store, path = open_store(root)
    proxy.faults = [Fault(method=m, times=1, status=503) for m in ("GET", "POST")]

    store.write_file(join(path, "f"), [b"0123"], fsync=False)

    assert store.read(join(path, "f")) == b"0123"
    assert store.read_range(join(path, "f"), 1, 2) == b"12"


def test_a_missing_bucket_is_not_made(root: str) -> None:
    """Its name may be a slip."""
    store, path = open_store(root.replace(_BUCKET, f"{_BUCKET}-slip"))

    with pytest.raises(StorageError, match=r"/f is in a bucket that does not exist"):
        store.write_file(join(path, "f"), [b"x"], fsync=False)
