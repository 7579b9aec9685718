"""RWKV-7 written down naively from its paper (arXiv:2503.14456), as a model that our decoder must agree with.

It computes whole sequences, one token after the other, and keeps nothing: what it calls a cache are the tokens
themselves. It has the names of flash-linear-attention's checkpoints.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm
from transformers.modeling_outputs import CausalLMOutputWithPast

DEFAULTS: dict[str, Any] = {
    "head_dim": 16, "decay_low_rank_dim": 16, "gate_low_rank_dim": 80, "a_low_rank_dim": 64, "v_low_rank_dim": 32,
    "norm_eps": 1e-5, "norm_first": True, "norm_bias": True, "hidden_act": "sqrelu", "tie_word_embeddings": False,
    "attn": None,
}  # fmt: skip


@dataclass
class Rwkv7Peer:
    """A random model in fp64, so that what differs is ours."""

    sizes: dict[str, Any]

    def __post_init__(self) -> None:
        self.sizes = DEFAULTS | self.sizes
        self.weights = dict(self._random())

    def _random(self) -> Any:
        sizes, hidden = self.sizes, self.sizes["hidden_size"]
        yield "model.embeddings.weight", torch.randn(sizes["vocab_size"], hidden)
        if not sizes["tie_word_embeddings"]:
            yield "lm_head.weight", torch.randn(sizes["vocab_size"], hidden) * 0.15
        yield from self._norm("model.norm")
        if sizes["norm_first"]:
            yield from self._norm("model.layers.0.pre_norm")
        for layer in range(sizes["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            yield from self._norm(f"{prefix}.attn_norm")
            yield from self._norm(f"{prefix}.ffn_norm")
            yield from self._time_mix(f"{prefix}.attn", has_value_gate=layer > 0)
            yield f"{prefix}.ffn.x_k", torch.rand(hidden)
            yield f"{prefix}.ffn.key.weight", torch.randn(sizes["intermediate_size"], hidden) / math.sqrt(hidden)
            yield f"{prefix}.ffn.value.weight", torch.randn(hidden, sizes["intermediate_size"]) * 0.1

    def _norm(self, name: str) -> Any:
        yield f"{name}.weight", 1 + 0.3 * torch.randn(self.sizes["hidden_size"])
        if self.sizes["norm_bias"] or name.endswith("g_norm"):
            yield f"{name}.bias", 0.3 * torch.randn(self.sizes["hidden_size"])

    def _time_mix(self, attn: str, *, has_value_gate: bool) -> Any:
        sizes, hidden = self.sizes, self.sizes["hidden_size"]
        for name in "rwkvag":
            yield f"{attn}.x_{name}", torch.rand(1, 1, hidden)
        yield f"{attn}.k_k", 0.7 + 0.3 * torch.randn(hidden)
        yield f"{attn}.k_a", 1 + 0.3 * torch.randn(hidden)
        yield f"{attn}.r_k", 0.3 * torch.randn(hidden // sizes["head_dim"], sizes["head_dim"])
        yield from self._norm(f"{attn}.g_norm")
        for name in "rkvo":
            yield f"{attn}.{name}_proj.weight", torch.randn(hidden, hidden) / math.sqrt(hidden)
        ranks = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "g": "gate_low_rank_dim", "v": "v_low_rank_dim"}
        for name, key in ranks.items():
            if name == "v" and not has_value_gate:
                continue
            yield f"{attn}.{name}_lora.lora.0.weight", torch.randn(sizes[key], hidden) / math.sqrt(hidden)
            yield f"{attn}.{name}_lora.lora.2.weight", torch.randn(hidden, sizes[key]) / math.sqrt(sizes[key])
            if name != "g":
                yield f"{attn}.{name}_lora.lora.2.bias", torch.randn(hidden)

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, directory / "model.safetensors")
        config = {"model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "torch_dtype": "float32", **self.sizes}
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def __call__(
        self,
        token_ids: Tensor,
        past_key_values: list[int] | None = None,
        cache: list[int] | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """token_ids [1, T]. Returns logits [1, T, vocab], fp32, and all tokens as the cache."""
        ids = past_key_values or cache or []
        begin = len(ids)
        ids += token_ids[0].tolist()
        logits: Any = self.logits(ids)[None, begin:]
        kept: Any = ids if use_cache else None
        return CausalLMOutputWithPast(logits=logits, past_key_values=kept)

    def generate(self, token_ids: Tensor, *, max_new_tokens: int, **_: Any) -> Tensor:
        ids = token_ids[0].tolist()
        for _ in range(max_new_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return torch.tensor([ids])

    def logits(self, ids: list[int]) -> Tensor:
        W = {name: tensor.double() for name, tensor in self.weights.items()}
        x = W["model.embeddings.weight"][ids]
        if self.sizes["norm_first"]:
            x = self._normed(W, "model.layers.0.pre_norm", x)
        v_first = None
        for layer in range(self.sizes["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            added, v_first = self._mixed_times(W, f"{prefix}.attn", self._normed(W, f"{prefix}.attn_norm", x), v_first)
            x = x + added
            normed = self._normed(W, f"{prefix}.ffn_norm", x)
            key = (normed + W[f"{prefix}.ffn.x_k"] * (_shift(normed) - normed)) @ W[f"{prefix}.ffn.key.weight"].T
            x = x + key.clamp(min=0).square() @ W[f"{prefix}.ffn.value.weight"].T
        head = "model.embeddings.weight" if self.sizes["tie_word_embeddings"] else "lm_head.weight"
        return (self._normed(W, "model.norm", x) @ W[head].T).float()

    def _normed(self, W: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], W[f"{name}.weight"], W.get(f"{name}.bias"), self.sizes["norm_eps"])

    def _mixed_times(self, W: dict[str, Tensor], attn: str, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        T, D, hidden = len(x), self.sizes["head_dim"], self.sizes["hidden_size"]
        H = hidden // D
        xr, xw, xk, xv, xa, xg = (x + (_shift(x) - x) * W[f"{attn}.x_{name}"].view(-1) for name in "rwkvag")

        def pair(name: str, x: Tensor, inner: Any = lambda x: x) -> Tensor:
            lora = f"{attn}.{name}_lora.lora"
            return inner(x @ W[f"{lora}.0.weight"].T) @ W[f"{lora}.2.weight"].T + W.get(f"{lora}.2.bias", 0.0)

        r, k, v = (x @ W[f"{attn}.{name}_proj.weight"].T for name, x in (("r", xr), ("k", xk), ("v", xv)))
        w = torch.exp(-math.exp(-0.5) * torch.sigmoid(pair("w", xw, torch.tanh)))
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(pair("v", xv))
        a, g = torch.sigmoid(pair("a", xa)), pair("g", xg, torch.sigmoid)
        kk = (k * W[f"{attn}.k_k"]).view(T, H, D)
        kk = kk / kk.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        k = k + k * (a - 1) * W[f"{attn}.k_a"]
        r, w, k, v, a = (each.view(T, H, D) for each in (r, w, k, v, a))
        S = torch.zeros(H, D, D, dtype=x.dtype)  # [values, keys], as the paper has it
        out = torch.zeros(T, H, D, dtype=x.dtype)
        for t in range(T):
            removed = (S @ kk[t, :, :, None]) @ (kk[t] * a[t])[:, None]
            S = S * w[t, :, None] - removed + v[t, :, :, None] @ k[t, :, None]
            out[t] = (S @ r[t, :, :, None])[..., 0]
        centred = out - out.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + D * self.sizes["norm_eps"]).sqrt()
        out = out.flatten(1) * W[f"{attn}.g_norm.weight"] + W[f"{attn}.g_norm.bias"]
        out = out + ((r * k * W[f"{attn}.r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        return (out * g) @ W[f"{attn}.o_proj.weight"].T, v_first


def _shift(x: Tensor) -> Tensor:
    """The row before each, zeros before the first."""
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))
