"""How long the tests wait, in one place: for an event, and long enough for any machine under any load.

It ends what would never end, and says nothing about how fast anything is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0


def wait_for(condition: Callable[[], object]) -> None:
    """Fails where what is waited for does not come."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.0005)
