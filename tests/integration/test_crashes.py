"""A process dies at every single change of its storage: nothing that was committed is lost.

Each script is run once for every operation that it has; for each, the process dies in the middle
of it or after it. Then a new process looks, and runs the script again to its end.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.support.crash_scripts import SCRIPTS, Script
from tests.support.failing_store import WORLDS, How


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
# To die before a change is to die after the one before it.
@pytest.mark.parametrize("how", [How.WITHIN, How.AFTER])
@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=type)
def test_death_at_any_change_loses_nothing(
    script: Script, kind: str, how: How, tmp_path: Path
) -> None:
    """A killed machine finds the instant that the author did not think of."""
    for num_changes in range(500):
        world = WORLDS[kind](tmp_path / str(num_changes))
        script.prepare(world)
        world.fate.die(num_changes, how)
        lived = world.run(partial(script.act, world))
        world.fate.revive()

        script.check(world, done=lived)
        script.act(world)
        script.check(world, done=True)
        if lived:
            assert num_changes >= script.num_changes_min
            return
    pytest.fail("the script has more changes than were tried")
