"""llama.cpp as one side, through llama-cpp-python's low-level interface: what `llama-bench` does, answering a pipe.

Runs in the interpreter that has llama_cpp and gguf; imports nothing of localllm.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.peers_protocol import UnavailableError, serve

try:
    import llama_cpp

    from benchmarks.peers_gguf import Mix, model_tensors, weight_bytes, write_random

    MISSING = ""
except (ImportError, OSError, RuntimeError) as error:  # the last two: a library that cannot be loaded
    MISSING = f"{type(error).__name__}: {error}"

# -DGGML_NATIVE: this machine's instructions, as a build for itself has. The interface in the browser needs npm.
INSTALL = (
    'CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF'
    ' -DLLAMA_OPENSSL=OFF" pip install --no-binary llama-cpp-python "llama-cpp-python==0.3.36" "gguf>=0.17,<1"'
)
BATCH_TOKENS = 2048  # llama.cpp's own defaults for a prompt, in pieces of 512


class LlamaCpp:
    """One model, and a context for each flash attention setting and depth, filled once and trimmed after each use."""

    def load(
        self,
        *,
        shape: dict[str, Any],
        threads: int,
        directory: str,
        head: str = "Q6_K",
        mix: Mix = "Q4_0",
        repacks: bool = True,
    ) -> dict[str, Any]:
        """Write the random model where it is not there yet, read it. Raises UnavailableError without llama_cpp, disk
        space, or its success.

        repacks: matrices are copied into the order of its fastest kernels; else they stay in the file's mapped pages.
        """
        if MISSING:
            raise UnavailableError(f"llama_cpp or gguf cannot be imported ({MISSING})", INSTALL)
        self.threads = threads
        tokens = random.Random(0).choices(range(shape["vocab_size"]), k=BATCH_TOKENS)
        self.tokens = itertools.cycle(tokens)  # nothing is sampled; other tokens choose other experts
        self.contexts: dict[tuple[bool, int], Any] = {}
        self.log: list[str] = []
        self._keep_log = llama_cpp.llama_log_callback(self._note)  # C holds it: it must outlive this call
        llama_cpp.llama_log_set(self._keep_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = Path(directory) / f"random-{mix.lower()}.gguf"
        if path.exists():
            facts: dict[str, Any] = {"weight_bytes_per_token": weight_bytes(shape, head, mix)}
        else:
            _check_room(path.parent, sum(tensor.nbytes for tensor in model_tensors(shape, head, mix)))
            facts = {**write_random(path, shape, head, mix)}
        params = llama_cpp.llama_model_default_params()
        if not repacks:
            if not hasattr(params, "use_extra_bufts"):  # any attribute could be set
                raise UnavailableError("this llama-cpp-python cannot leave matrices as they are", INSTALL)
            params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise UnavailableError(f"llama.cpp does not load the file: {''.join(self.log[-3:]).strip()}")
        buffers = [line.split(":", 1)[1].strip() for line in "".join(self.log).splitlines() if "buffer size" in line]
        return {
            **facts,
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "cpu_features": llama_cpp.llama_print_system_info().decode().strip(),
            "buffers": buffers,
        }

    def prefill(self, *, tokens: int, flash: bool) -> float:
        context = self._context(flash, 0, tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        self._decode(context, tokens)
        return time.perf_counter() - started

    def decode(self, *, tokens: int, depth: int, flash: bool) -> float:
        context = self._context(flash, depth, depth + tokens)
        memory = llama_cpp.llama_get_memory(context)
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) < 0:
            self._decode(context, depth)
        started = time.perf_counter()
        for _ in range(tokens):
            self._decode(context, 1)
        taken = time.perf_counter() - started
        assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == depth + tokens - 1
        if not llama_cpp.llama_memory_seq_rm(memory, 0, depth, -1):  # recurrent states: it is filled anew
            llama_cpp.llama_memory_clear(memory, True)
        return taken

    def _context(self, flash: bool, depth: int, capacity: int) -> Any:
        if (flash, depth) not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_batch = capacity, BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            context = llama_cpp.llama_init_from_model(self.model, params)
            if not context:
                raise UnavailableError(f"llama.cpp makes no context: {''.join(self.log[-3:]).strip()}")
            self.contexts[flash, depth] = context
        return self.contexts[flash, depth]

    def _decode(self, context: Any, tokens: int) -> None:
        """Append so many tokens; logits for the last of each batch, as generation needs them."""
        while tokens:
            count = min(tokens, BATCH_TOKENS)
            ids = (llama_cpp.llama_token * count)(*itertools.islice(self.tokens, count))
            status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, count))
            if status != 0:
                raise UnavailableError(f"llama_decode returned {status}")
            tokens -= count
        llama_cpp.llama_synchronize(context)

    def _note(self, _level: int, text: bytes, _data: object) -> None:
        self.log.append(text.decode(errors="replace"))


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UnavailableError(
            f"the random model needs {needed / 1e9:.1f} GB in {directory}, {free / 1e9:.1f} GB are free",
            "--keep DIRECTORY on a larger disk",
        )


if __name__ == "__main__":
    serve(LlamaCpp())
