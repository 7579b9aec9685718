"""The peers of `python -m benchmarks.gpu`, each a process: `python -m benchmarks.gpu_peers SIDE`.

loop: a plain decoder in torch of the same shapes as ours, with random weights. It decodes with torch's INT4 operator
for every matrix, the head's too, keys and values in bf16 at fixed places, scaled dot product attention; captured in one
graph as it is, with each layer compiled, or all of it compiled with mode="reduce-overhead". The next token never leaves
the device. Prefill in bf16.
accelerate: `dispatch_model` under `max_memory`, as accelerate's documentation has it: modules that the card cannot hold
rest in the host's memory, and their weights are copied for as long as they compute. Where a CPU stands in for the card,
they rest on the disk.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.offload_accelerate import INSTALL
from benchmarks.peers_protocol import UnavailableError, serve
from localllm.engine.memory import choose_device
from localllm.models.architecture import ModelConfig
from localllm.models.families import parse_config
from localllm.offload.measurements.roofline import device_seconds, recorded

_GROUP, _INNER_TILES = 64, 8
_DENSE_LAYERS = 4  # of the prefill, used in turn: 1.7 GB of an 8B model, beyond every cache
_WARM = 3  # steps of a compiled model: the first compiles, the next ones record

Linear = Callable[[int, int, torch.device], nn.Module]


class Int4(nn.Module):
    """Random weights in torch's packed form. Raises where this torch has no such operator."""

    packed: Tensor
    scales: Tensor

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        super().__init__()
        ops, N, K = torch.ops.aten, out_features, in_features
        scales = torch.rand((K // _GROUP, N, 2), device=device) * K**-0.5 / 8
        scales[..., 1] = 0
        if device.type == "cpu":
            codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
            packed, self.product = ops._convert_weight_to_int4pack_for_cpu(codes, 2), ops._weight_int4pack_mm_for_cpu
        else:
            codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
            packed, self.product = ops._convert_weight_to_int4pack(codes, _INNER_TILES), ops._weight_int4pack_mm
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales.bfloat16())

    def copy(self) -> Int4:
        """The same weights in memory of their own."""
        other = copy.copy(self)
        other._buffers = {"packed": self.packed.clone(), "scales": self.scales.clone()}
        return other

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x, self.packed, _GROUP, self.scales)
        return y


class Dense(nn.Module):
    weight: Tensor

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        super().__init__()
        weight = torch.randn((out_features, in_features), dtype=torch.bfloat16, device=device) * in_features**-0.5
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: x [T, heads, D]; cos, sin [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(nn.Module):
    """x [T, hidden] -> [T, hidden]. length: of the cache; 0: a prompt's layer, which keeps nothing."""

    keys: Tensor
    values: Tensor
    norms: Tensor

    def __init__(self, config: ModelConfig, linear: Linear, device: torch.device, length: int) -> None:
        super().__init__()
        attention, hidden, wide = config.attentions[0], config.hidden_size, config.mlps[0].intermediate_size
        self.heads, self.kv_heads, self.head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.eps = config.norm_eps
        self.qkv = linear((self.heads + 2 * self.kv_heads) * self.head_dim, hidden, device)
        self.out = linear(hidden, self.heads * self.head_dim, device)
        self.gate_up, self.down = linear(2 * wide, hidden, device), linear(hidden, wide, device)
        self.register_buffer("norms", torch.ones((2, hidden), dtype=torch.bfloat16, device=device))
        for name in ("keys", "values"):
            cache = torch.randn((self.kv_heads, length, self.head_dim), dtype=torch.bfloat16, device=device)
            self.register_buffer(name, cache)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """position int64 [1]; seen bool [length]; both unused of a prompt."""
        H, KH, D, T = self.heads, self.kv_heads, self.head_dim, x.shape[0]
        qkv = self.qkv(F.rms_norm(x, (x.shape[1],), self.norms[0], self.eps)).view(T, H + 2 * KH, D)
        q, k, v = torch.split(qkv, [H, KH, KH], dim=1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.keys.shape[1]:
            self.keys.index_copy_(1, position, k.transpose(0, 1))
            self.values.index_copy_(1, position, v.transpose(0, 1))
            # A key head's query heads stand as its rows: nothing is repeated for them.
            mixed = F.scaled_dot_product_attention(
                q.view(1, KH, H // KH, D), self.keys[None], self.values[None], attn_mask=seen.view(1, 1, 1, -1)
            ).reshape(T, H * D)
        else:
            q, k, v = (some.transpose(0, 1)[None] for some in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = attended[0].transpose(0, 1).reshape(T, H * D)
        x = x + self.out(mixed)
        gate, up = self.gate_up(F.rms_norm(x, (x.shape[1],), self.norms[1], self.eps)).chunk(2, dim=-1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y


class Model(nn.Module):
    """layers: made, and used in turn. length: of the cache."""

    cos: Tensor
    sin: Tensor
    embedding: Tensor
    norm: Tensor

    def __init__(
        self, config: ModelConfig, linear: Linear, device: torch.device, *, layers: int, length: int, tokens: int
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, linear, device, length) for _ in range(layers))
        self.length = length
        self.turns, self.hidden, self.eps = config.num_layers, config.hidden_size, config.norm_eps
        self.head = linear(config.vocab_size, self.hidden, device)
        head_dim = config.attentions[0].head_dim
        half = torch.arange(0, head_dim, 2, device=device).float() / head_dim
        angles = torch.arange(tokens, device=device).float()[:, None] * (1e-6**half)[None]
        self.register_buffer("cos", angles.cos().bfloat16().unsqueeze(1))
        self.register_buffer("sin", angles.sin().bfloat16().unsqueeze(1))
        embedding = torch.randn((config.vocab_size, self.hidden), dtype=torch.bfloat16, device=device)
        self.register_buffer("embedding", embedding)
        self.register_buffer("norm", torch.ones(self.hidden, dtype=torch.bfloat16, device=device))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [T] each -> int64 [1]: the token behind the last one."""
        x, cos, sin = self.embedding[tokens], self.cos[positions], self.sin[positions]
        seen = torch.arange(self.length, device=x.device) <= positions[-1:]
        for turn in range(self.turns):
            x = self.layers[turn % len(self.layers)](x, cos, sin, positions, seen)
        x = F.rms_norm(x[-1:], (self.hidden,), self.norm, self.eps)
        next_token: Tensor = self.head(x).argmax(dim=-1)
        return next_token


class TorchLoop:
    @torch.no_grad()
    def load(
        self, *, device: str, raw_config: Mapping[str, Any], depth: int, tokens: int, prompt: int
    ) -> dict[str, Any]:
        """For so many tokens behind `depth` others, and for prompts of so many."""
        self.device, self.depth, self.tokens = choose_device(device), depth, tokens
        config = parse_config(dict(raw_config), "the benchmark's shape")
        length = -(-(depth + tokens + 1) // 64) * 64
        made = partial(Model, config, device=self.device, tokens=max(length, prompt))
        self.model = made(Int4, layers=config.num_layers, length=length)
        self.prefilling = made(Dense, layers=min(_DENSE_LAYERS, config.num_layers), length=0)
        self.prompt = torch.randint(0, config.vocab_size, (prompt,), device=self.device)
        self.token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.stretches: dict[str, Callable[[], None]] = {}
        return {"version": torch.__version__}

    @torch.no_grad()
    def prepare(self, *, variant: str) -> None:
        """graph, layers, or whole; see the module. Raises what torch does where it cannot."""
        if variant == "whole":
            self.stretches[variant] = partial(self._compiled, self._by_torch())
            return
        if variant == "layers":
            for layer in self.model.layers:
                layer.compile(fullgraph=True, dynamic=False, backend=self._backend)
        self.stretches[variant] = partial(self._replayed, self._captured())

    @torch.no_grad()
    def decode(self, *, variant: str) -> float:
        """Tokens a second."""
        return self.tokens / device_seconds(self.device, self.stretches[variant])

    @torch.no_grad()
    def prefill(self) -> float:
        """Tokens a second, in bf16."""
        positions = torch.arange(len(self.prompt), device=self.device)
        return len(self.prompt) / device_seconds(self.device, lambda: self.prefilling(self.prompt, positions))

    @property
    def _backend(self) -> str:
        return "inductor" if self.device.type == "cuda" else "eager"  # a stand-in need not have a compiler

    def _step(self) -> None:
        self.token.copy_(self.model(self.token, self.position))
        self.position.add_(1)

    def _captured(self) -> Callable[[], object]:
        self.position.fill_(self.depth)
        for _ in range(_WARM):
            self._step()
        run = recorded(self.device, self._step)
        if self.device.type == "cuda" and run == self._step:
            raise RuntimeError("it cannot be captured in a graph")
        return run

    def _replayed(self, run: Callable[[], object]) -> None:
        self.position.fill_(self.depth)
        for _ in range(self.tokens):
            run()

    def _by_torch(self) -> Callable[[Tensor, Tensor], Tensor]:
        torch._dynamo.reset()
        for layer in self.model.layers:
            layer._compiled_call_impl = None
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        step = torch.compile(self.model, mode=mode, fullgraph=True, dynamic=False, backend=self._backend)
        for _ in range(_WARM):
            step(self.token, torch.full_like(self.position, self.depth))
        return step

    def _compiled(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        token, position = self.token, torch.full_like(self.position, self.depth)
        for _ in range(self.tokens):
            token, position = step(token, position).clone(), position + 1  # the next step writes there


PROMPT = 8
_ROOM_BYTES = 1 << 42  # no limit


class CardAccelerate:
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
        """The peak of the card's memory, without what CUDA itself takes."""
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
    serve({"loop": TorchLoop, "accelerate": CardAccelerate}[sys.argv[1]]())
