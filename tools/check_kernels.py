"""Compiles every GPU kernel for cards that need not be there: `python -m tools.check_kernels 80 86 89 90 120`.

A kernel that does not compile, spills registers, wants more shared memory than the card has, or reads weights or pages
in pieces of less than 128 bits is named, and the exit code is 1. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import triton

from localllm.kernels.gpu import catalog
from localllm.kernels.gpu.launch import SHARED_BYTES, KernelLaunch, is_interpreted

# These read what a token costs: weights, and the pages of keys and values.
READERS = frozenset({"_gemv", "_gemm", "_attend", "_dequantize"})
_WIDE_ROWS = 16  # of more rows the tensor cores are what takes time


def faults(launch: KernelLaunch, capability: int) -> Iterator[str]:
    """The faults of one kernel for sm_{capability}."""
    named = f"sm_{capability}: {launch.name} {_shown(launch)}"
    try:
        compiled = launch.compiled(capability)
    except Exception as error:  # Triton raises what its compiler does
        yield f"{named}: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"
        return
    if compiled.spilled_bytes:
        yield f"{named}: spills {compiled.spilled_bytes} bytes a thread"
    if _reads_wide(launch) and not compiled.wide_loads:
        yield f"{named}: no load of 128 bits"


def _reads_wide(launch: KernelLaunch) -> bool:
    return launch.name in READERS and launch.constants.get("ROWS", 0) <= _WIDE_ROWS


def _shown(launch: KernelLaunch) -> str:
    return ", ".join(f"{name}={value}" for name, value in launch.constants.items() if name.isupper())


def all_faults(launches: Iterable[KernelLaunch], capabilities: Iterable[int], threads: int) -> list[str]:
    """In the order of the launches. Half of a compilation is an assembler, which is a process of its own."""
    work = [(launch, capability) for launch in launches for capability in capabilities]
    with ThreadPoolExecutor(threads) as pool:
        try:
            return [fault for some in pool.map(lambda each: list(faults(*each)), work) for fault in some]
        except KeyboardInterrupt:
            os._exit(130)  # a compilation hears of no signal, and there is nothing to keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="+", choices=SHARED_BYTES, help="as 86 for sm_86")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compilations at once")
    parser.add_argument("--brief", action="store_true", help="each kernel in as few formats as have all of its ways")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"argument --threads: {arguments.threads} is no number of threads")
    if is_interpreted():
        parser.error("what is interpreted is not compiled: unset TRITON_INTERPRET")
    launches = list({each.variant: each for each in catalog.launches(is_brief=arguments.brief)}.values())
    found = all_faults(launches, arguments.capabilities, arguments.threads)
    print("\n".join(found))
    count = len(launches) * len(arguments.capabilities)
    print(f"triton {triton.__version__}: {count} compiled, {len(found)} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
