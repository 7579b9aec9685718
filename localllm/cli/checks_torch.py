"""Checks that torch, the driver, the card and Triton go together. Each of them by itself is checked elsewhere."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from localllm.cli.findings import Finding, fail, ok, warn
from localllm.engine.device import has_code
from localllm.kernels.child import run_within
from localllm.offload.planner.nvml import Gpu, sm_name
from localllm.repairs import TRITON, install_compiler, install_python_headers, install_torch

_TESTED = (2, 11), (2, 14)
# It takes half a second where nothing is wrong.
_PROBE_CPU_S = 20.0
_PROBE_SECONDS = 300.0
_SIGNS_OF_C = ("C compiler", "fatal error:", "CalledProcessError")
_USE_FP32 = "export LOCALLLM_DTYPE=fp32"

# Below each: what a card lacks. Triton 3.7 compiles for all of them, but multiplies matrices without tensor cores below
# sm_80; bf16 is emulated there: a V100 multiplies 9.6 TFLOPS in bf16, 14.0 in fp32.
_LACKS = {
    (6, 1): "8-bit dot products",
    (8, 0): "bf16 arithmetic (emulated, slower than fp32) and tensor cores in Triton's kernels",
    (8, 9): "fp8",
}


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch, by its own account.

    version: empty where it cannot be imported.
    architectures: those with machine code, as "sm_86", or with code to be translated, as "compute_120".
    error: why torch, or CUDA, does not work.
    rocm: the version of ROCm in CUDA's place, for AMD's cards, which torch counts as devices as well.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    devices: int = 0
    architectures: tuple[str, ...] = ()
    threads: int = 0
    error: str = ""
    rocm: str = ""


def torch_build() -> TorchBuild:
    """Never raises: a broken build raises whatever its libraries raise."""
    try:
        import torch

        version, threads = torch.__version__, torch.get_num_threads()
        cuda, rocm = _numbers(torch.version.cuda or ""), torch.version.hip or ""
    except Exception as error:
        return TorchBuild(error=f"{type(error).__name__}: {error}")
    if cuda is None and not rocm:
        return TorchBuild(version, threads=threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: the report says so
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            architectures = tuple(torch.cuda.get_arch_list())
            return TorchBuild(version, cuda, torch.cuda.device_count(), architectures, threads, rocm=rocm)
        except Exception as error:
            return TorchBuild(version, cuda, threads=threads, error=str(error).partition("\n")[0], rocm=rocm)


def check_torch(build: TorchBuild) -> Finding:
    if not build.version:
        return fail(f"cannot be imported: {build.error}", install_torch())
    runtime = _cuda(build.cuda) if build.cuda else f"ROCm {build.rocm}" if build.rocm else "CPU build"
    described = f"{build.version} ({runtime})"
    release = _numbers(build.version)
    if release is None or not _TESTED[0] <= release < _TESTED[1]:
        return warn(f"{described} is not one that is tested (2.11 to 2.13)", install_torch())
    return ok(f"{described}, {build.threads} threads")


def check_driver(cards: tuple[Gpu, ...], build: TorchBuild) -> Finding:
    """Check that the driver serves this build of torch: it serves every CUDA of its own number, and older ones."""
    card = cards[0]
    driver = f"driver {card.driver_version or 'of an unknown version'}"
    if card.driver_cuda is not None:
        driver += f" (up to {_cuda(card.driver_cuda)})"
    if not build.version:
        return fail(f"{driver}, but torch cannot be imported", install_torch(card.compute_capability, card.driver_cuda))
    if build.cuda is None:
        return fail(
            f"{driver}, but this torch is {'made for AMD' if build.rocm else 'a CPU build'}",
            install_torch(card.compute_capability, card.driver_cuda),
        )
    if card.driver_cuda is not None and card.driver_cuda[0] < build.cuda[0]:
        return fail(
            f"{driver} is too old for torch's {_cuda(build.cuda)}",
            install_torch(card.compute_capability, card.driver_cuda),
        )
    if build.devices:
        return ok(f"{driver}, torch built for {_cuda(build.cuda)}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return warn(f"{driver}, but CUDA_VISIBLE_DEVICES={hidden!r} hides the cards", "unset CUDA_VISIBLE_DEVICES")
    why = build.error or "torch sees no card"
    return fail(f"{driver}, but {why}", "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm")


def check_capability(card: Gpu, build: TorchBuild) -> Finding:
    """Tell what this generation of cards lacks, and check that torch has code for it."""
    capability = card.compute_capability
    if capability is None:
        return ok("this card does not tell")
    name = sm_name(capability)
    if build.architectures and not has_code(build.architectures, capability):
        detail = f"{name}: torch {build.version} has code for {', '.join(build.architectures)} only"
        return fail(
            detail,
            install_torch(card.compute_capability, card.driver_cuda)
            if capability >= (5, 0)
            else "export LOCALLLM_DEVICE=cpu",
        )
    lacks = [what for least, what in _LACKS.items() if capability < least]
    detail = f"{name} lacks {'; '.join(lacks)}" if lacks else f"{name}: bf16 and fp8 tensor cores"
    return warn(detail, _USE_FP32) if capability < (8, 0) else ok(detail)


def check_triton(cards: tuple[Gpu, ...], probe: Callable[[int], str] | None = None) -> Finding:
    """Check that a kernel compiles for each kind of card that is here. probe: returns what is wrong, "" for nothing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("triton")
    except PackageNotFoundError:
        return warn("not installed (GPU kernels)", TRITON) if cards else ok("not installed; not needed without a GPU")
    if not cards:
        return ok(f"{installed}, not needed without a GPU")
    known = sorted({card.compute_capability for card in cards if card.compute_capability is not None})
    for capability in known:
        wrong = (probe or probe_triton)(10 * capability[0] + capability[1])
        if any(sign in wrong for sign in _SIGNS_OF_C):  # the kernel has been compiled
            fix = install_python_headers() if "Python.h" in wrong else install_compiler()
            return warn(f"{installed}, without its own launcher: launches take 5 us longer ({wrong})", fix)
        if wrong:
            return fail(f"{installed} does not compile for {sm_name(capability)}: {wrong}", TRITON)
    return ok(f"{installed}, compiles for {', '.join(map(sm_name, known))}" if known else f"{installed}, not tried")


def probe_triton(capability: int) -> str:
    """Compile a kernel without Triton's cache; return the error, or ""."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "localllm.kernels.triton_probe", str(capability)]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        try:
            child = run_within(command, environment, cpu_s=_PROBE_CPU_S, wait_s=_PROBE_SECONDS)
        except TimeoutError as error:
            return f"no answer within {error}"
    if child.returncode == 0:
        return ""
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "fatal error:" in line] or lines or [f"exit code {child.returncode}"]
    return telling[-1]


def _cuda(version: tuple[int, int]) -> str:
    return f"CUDA {version[0]}.{version[1]}"


def _numbers(version: str) -> tuple[int, int] | None:
    """ "2.13.0+cpu" -> (2, 13)."""
    first, second, *_ = [*version.split("+")[0].split("."), "", ""]
    return (int(first), int(second)) if first.isdigit() and second.isdigit() else None
