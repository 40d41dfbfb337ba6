"""The soak stands in for an operator: it boots machines whose Ray serves no more."""

import os
import signal
from contextlib import closing

import pytest

from tests.benchmarks import soak_site
from tests.support.network_cluster import HEAD, why_not
from tests.support.snapshots import eventually

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made"),
]


def test_a_head_that_obeyed_sigterm_is_booted_before_nodes_give_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process stays and serves nothing; after 60 s the raylets of all nodes end themselves."""
    monkeypatch.setattr(soak_site, "NUM_NODES", 0)
    monkeypatch.setattr(soak_site, "_WITHOUT_RAY_S_MAX", 1.0)
    with closing(soak_site.Network({}, has_redis=False)) as site:
        assert eventually(site.head_answers)
        before = site.named(HEAD, "gcs_server")
        assert before is not None
        os.kill(before, signal.SIGTERM)
        assert eventually(lambda: not site.head_answers())
        assert site.named(HEAD, "gcs_server") == before

        def is_back() -> bool:
            site.tend()
            return site.head_answers() and site.named(HEAD, "gcs_server") != before

        assert eventually(is_back, within_s=40.0)
