"""How long the tests wait, in one place: for an event, and long enough for any machine under any load.

It ends what would never end, and says nothing about how fast anything is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0


def wait_for(condition: Callable[[], object]) -> None:
    """Fails where what is waited for does not come. Looks less often the longer it takes: it notices it a fiftieth of
    the time later, and leaves the processor to what is waited for."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < PATIENCE_S, "it has not come"
        time.sleep(min(max(0.0005, waited_s / 50), 0.02))
