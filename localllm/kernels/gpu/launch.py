"""One launch of a Triton kernel, as a value: to be run, recorded on a tape, or compiled for a card that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Of one block, in bytes: what a kernel may ask for beyond the 48 KiB that every card has (CUDA's programming guide,
# "technical specifications per compute capability"). Triton does not look at it before it launches.
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
_ALIGN = 16  # bytes of an address, or a number's factor, of which Triton compiles a variant of its own
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on tensors of the host: TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Compiled:
    """The resources that a kernel takes of a card. spilled_bytes: stored beside the registers by one thread;
    wide_loads: of 128 bits from global memory, one by one or to shared memory; mma: instructions of the tensor
    cores."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int
    mma: int


@dataclass(frozen=True)
class KernelLaunch:
    """kernel: a `triton.jit` function; arguments: its tensors and numbers, by name, None for what there is none of;
    constants: its constexprs."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def variant(self) -> str:
        """Return what all launches have in common that Triton compiles once for."""
        types = {name: (self._type(name), self._is_aligned(name)) for name in self.kernel.arg_names}
        return repr((self.name, types, self._constexprs(), self.num_warps, self.num_stages))

    def run(self) -> None:
        call = self.kernel[self.grid]
        if not is_interpreted():
            call(**self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's numpy, of a NaN, which a card computes
            call(**self.arguments, **self.constants)

    def compiled(self, capability: int) -> Compiled:
        """Compile for sm_{capability}, with no card at hand. Raises triton.CompilationError, and RuntimeError where
        the machine code cannot be made or wants more shared memory than the card has."""
        names = list(self.kernel.arg_names)
        source = ASTSource(
            fn=self.kernel,
            signature={name: self._type(name) for name in names},
            constexprs={(names.index(name),): value for name, value in self._constexprs().items()},
            attrs={(names.index(name),): [["tt.divisibility", _ALIGN]] for name in names if self._is_aligned(name)},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx, shared_bytes = made.asm["ptx"], made.metadata.shared
        if shared_bytes > SHARED_BYTES[capability]:
            raise RuntimeError(
                f"{self.name} wants {shared_bytes} bytes of sm_{capability}'s {SHARED_BYTES[capability]}"
            )
        log = _assembled(ptx)
        return Compiled(
            registers=_number(r"Used (\d+) registers", log),
            spilled_bytes=_number(r"(\d+) bytes spill stores", log),
            shared_bytes=shared_bytes,
            wide_loads=len(
                re.findall(r"ld\.global[^;]*\.v4\.b32|ld\.global[^;]*\.v2\.b64|cp\.async\S* [^;]*, 0x10", ptx)
            ),
            mma=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx)),
        )

    def _constexprs(self) -> dict[str, Any]:
        """Triton makes a constant of every number that is one, and variants for multiples of 16, unless told not to."""
        ones = {name: 1 for name, value in self.arguments.items() if isinstance(value, int) and value == 1}
        absent = {name: None for name, value in self.arguments.items() if value is None}
        return {**{name: 1 for name in ones if name not in self._unspecialized}, **absent, **self.constants}

    @property
    def _unspecialized(self) -> frozenset[str]:
        if is_interpreted():
            return frozenset(self.kernel.kwargs["do_not_specialize"] or ())
        return frozenset(parameter.name for parameter in self.kernel.params if parameter.do_not_specialize)

    def _type(self, name: str) -> str:
        value = self.arguments.get(name)
        if value is None or name in self._constexprs():
            return "constexpr"
        if isinstance(value, Tensor):
            return _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"

    def _is_aligned(self, name: str) -> bool:
        value = self.arguments.get(name)
        if value is None or isinstance(value, float) or name in self._constexprs() or name in self._unspecialized:
            return False
        return (value.data_ptr() if isinstance(value, Tensor) else value) % _ALIGN == 0


def run_all(launches: Sequence[KernelLaunch]) -> None:
    for launch in launches:
        launch.run()


def _assembled(ptx: str) -> str:
    """Return what the assembler says of registers and spills. Triton brings two: the older one refuses newer
    targets."""
    found = re.search(r"\.target (\S+)", ptx)
    assert found is not None, "every PTX names its target"
    folder, said = Path(triton.__file__).parent / "backends/nvidia/bin", ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for assembler in (folder / "ptxas", folder / "ptxas-blackwell"):
            if not assembler.exists():
                continue
            command = [str(assembler), "-v", f"--gpu-name={found[1].rstrip(',')}", file.name, "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stderr
            said = done.stderr
    raise RuntimeError(f"ptxas refuses it: {said[:500]}")


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, f"ptxas did not say {pattern}"
    return int(found[1])
