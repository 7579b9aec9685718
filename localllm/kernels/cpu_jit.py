"""LLVM IR compiled for this very CPU at run time: native kernels with no compiler on the user's machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.config import user_directories
from localllm.kernels.cpu_ir import Kernel
from localllm.kernels.cpu_isa import LLVM_TARGETS, Isa, host_isas

if TYPE_CHECKING:
    import torch

DIGEST_BYTES = 32
# Level 3 takes a third longer, and no kernel is faster by it: they order and unroll their loops themselves.
_SPEED_LEVEL = 1
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class KernelUnavailableError(RuntimeError):
    """This machine cannot compile or run the kernel; the caller takes the torch path."""


@dataclass(frozen=True)
class Native:
    """A kernel's machine code: `address` is void(ptr args, i64 thread, i64 threads, ptr counter)."""

    address: int
    pointers: tuple[str, ...]
    integers: tuple[str, ...]
    engine: Any  # the code lives as long as its engine

    def step(self, **words: torch.Tensor | int) -> tuple[Native, ctypes.Array[ctypes.c_int64]]:
        """The kernel with its arguments, for a tape: words by their names, tensors and whole numbers. The tensors live
        as long as the words."""
        assert words.keys() == {*self.pointers, *self.integers}, (
            f"{sorted(words)} are not {self.pointers, self.integers}"
        )
        values = [words[name] for name in (*self.pointers, *self.integers)]
        array = (ctypes.c_int64 * len(values))(
            *(value if isinstance(value, int) else value.data_ptr() for value in values)
        )
        array.tensors = [value for value in values if not isinstance(value, int)]  # type: ignore[attr-defined]
        return self, array


@cache
def best_isa() -> Isa:
    """Raises KernelUnavailableError where no kernel can run."""
    if not host_isas():
        raise KernelUnavailableError("llvmlite is missing, or this CPU has neither AVX2 and FMA nor NEON dot products")
    openmp()
    return host_isas()[0]


def compiles(make: Callable[[], object]) -> bool:
    """Return whether this machine compiles what `make` compiles (15-150 ms, once)."""
    try:
        make()
    except KernelUnavailableError:
        return False
    return True


def compile_kernel(kernel: Kernel, isa: Isa, *, speed_level: int = _SPEED_LEVEL) -> Native:
    """speed_level: as `machine_code` has it.

    Raises KernelUnavailableError where the IR does not compile, or would call a function that nothing resolves.
    """
    address, engine = link(kernel.source(), kernel.name, isa, speed_level=speed_level)
    return Native(address, tuple(kernel.pointers), tuple(kernel.integers), engine)


def link(
    source: str, name: str, isa: Isa, resolved: tuple[str, ...] = (), *, speed_level: int = _SPEED_LEVEL
) -> tuple[int, Any]:
    """The address of a module's function `name`, and the engine that keeps it alive. Raises MemoryError."""
    from llvmlite import binding as llvm

    require_spare_memory()
    kept = KeptCode.of(source, isa, speed_level)
    code = kept.read()
    if code is None:
        try:
            code = machine_code(source, isa, speed_level)
        except RuntimeError as error:
            raise KernelUnavailableError(f"LLVM refused the kernel: {error}") from error
        unknown = undefined_symbols(code, source) - set(resolved)
        if unknown:
            raise KernelUnavailableError(f"the kernel would call {', '.join(sorted(unknown))}")
        kept.write(code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(isa))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(name), engine


@dataclass(frozen=True)
class KeptCode:
    """Machine code kept in the user's cache directory: compiling all kernels of a model takes 0.7 s, reading them none.

    The file's name is a digest of all that the code depends on, its first bytes one of that name and the code: a file
    that is damaged, or another's, is compiled anew. A cache that cannot be written is done without.
    """

    path: Path

    @classmethod
    def of(cls, source: str, isa: Isa, speed_level: int = _SPEED_LEVEL) -> KeptCode:
        import llvmlite

        cpu, features = host_cpu(isa)
        parts = (llvmlite.__version__, isa.name, cpu, features, str(speed_level), source)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cls(user_directories().cache / "kernels" / f"{digest}.o")

    def read(self) -> bytes | None:
        try:
            kept = self.path.read_bytes()
        except OSError:
            return None
        digest, code = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
        return code if self._digest(code) == digest else None

    def write(self, code: bytes) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                temporary.write_bytes(self._digest(code) + code)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)

    def _digest(self, code: bytes) -> bytes:
        return hashlib.sha256(self.path.name.encode() + code).digest()


def machine_code(source: str, isa: Isa, speed_level: int = _SPEED_LEVEL) -> bytes:
    """An ELF object, optimised for `isa`. speed_level: of the passes before instructions are chosen, 0 for none.

    Raises RuntimeError for IR that is not well-formed.
    """
    from llvmlite import binding as llvm

    machine = target_machine(isa)
    module = llvm.parse_assembly(source)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level))
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def target_machine(isa: Isa) -> Any:
    """A new one for every compilation: its engine takes it over and frees it."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = host_cpu(isa)
    target = llvm.Target.from_triple(LLVM_TARGETS[isa.machine])
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault")


def host_cpu(isa: Isa) -> tuple[str, str]:
    """LLVM's name of the CPU to compile for, and its features: this machine's where the ISA names none."""
    from llvmlite import binding as llvm

    if isa.cpu or isa not in host_isas():
        return isa.cpu, ",".join(f"+{need}" for need in isa.needs)
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def undefined_symbols(code: bytes, source: str) -> set[str]:
    """Functions that the machine code calls and does not hold. LLVM makes a call of what a CPU has no instruction for;
    the linker leaves one that nothing resolves at address zero, and says nothing."""
    from llvmlite import binding as llvm

    sections = {section.name(): section.data() for section in llvm.ObjectFileRef.from_data(code).sections()}
    names = {name.decode() for name in sections[b".strtab"].split(b"\0") if name}
    own = {line.split("@")[1].split("(")[0] for line in source.splitlines() if line.startswith("define ")}
    return {name for name in names - own if _IDENTIFIER.fullmatch(name)} - {"_GLOBAL_OFFSET_TABLE_"}


@cache
def openmp() -> ctypes.CDLL:
    """The OpenMP runtime that is torch's. Raises KernelUnavailableError."""
    if platform.system() != "Linux":
        raise KernelUnavailableError("torch's OpenMP runtime has a GOMP interface on Linux only")
    found = importlib.util.find_spec("torch")  # which is not imported for it
    for folder in () if found is None else found.submodule_search_locations or ():
        for path in sorted((Path(folder) / "lib").glob("libgomp*")):
            return ctypes.CDLL(str(path))
    importlib.import_module("torch")  # it has loaded another one than its own
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libgomp" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    raise KernelUnavailableError("torch was built without libgomp")


_SPARE_BYTES = 32 << 20  # ten times what the largest of our kernels takes while it is compiled


def require_spare_memory() -> None:
    """Raises MemoryError where there is too little for them. Takes 5 us: nothing of it is touched."""
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except OSError as error:
        raise MemoryError(f"{_SPARE_BYTES >> 20} MiB must be free for what is compiled while it computes") from error
