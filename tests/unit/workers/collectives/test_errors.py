import pytest

from workers.collectives import CollectiveError, unreached

#: As gloo of torch 2.13 and NCCL 2.27 say them; the paths are shortened.
PEER = "10.91.0.3"


@pytest.mark.parametrize(
    ("said", "address"),
    [
        (
            f"Gloo connectFullMesh failed with [gloo/pair.cc:147] timeout, remote=[{PEER}]:41234",
            PEER,
        ),
        (f"connect: No route to host, remote=[::ffff:{PEER}]:41234", PEER),
        (
            f"Last error:\nsocketPollConnect: connect to {PEER}<41234> returned No route to host",
            PEER,
        ),
        (f"socketStartConnect: Connect to {PEER}<41234> failed : Connection refused", ""),
        # A rank that waits for a peer to connect learns nothing.
        ("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.h:311] Connect timeout", ""),
        # The peer was there, and ended.
        (f"[gloo/transport/tcp/pair.cc:553] Connection closed by peer [{PEER}]:33415", ""),
        (f"Read error [{PEER}]:33415: Connection reset by peer", ""),
    ],
)
def test_the_transport_names_the_peer_that_it_cannot_reach(said: str, address: str) -> None:
    """A link has two ends, and both are known: who said it, and whom it names."""
    cause = RuntimeError(said)
    error = CollectiveError("waiting for ranks [0, 1] failed", attempt=1)
    error.__cause__ = cause

    assert unreached(error) == unreached(cause) == address
