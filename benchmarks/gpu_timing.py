"""How long a GPU takes for work that is launched again and again: a graph of it, replayed between two events.

Several copies of the data are worked on in turn, so many that no cache holds what is needed next. A CPU may stand in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from localllm.offload.planner.roofline import device_seconds, recorded

_STRETCH_S, _MOST_LAUNCHES = 5e-3, 400  # of a graph
_CACHES = 4  # as much data as that many second caches hold, and a copy more
_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 20}

Work = Sequence[Callable[[], object]]


def replayed(device: torch.device, work: Work) -> Callable[[], float]:
    """Samples of the seconds that one of these takes. Raises RuntimeError where no graph can be made of them."""

    def once() -> None:
        for each in work:
            each()

    device_seconds(device, once)  # compiles
    passes = 1
    if device.type == "cuda":
        passes = max(1, min(_MOST_LAUNCHES // len(work), round(_STRETCH_S / device_seconds(device, once))))

    def stretch() -> None:
        for _ in range(passes):
            once()

    run = recorded(device, stretch)
    if device.type == "cuda" and run is stretch:
        raise RuntimeError("it cannot be captured in a graph")
    return lambda: _seconds(device, run) / passes / len(work)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    if device.type != "cuda":
        return device_seconds(device, run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()  # while it is computed the driver takes the next one: no launch from the host is in the time
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copying(device: torch.device) -> Callable[[], float]:
    """Samples of the copy bandwidth in 1e9 bytes a second, those read and those written both counted."""
    source, target = (torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    sample = replayed(device, [lambda: target.copy_(source)])
    return lambda: 2 * source.nbytes / sample() / 1e9


def num_copies(device: torch.device, num_bytes: int) -> int:
    """Of so many bytes, that no cache holds one until its next turn."""
    if device.type != "cuda":
        return 2
    return 2 + _CACHES * torch.cuda.get_device_properties(device).L2_cache_size // num_bytes
