"""How much of this machine other programs have: what is measured beside them is not what it can do. Needs no torch."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# Processors, and a share of all of them: one that a program keeps busy is one that every matrix product waits for.
_MOST = 0.5
_MOST_SHARE = 0.05
_MOST_WAITING = 10.0  # per cent of the last ten seconds in which some program waited for a processor
_LEAST_S = 0.1  # what the system counts is counted in hundredths of a second
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are part of what users have


@dataclass(frozen=True)
class Counted:
    """at_s: of a clock. all_s: of the processors, since the system was started; what the host of a virtual machine gave
    to others is among it. own_s: of this process."""

    at_s: float
    all_s: float
    own_s: float


def counted() -> Counted:
    """Now."""
    spent = psutil.cpu_times()._asdict()
    return Counted(time.monotonic(), sum(spent[name] for name in spent.keys() - set(_IDLE)), time.process_time())


def others(before: Counted, after: Counted) -> float:
    """How many processors other programs kept busy in between, on average; 0 where that was too short to tell."""
    elapsed_s = after.at_s - before.at_s
    if elapsed_s < _LEAST_S:
        return 0.0
    return max(0.0, (after.all_s - before.all_s - (after.own_s - before.own_s)) / elapsed_s)


def is_much(processors: float) -> bool:
    """Whether so many, kept busy by others, make a difference to what is measured."""
    return processors > max(_MOST, _MOST_SHARE * (psutil.cpu_count() or 1))


def is_quiet() -> bool:
    """Whether there is next to no other work, by what the system says of the last seconds and of the last minute: costs
    nothing. What this program has just done itself counts as well, so that it may say no too often."""
    return not is_much(load()) and waiting() <= _MOST_WAITING


def load() -> float:
    """Programs that had a processor or waited for one, on average of the last minute."""
    with suppress(OSError, AttributeError):
        return float(psutil.getloadavg()[0])
    return 0.0


def waiting() -> float:
    """Per cent of the last ten seconds in which some program waited for a processor; 0 where that is not known."""
    with suppress(OSError, ValueError, IndexError):
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return float(dict(field.split("=") for field in some.split()[1:])["avg10"])
    return 0.0
