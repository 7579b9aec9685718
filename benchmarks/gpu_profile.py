"""Where the time of one decode step goes, kernel by kernel: a process, `python -m benchmarks.gpu_profile`.

Every launch of a step is kept, and those of one kind, one of each layer, are replayed in a graph by themselves: the
weights are others each time. What the step takes beyond their sum is torch's own copies and the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_resident import WithoutGraphs, decoded, resident, sequence
from benchmarks.gpu_timing import copying, replayed
from benchmarks.measure import interleaved
from benchmarks.peers_protocol import serve
from localllm.cache.kv_format import KV_FORMATS, kv_bytes_per_token
from localllm.cache.paged_kv import PagedKV
from localllm.engine.memory import choose_device
from localllm.kernels.gpu.launch import Launch
from localllm.offload.planner.roofline import device_seconds

_ROOM = 64
_STEPS = 16  # that the step's time is taken of


class Profile:
    @torch.inference_mode()
    def step(self, *, device: str, depth: int, kv: str, rounds: int, small: bool) -> dict[str, Any]:
        """Seconds of a step, and of all launches of a kind in it, in each round."""
        on = choose_device(device)
        engine = resident(on, depth + _ROOM, kv, _untold, small=small)
        if on.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, on)
        cache = sequence(engine.residency.new_pages(KV_FORMATS[kv]), depth, _ROOM)
        step = engine.runner.gpu_step
        assert step is not None
        kinds = _kinds(self._launches(engine.model, cache, depth))
        measures: dict[str, Callable[[], float]] = {"copy": copying(on)}
        steps = 1 if small else _STEPS
        measures["step"] = lambda: device_seconds(on, lambda: decoded(step, cache, depth, steps)) / steps
        measures |= {kind: replayed(on, [launch.run for launch in some]) for kind, some in kinds.items()}
        found = interleaved(measures, rounds)
        dense, coded = cache.layouts
        kv_bytes = depth * kv_bytes_per_token((dense, coded), 1)
        return {
            "depth": depth,
            "kv": kv,
            "copy_gbs": found.pop("copy"),
            "step_s": found.pop("step"),
            "kinds": {
                kind: {
                    "launches": len(some),
                    "num_bytes": sum(_num_bytes(launch, kv_bytes) for launch in some),
                    "seconds": [each * len(some) for each in found[kind]],
                }
                for kind, some in kinds.items()
            },
        }

    def _launches(self, model: Any, cache: PagedKV, depth: int) -> list[Launch]:
        """Of a step. Warm: what is made once is there."""
        step, kept, run = WithoutGraphs(model), list[Launch](), Launch.run
        decoded(step, cache, depth, 1)

        def keeping(launch: Launch) -> None:
            kept.append(launch)
            run(launch)

        with patch.object(Launch, "run", keeping):
            decoded(step, cache, depth, 1)
        return kept


def _untold(_text: str) -> None:
    """A launch that fails here raises."""


def _kinds(launches: list[Launch]) -> dict[str, list[Launch]]:
    """Of one kernel, for matrices of one shape, in the order of the step."""
    kinds: dict[str, list[Launch]] = {}
    for launch in launches:
        kinds.setdefault(_kind(launch), []).append(launch)
    return kinds


def _kind(launch: Launch) -> str:
    name, weights = launch.name.lstrip("_"), launch.arguments.get("qweight")
    if name in ("gemv", "gemm") and isinstance(weights, Tensor):
        K = weights[0].nbytes * 8 // launch.constants["BITS"] // 16
        return f"{name} {launch.arguments['out_features']}x{K}"
    return " ".join([name, str(launch.constants.get("KIND", ""))]).strip()


def _num_bytes(launch: Launch, kv_bytes: int) -> int:
    """Read and written. kv_bytes: of a layer's pages, of which the kernel is told addresses."""
    if launch.name == "_embed":
        return _sum({"x": launch.arguments["x"]}) * 5 // 4  # of the matrix a row of bytes is read
    if launch.name == "_attend":
        return kv_bytes + _sum({"q": launch.arguments["q"], "part": launch.arguments["part"]})
    return _sum(launch.arguments)


def _sum(arguments: Mapping[str, object]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(arguments)}.values())


def _tensors(arguments: Mapping[str, object]) -> Iterator[Tensor]:
    return (value for value in arguments.values() if isinstance(value, Tensor))


if __name__ == "__main__":
    serve(Profile())
