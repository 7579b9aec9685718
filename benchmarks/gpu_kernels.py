"""Every kernel of the GPU beside its reference, on random inputs: a process, `python -m benchmarks.gpu_kernels`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers_protocol import serve
from localllm.engine.memory import choose_device
from localllm.kernels.gpu import check
from localllm.kernels.gpu.catalog import Heads
from localllm.kernels.gpu.check import Case

_FAMILIES = ("gemv", "gemm", "dequantized", "attention", "an embedding", "drawn tokens")
_OTHERS = "norms and gates"
_SMALLER = replace(check.SMALL, attention=(Heads("int8", "int8", 64, 1, 1),))  # for the interpreter


class Kernels:
    def check(self, *, device: str, seconds: float) -> dict[str, Any]:
        """By family: how many cases, those that are wrong, and the error that is closest to its tolerance. ended: why
        not all of them were tried."""
        torch.manual_seed(time.time_ns() % (1 << 31))
        until, found, ended = time.monotonic() + seconds, list[Case](), ""
        sizes = _SMALLER if device == "cpu" else check.CheckSizes()
        try:
            for case in check.cases(choose_device(device), sizes):
                found.append(case)
                if time.monotonic() > until:
                    ended = f"{seconds:.0f} s were over"
                    break
        except Exception as error:
            ended = f"{type(error).__name__}: {error}".splitlines()[0]
        last = f"{ended} (behind {found[-1].name if found else 'none'})" if ended else ""
        families = {family: [case for case in found if _family(case) == family] for family in (*_FAMILIES, _OTHERS)}
        return {"ended": last, "families": {family: _told(some) for family, some in families.items() if some}}


def _family(case: Case) -> str:
    return next((family for family in _FAMILIES if case.name.startswith(family)), _OTHERS)


def _told(cases: list[Case]) -> dict[str, Any]:
    closest = max(cases, key=_nearness)
    return {
        "cases": len(cases),
        "wrong": [case.line() for case in cases if not case.is_right or case.error is None],
        "closest": closest.name,
        "error": closest.error if closest.error == closest.error else None,  # JSON has no NaN
        "tolerance": closest.tolerance,
    }


def _nearness(case: Case) -> float:
    """The error by its tolerance: above 1 where it is wrong, and of those the NaN first."""
    if case.error is None or not case.tolerance:
        return 0.0 if case.is_right else float("inf")
    return case.error / case.tolerance if case.error == case.error else float("inf")


if __name__ == "__main__":
    serve(Kernels())
