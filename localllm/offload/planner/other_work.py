"""How busy other programs keep this machine: measurements beside them show less than it can do. Needs no torch."""

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
    """Processor time up to one moment.

    at_s: the clock's time.
    all_s: of all processors since the system started, including what a virtual machine's host gave to others.
    own_s: of this process.
    """

    at_s: float
    all_s: float
    own_s: float


def counted() -> Counted:
    """Count the processor time up to now."""
    spent = psutil.cpu_times()._asdict()
    return Counted(time.monotonic(), sum(spent[name] for name in spent.keys() - set(_IDLE)), time.process_time())


def others(before: Counted, after: Counted) -> float:
    """Return the mean number of processors that others kept busy in between; 0 if that was too short to tell."""
    elapsed_s = after.at_s - before.at_s
    if elapsed_s < _LEAST_S:
        return 0.0
    return max(0.0, (after.all_s - before.all_s - (after.own_s - before.own_s)) / elapsed_s)


def is_much(processors: float) -> bool:
    """Return whether this many busy processors affect a measurement."""
    return processors > max(_MOST, _MOST_SHARE * (psutil.cpu_count() or 1))


def is_quiet() -> bool:
    """Return whether other programs are nearly idle, by the system's own figures of the last seconds and the last
    minute.

    This costs nothing. This program's own recent work counts as well, so the answer is too often no.
    """
    return not is_much(load()) and waiting() <= _MOST_WAITING


def load() -> float:
    """Return the mean number of programs that ran or waited for a processor in the last minute."""
    with suppress(OSError, AttributeError):
        return float(psutil.getloadavg()[0])
    return 0.0


def waiting() -> float:
    """Return the percentage of the last ten seconds in which some program waited for a processor; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return float(dict(field.split("=") for field in some.split()[1:])["avg10"])
    return 0.0
