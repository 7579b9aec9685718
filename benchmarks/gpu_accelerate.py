"""accelerate's offload to the host's memory as one side, a process of its own: `python -m benchmarks.gpu_accelerate`.

`dispatch_model` under `max_memory`, as accelerate's documentation has it: modules that the card has no room for rest in
the host's memory, and their weights are copied there for as long as they compute. Where a CPU stands in for the card,
they rest on the disk.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

from benchmarks.offload_accelerate import INSTALL
from benchmarks.peers_protocol import UnavailableError, serve

PROMPT = 8
_ROOM_BYTES = 1 << 42  # no limit


class Accelerate:
    def load(self, *, raw_config: dict[str, Any], cap_bytes: int, context_bytes: int, device: str) -> dict[str, Any]:
        """cap_bytes: of the card, of which CUDA has context_bytes. Raises UnavailableError without accelerate."""
        try:
            import accelerate
            import transformers
        except ImportError as error:
            raise UnavailableError(f"accelerate or transformers cannot be imported ({error})", INSTALL) from error
        started = time.perf_counter()
        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(**raw_config)
        with accelerate.init_empty_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        _fill(model)
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        fast: int | str = 0 if device == "cuda" else "cpu"
        room = {fast: cap_bytes - context_bytes} | ({"cpu": _ROOM_BYTES} if device == "cuda" else {})
        whole = list(model._no_split_modules)
        placed = accelerate.infer_auto_device_map(model, room, whole, dtype=torch.bfloat16)
        self.folder = tempfile.TemporaryDirectory()
        self.model = accelerate.dispatch_model(model, device_map=placed, offload_dir=self.folder.name).eval()
        return {
            "version": f"accelerate {accelerate.__version__}, transformers {transformers.__version__}",
            "load_s": time.perf_counter() - started,
            "modules": {str(home): list(placed.values()).count(home) for home in dict.fromkeys(placed.values())},
        }

    @torch.inference_mode()
    def decode(self, *, tokens: int) -> dict[str, float]:
        """Tokens a second behind a short prompt; each is known before the next is begun."""
        ids = torch.randint(0, self.model.config.vocab_size, (1, PROMPT), device=self.device)
        output = self.model(ids, logits_to_keep=1, use_cache=True)
        next_id = output.logits[:, -1:].argmax(-1)
        next_id.item()
        started = time.perf_counter()
        for _ in range(tokens):
            output = self.model(next_id, past_key_values=output.past_key_values, logits_to_keep=1, use_cache=True)
            next_id = output.logits[:, -1:].argmax(-1)
            next_id.item()
        return {"tok_s": tokens / (time.perf_counter() - started)}

    def peak_bytes(self) -> int | None:
        """Of the card, without what CUDA itself takes."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None


def _fill(model: Any) -> None:
    """Random weights in the host's memory: a million of them again and again, as to draw all takes minutes."""
    from accelerate.utils import set_module_tensor_to_device

    noise = torch.randn(1 << 20, dtype=torch.bfloat16)
    for name, parameter in list(model.named_parameters()):
        num_weights = parameter.numel()
        drawn = noise * parameter.shape[-1] ** -0.5
        weight = drawn.repeat(-(-num_weights // len(drawn)))[:num_weights].view(parameter.shape)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


if __name__ == "__main__":
    serve(Accelerate())
