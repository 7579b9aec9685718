"""Loads and launches what Triton has compiled, without a C compiler: by calls into the driver's library.

Triton's own driver compiles a module in C where it first runs, for which it needs a compiler and Python's headers. Here
is what our kernels use of it: pointers and numbers as arguments, one program a block, no scratch memory, no descriptors
of tensors. A launch takes 5 us longer.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

import triton
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver

from localllm.kernels.gpu.ready import lacks_for_triton

# Of an argument, by Triton's name of its type: how it is packed into eight bytes.
_SLOTS = {
    "i1": "b7x",
    "i8": "b7x",
    "i16": "h6x",
    "i32": "i4x",
    "i64": "q",
    "u1": "B7x",
    "u8": "B7x",
    "u16": "H6x",
    "u32": "I4x",
    "u64": "Q",
    "fp32": "f4x",
    "fp64": "d",
}
# Names of CUDA's driver interface, without its prefixes.
_INVALID_CONTEXT, _NUM_REGS, _LOCAL_SIZE_BYTES, _MAX_THREADS = 201, 4, 3, 0
_PREFER_SHARED, _SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_BYTES, _SHARED_BYTES_OPTIN = 1, 1, 8, 97
_DEVICE_POINTER, _PROGRAMMATIC_STREAM_SERIALIZATION = 3, 6
_SHARED_BYTES_ALWAYS = 49152


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CtypesDriver(CudaDriver):  # type: ignore[misc]
    """Triton's driver, but for what that has from its module in C."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        GPUDriver.__init__(self)
        self.utils = _Utils(ctypes.CDLL(library))
        self.launcher_cls = partial(_Launcher, self.utils)


class _Utils:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RuntimeError, as Triton's own, where the driver does not succeed."""
        self.require(getattr(self._library, name)(*arguments))

    def require(self, status: int) -> None:
        if status:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(said))
            raise RuntimeError(f"Triton Error [CUDA]: {(said.value or b'').decode()}")

    def ensure_context(self, device: int) -> None:
        """Make the context that torch uses the current one of this thread, where it has none."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.call("cuCtxSetCurrent", context)

    def get_device_properties(self, device: int) -> dict[str, int]:
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), _SHARED_BYTES_OPTIN, device)
        return {"max_shared_mem": found.value}

    def load_binary(self, name: str, code: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        """Return the module, the function, its registers, spilled words, and the most threads of a block."""
        self.ensure_context(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())

        def attribute(number: int) -> int:
            found = ctypes.c_int()
            self.call("cuFuncGetAttribute", ctypes.byref(found), number, function)
            return found.value

        optin = self.get_device_properties(device)["max_shared_mem"]
        if shared_bytes > _SHARED_BYTES_ALWAYS and optin > _SHARED_BYTES_ALWAYS:
            self.call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            dynamic = optin - attribute(_SHARED_SIZE_BYTES)
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, dynamic)
        words = attribute(_LOCAL_SIZE_BYTES) // 4
        return module.value or 0, function.value or 0, attribute(_NUM_REGS), words, attribute(_MAX_THREADS)

    def device_pointer(self, value: Any) -> int:
        """value: a tensor, of which the host's is locked in memory, an address, or None."""
        if value is None or isinstance(value, int):
            return value or 0
        pointer: int = value.data_ptr()
        if value.is_cuda or not pointer:
            return pointer
        found = ctypes.c_uint64()
        self.call("cuPointerGetAttribute", ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(pointer))
        return found.value

    def launch(self, config: _Config, function: int, parameters: Any) -> int:
        status: int = self._library.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), parameters, None)
        return status


class _Launcher:
    """Launches one kernel, in whichever threads.

    Raises NotImplementedError for a kernel that needs more than is here.
    """

    def __init__(self, utils: _Utils, source: Any, metadata: Any) -> None:
        kinds = [(number, kind) for number, kind in enumerate(source.signature.values()) if kind != "constexpr"]
        others = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid)
        unknown = [kind for _, kind in kinds if kind not in _SLOTS and not str(kind).startswith("*")]
        if any(others) or unknown or metadata.num_ctas != 1:
            raise NotImplementedError(f"{metadata.name} can be launched with a C compiler only")
        self._utils, self._lock, self._is_checked = utils, Lock(), False
        self._read = [(number, utils.device_pointer if str(kind)[0] == "*" else None) for number, kind in kinds]
        # Behind them two pointers: to scratch memory, and to that of a profiler.
        self._values = struct.Struct("".join(_SLOTS.get(kind, "Q") for _, kind in kinds) + "QQ")
        self._buffer = ctypes.create_string_buffer(self._values.size)
        first, count = ctypes.addressof(self._buffer), len(kinds) + 2
        self._parameters = (ctypes.c_void_p * count)(*(first + 8 * index for index in range(count)))
        self._overlaps = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _Config(attributes=ctypes.pointer(self._overlaps), num_attributes=int(metadata.launch_pdl))
        self._config.block[:] = (32 * metadata.num_warps, 1, 1)
        self._config.shared_bytes = metadata.shared

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: int,
        _packed: object,
        metadata: Any,
        enter: Callable[[Any], object] | None,
        leave: Callable[[Any], object] | None,
        *arguments: Any,
    ) -> None:
        if enter is not None:
            enter(metadata)
        if x * y * z > 0:
            values = [arguments[number] if read is None else read(arguments[number]) for number, read in self._read]
            with self._lock:
                self._values.pack_into(self._buffer, 0, *values, 0, 0)
                self._config.grid[:] = (x, y, z)
                self._config.stream = stream
                status = self._utils.launch(self._config, function, self._parameters)
                if status == _INVALID_CONTEXT:  # of a thread that has not used the card
                    self._utils.ensure_context(triton.runtime.driver.active.get_current_device())
                    status = self._utils.launch(self._config, function, self._parameters)
            self._utils.require(status)
        if leave is not None:
            leave(metadata)


def choose_driver() -> None:
    """Have Triton launch by its own driver, or by this one where that cannot be compiled."""
    own = None
    if not lacks_for_triton():
        with suppress(Exception):  # of any kind: from a compiler without its own headers, say
            own = triton.runtime.driver.active
    if own is None:
        triton.runtime.driver.set_active(CtypesDriver())
