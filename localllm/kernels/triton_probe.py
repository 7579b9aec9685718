"""A test whether Triton compiles here: a kernel for the card's capability, then C that Python can load.

The second is what Triton launches its kernels with: it needs a C compiler and Python's headers, which no package of
Python brings along. Without them `gpu.ctypes_driver` launches. No GPU is touched. Run as a program of its own, `python
-m localllm.kernels.triton_probe 86`, for a compiler that crashes takes its process with it; exit code 0 says that both
work.
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src

_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "localllm_probe", 0, -1, 0};
PyMODINIT_FUNC PyInit_localllm_probe(void) { return PyModule_Create(&module); }
"""


@triton.jit  # type: ignore[untyped-decorator]
def _double(x, y, num_values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < num_values)
    tl.store(y + offsets, values + values, mask=offsets < num_values)


def compile_kernel(capability: int) -> bytes:
    """The machine code for sm_{capability}."""
    signature = {"x": "*bf16", "y": "*bf16", "num_values": "i32", "BLOCK": "constexpr"}
    source = ASTSource(_double, signature=signature, constexprs={(3,): 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return bytes(compiled.asm["cubin"])


def compile_c() -> None:
    compile_module_from_src(_MODULE, "localllm_probe")


if __name__ == "__main__":
    compile_kernel(int(sys.argv[1]))
    compile_c()
