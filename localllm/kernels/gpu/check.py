"""Runs `check_cases`: what they launch is compiled first, on threads; then all of it runs, and is compared.

A program of its own, see `ready`: `python -m localllm.kernels.gpu.check cuda:0`. Exit code 0 says that every kernel
was compared and none was wrong; its last line, which was not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from localllm.kernels.gpu.check_attention import Heads
from localllm.kernels.gpu.check_case import Case
from localllm.kernels.gpu.check_cases import GROUPS, CheckSizes, cases
from localllm.kernels.gpu.check_latent import LatentHeads
from localllm.kernels.gpu.launch import KernelLaunch, compile_all, is_interpreted, recorded
from localllm.kernels.gpu.product import dispatch_for
from localllm.kernels.gpu.ready import COMPARED, PROGRESS, UNCOMPARED, Ways, lacks_bf16
from localllm.kernels.sizes import Glu, RouterConfig, Weights
from localllm.kernels.state_shapes import ConvShape, DeltaShape, Mamba2Shape, Rwkv7Shape

# Every kernel, in the ways of a usual model. One that is loaded is checked in its own. Rows are of a multiple of 16
# numbers, as models have them: of others Triton compiles variants that nobody would use.
BRIEF = replace(
    CheckSizes(208, 2112, (1, 2, 4, 7, 20, 100), (GROUPS[0], None), (), (), (Glu("silu"),), (), ()),
    attention=(Heads(watches=True, chooses=True),),
    rwkv7s=(),
)


class Outcome(NamedTuple):
    """uncompared: a line for each kernel that no case compared, with the reason."""

    cases: list[Case]
    uncompared: list[str]

    @property
    def is_right(self) -> bool:
        return not self.uncompared and all(case.is_right for case in self.cases)

    def lines(self) -> list[str]:
        """Return a line for each case: last what is not right, worst last."""
        right, wrong = ([case.line() for case in self.cases if case.is_right is kind] for kind in (True, False))
        return [*right, *self.uncompared, *wrong]


def sizes_of(ways: Ways) -> CheckSizes:
    """Return what is tried for a model that is computed in these ways."""
    heads = (Heads(**{**one, "dtype": getattr(torch, one["dtype"])}) for one in ways["attention"])
    latents = (LatentHeads(**{**one, "dtype": getattr(torch, one["dtype"])}) for one in ways.get("latents", ()))
    routers = tuple(RouterConfig(**router) for router in ways.get("routers", ()))
    groups = tuple(_weights(group) if isinstance(group, dict) else group for group in ways["groups"])
    deltas = tuple(DeltaShape(**shape) for shape in ways.get("deltas", ()))
    glus = tuple(Glu(**glu) for glu in ways["glus"])
    return CheckSizes(
        groups=groups,
        attention=tuple(heads),
        latents=tuple(latents),
        glus=glus,
        routers=routers,
        deltas=deltas,
        convs=tuple(ConvShape(**shape) for shape in ways.get("convs", ())),
        mambas=tuple(Mamba2Shape(**shape) for shape in ways.get("mambas", ())),
        rwkv7s=tuple(Rwkv7Shape(**shape) for shape in ways.get("rwkv7s", ())),
        expert_biases=tuple(ways.get("expert_biases", ())),
    )


def _weights(fields: dict[str, Any]) -> Weights:
    """Return what JSON, which has lists only, made of it."""
    table = fields["table"]
    return Weights(**{**fields, "table": None if table is None else tuple(table)})


def sizes_for(sizes: CheckSizes, most_rows: int, dtype: torch.dtype | None = None) -> CheckSizes:
    """Return what of these sizes a card is given that takes so many rows at most, and computes in no other dtype."""
    heads = (each if dtype is None else replace(each, dtype=dtype) for each in sizes.attention)
    rows = tuple(count for count in sizes.row_counts if count <= most_rows)
    latents = (each if dtype is None else replace(each, dtype=dtype) for each in sizes.latents)
    attention, of_latents = tuple(dict.fromkeys(heads)), tuple(dict.fromkeys(latents))
    return replace(sizes, row_counts=rows, attention=attention, latents=of_latents)


def launches_of(device: torch.device, sizes: CheckSizes) -> tuple[list[KernelLaunch], int]:
    """Return what the cases launch, without a launch, and how many cases there are: what takes longest to compile,
    attention, is first. The references take a second."""
    torch.manual_seed(0)
    with recorded(runs=False) as launches:
        count = sum(1 for _ in cases(device, sizes))
    return launches[::-1], count


def checked(device: torch.device, sizes: CheckSizes, tell: Callable[[str], None]) -> Outcome:
    """Compile and compare. tell: hears how far that is."""
    launches, count = launches_of(device, sizes)
    failed: dict[str, str] = {}
    if not is_interpreted():
        failed = compile_all(launches, lambda done, total: tell(f"{done} of {total} compiled"))
    torch.manual_seed(0)
    found, compared = list[Case](), set[str]()
    tell(f"0 of {count} {COMPARED}")
    with recorded(runs=True) as ran:
        for case in cases(device, sizes):
            found.append(case)
            if case.error is not None:
                compared.update(launch.name for launch in ran)
            ran.clear()
            tell(f"{len(found)} of {count} {COMPARED}")
    left = next((case.name for case in found if case.error is None), "no case of it was run")
    absent = [name for name in dict.fromkeys(launch.name for launch in launches) if name not in compared]
    return Outcome(found, [f"{UNCOMPARED} {name}: {failed.get(name, left)}" for name in absent])


def _device(name: str) -> torch.device:
    found = re.fullmatch(r"cuda:(\d+)", name)
    if found is None or (torch.cuda.is_available() and int(found[1]) >= torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"{name!r} is not a GPU here, as cuda:0 is the first one")
    return torch.device(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m localllm.kernels.gpu.check",
        description="Compile every kernel, and compare it with its reference on random inputs.",
    )
    parser.add_argument("device", nargs="?", type=_device, default="cuda:0", help="cuda:0, as torch names it")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--brief", action="store_true", help="only in the ways in which most models use them")
    ways.add_argument("--ways", type=lambda text: sizes_of(json.loads(text)), help="only in these, of one model")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here that torch can use: localllm doctor says why")
    torch.set_num_threads(1)  # for small references: beside what compiles, more of them wait for each other
    torch.cuda.set_device(chosen.device)  # Triton launches on the current one
    end = "\r" if sys.stdout.isatty() else "\n"
    sizes = BRIEF if chosen.brief else chosen.ways or CheckSizes()
    dtype = torch.float32 if lacks_bf16(chosen.device) and not chosen.ways else None  # a model's ways name their own
    sizes = sizes_for(sizes, dispatch_for(chosen.device).most_rows, dtype)
    outcome = checked(chosen.device, sizes, lambda text: print(PROGRESS, text, end=end, flush=True))  # noqa: T201
    print("\n".join(outcome.lines()))  # noqa: T201
    sys.exit(not outcome.is_right)


if __name__ == "__main__":
    main()
