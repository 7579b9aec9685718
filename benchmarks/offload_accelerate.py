"""Hugging Face's accelerate as one side: a model of which a part stays on the disk. A worker of its own, as all sides.

Its hooks take each matrix from a file for as long as it is computed with, through the page cache: where the machine has
memory to spare, the "disk" is RAM. So every task is done in two ways: with all files in the page cache, and with their
pages dropped from it before each pass, as where nothing is to spare. What a process has mapped stays in both.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import drop_from_cache, fill_cache
from benchmarks.peers import GIB, Contender
from benchmarks.peers_protocol import UnavailableError, serve

INSTALL = 'pip install "accelerate>=1.15,<2" "transformers>=5.20,<6"'
CACHED, DROPPED = "page cache warm", "page cache dropped"
GEN_TOKENS = 4  # of the side that may take seconds for each
# Each is a side of its own: its resident part is.
PLACEMENTS = {
    "auto": "accelerate, from_pretrained",
    "fitted": "accelerate, embedding on the disk",
    "copied": "accelerate, load_checkpoint_and_dispatch",
}


def contenders(shape: Mapping[str, Any], threads: int, directory: Path, cap_bytes: int) -> list[Contender]:
    """One for each placement, each with the tasks done in both ways; the best of them is accelerate's figure.

    cap_bytes: of the weights in memory. Each writes a checkpoint of its own below `directory`: pages that another
    process has mapped cannot be dropped.
    """
    common = {"shape": dict(shape), "threads": threads, "cap_bytes": cap_bytes}
    return [
        Contender(
            f"accelerate {placement}",
            title,
            [sys.executable, "-m", "benchmarks.offload_accelerate"],
            {**common, "directory": str(directory / f"accelerate-{placement}"), "placement": placement},
            needed_bytes=cap_bytes + 2 * GIB,
            gen_tokens=GEN_TOKENS,
            variants={CACHED: {"drops_cache": False}, DROPPED: {"drops_cache": True}},
        )
        for placement, title in PLACEMENTS.items()
    ]


class Accelerate:
    """One model, of which so much is resident as the cap allows."""

    def load(
        self, *, shape: dict[str, Any], threads: int, directory: str, cap_bytes: int, placement: str
    ) -> dict[str, Any]:
        """Write the random checkpoint if it is not there, load it. Raises UnavailableError without accelerate."""
        try:
            import accelerate
            import transformers
        except ImportError as error:
            raise UnavailableError(f"accelerate or transformers cannot be imported ({error})", INSTALL) from error
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        config = transformers.AutoConfig.for_model(**shape)
        with accelerate.init_empty_weights():
            empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.checkpoint = Path(directory)
        write_checkpoint(self.checkpoint, empty)
        started = time.perf_counter()
        self.model = dispatched(empty, self.checkpoint, placement, cap_bytes).eval()
        load_s = time.perf_counter() - started
        sizes = {name: parameter.nbytes for name, parameter in self.model.named_parameters()}
        offloaded = {name for name, parameter in self.model.named_parameters() if parameter.is_meta}
        read = sizes.keys() - {"model.embed_tokens.weight"}  # of that a token reads a row
        return {
            "version": f"accelerate {accelerate.__version__}, transformers {transformers.__version__}, "
            f"torch {torch.__version__}",
            "load_s": load_s,
            "resident_bytes": sum(sizes[name] for name in sizes.keys() - offloaded),
            "weight_bytes_per_token": sum(sizes[name] for name in read),
            "disk_bytes_per_token": sum(sizes[name] for name in read & offloaded),
            "read_ahead_bytes": read_ahead_bytes(self.checkpoint),
        }

    @torch.inference_mode()
    def prefill(self, *, tokens: int, drops_cache: bool) -> float:
        if not drops_cache:
            fill_cache(self._files())
        taken_s, _, _ = self._pass(self._prompt(tokens), None, drops_cache)
        return taken_s

    @torch.inference_mode()
    def decode(self, *, tokens: int, depth: int, drops_cache: bool) -> float:
        if not drops_cache:
            fill_cache(self._files())
        _, next_id, past = self._pass(self._prompt(depth), None, drops_cache=False)
        decode_s = 0.0
        for _ in range(tokens):
            taken_s, next_id, past = self._pass(next_id, past, drops_cache)
            decode_s += taken_s
        assert past.get_seq_length() == depth + tokens
        return decode_s

    def _pass(self, ids: torch.Tensor, past: Any, drops_cache: bool) -> tuple[float, torch.Tensor, Any]:
        """Seconds, the greedy next token, and the keys and values. What dropping takes is not in the time."""
        if drops_cache:
            drop_from_cache(self._files())
        started = time.perf_counter()
        output = self.model(ids, past_key_values=past, logits_to_keep=1, use_cache=True)
        next_id = output.logits[:, -1:].argmax(-1)
        return time.perf_counter() - started, next_id, output.past_key_values

    def _files(self) -> list[Path]:
        """The files that are read: accelerate's own where it wrote some, else the checkpoint's."""
        copies = list(offload_folder(self.checkpoint).glob("*.dat"))
        return copies or list(self.checkpoint.glob("*.safetensors"))

    def _prompt(self, tokens: int) -> torch.Tensor:
        return torch.randint(0, self.model.config.vocab_size, (1, tokens))


def dispatched(empty: Any, checkpoint: Path, placement: str, cap_bytes: int) -> Any:
    """auto: as transformers' documentation has it; what is offloaded is mapped from the checkpoint, never copied.

    fitted: the same, placed for this cap. copied: as accelerate's documentation has it, in files of its own, out of
    which it copies what it needs.
    """
    import accelerate
    import transformers

    within = {"device_map": "auto", "max_memory": {"cpu": cap_bytes}}
    common = {"offload_folder": str(offload_folder(checkpoint)), "dtype": torch.bfloat16}
    if placement == "copied":
        whole = empty._no_split_modules
        return accelerate.load_checkpoint_and_dispatch(
            empty, str(checkpoint), **within, **common, no_split_module_classes=whole, offload_state_dict=True
        )
    placed = within if placement == "auto" else {"device_map": fitted_map(empty, cap_bytes)}
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **placed, **common)


def offload_folder(checkpoint: Path) -> Path:
    return checkpoint / "offloaded"


def fitted_map(model: Any, cap_bytes: int) -> dict[str, str]:
    """Keep in memory what the cap allows beside the largest matrix of a layer, which is mapped while it computes.

    The embedding stays on the disk, as a token reads one row of it. `auto` begins with it, and leaves a layer's room.
    """
    devices = {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu"}
    left = cap_bytes - max(parameter.nbytes for parameter in model.model.layers.parameters())
    layers = {f"model.layers.{number}": layer for number, layer in enumerate(model.model.layers)}
    for name, module in {"lm_head": model.lm_head, **layers}.items():
        size = sum(parameter.nbytes for parameter in module.parameters())
        devices[name] = "cpu" if size <= left else "disk"
        left -= size if size <= left else 0
    return devices


def write_checkpoint(directory: Path, empty: Any) -> None:
    """A checkpoint of this model with random weights, in a file for each layer. One that is there whole is kept.

    accelerate opens a tensor's file anew each time that it needs it. With all tensors in one file it decodes at 0.87 of
    the speed, with each in a file of its own at 0.9.
    """
    from safetensors.torch import save_file

    config = directory / "config.json"  # written last
    if config.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in empty.state_dict().items():
        layer = re.match(r"model\.layers\.\d+", name)
        files.setdefault(f"{layer[0] if layer else name}.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        values = {name: torch.empty(t.shape, dtype=t.dtype).normal_(std=0.02) for name, t in tensors.items()}
        save_file(values, directory / file, metadata={"format": "pt"})
        with (directory / file).open("rb") as written:
            os.fsync(written.fileno())  # what is not on the disk yet cannot be dropped from the cache
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    empty.config.save_pretrained(directory)


def read_ahead_bytes(path: Path) -> int:
    """Bytes that the kernel reads ahead of a page fault, on which mapped weights depend; 128 KiB by default."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return 1024 * int(setting.read_text(encoding="utf-8")) if setting.exists() else 0


if __name__ == "__main__":
    serve(Accelerate())
