"""Tokens of KV pages moved to other slots of other pages, their keys turned on the way; by torch's operators.

Codes and scales belong to one token each, so that values are moved as bytes, and keys too where they do not turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.kv_page import PAGE_TOKENS, LatentLayout, PageLayout, dequantize, quantize


def moved_tokens(layout: PageLayout, pages: Tensor, offset: int, count: int, turns: Tensor | None) -> Tensor:
    """pages uint8 [S, L, layer_bytes], of L layers, that follow each other -> uint8 [count, L, layer_bytes]: their
    tokens from `offset` on.

    turns: fp32 [D, D], or [L, D, D] where layers differ, what each key is multiplied by, as it is stored: of the
    features that rotate alone where they are latents. None: keys stay as they are.
    """
    out = torch.empty((count, *pages.shape[1:]), dtype=torch.uint8, device=pages.device)
    keys, key_scales, values, value_scales = layout.parts(pages)
    into_keys, into_scales, into_values, into_value_scales = layout.parts(out)
    by_rows = -3 if isinstance(layout, LatentLayout) and not layout.is_dense else -2
    at_keys = by_rows if isinstance(layout, LatentLayout) else -1
    _put(into_keys, _taken(keys, at_keys, offset, count), at_keys)
    if not layout.is_dense:
        _put(into_scales, _taken(key_scales, -1, offset, count), -1)
    if not isinstance(layout, LatentLayout):
        _put(into_values, _taken(values, -2, offset, count), -2)
        if not layout.is_dense:
            _put(into_value_scales, _taken(value_scales, -1, offset, count), -1)
    if turns is not None:
        # Layer by layer: what is fp32 on the way stays in a core's cache, 3 times as fast for 22 layers.
        for layer in range(pages.shape[1]):
            turn = turns if turns.dim() == 2 else turns[layer]
            _turn(layout, into_keys[:, layer], into_scales[:, layer], turn)
    return out


def _taken(x: Tensor, dim: int, offset: int, count: int) -> Tensor:
    """[S, ..., 64, ...] -> [..., tokens, ...]. dim: of the 64, from the end."""
    return x.movedim(0, dim - 1).flatten(dim - 1, dim).narrow(dim, offset, PAGE_TOKENS * count)


def _put(into: Tensor, x: Tensor, dim: int) -> None:
    """The inverse of `_taken` from token 0 on."""
    before, behind = x.shape[:dim], x.shape[dim:][1:]
    into.copy_(x.reshape(*before, -1, PAGE_TOKENS, *behind).movedim(dim - 1, 0))


def _turn(layout: PageLayout, keys: Tensor, scales: Tensor, turns: Tensor) -> None:
    """Turn the keys of a layer's pages in place: `keys` and `scales` as `PageLayout.parts` has them."""
    if isinstance(layout, LatentLayout):
        _turn_shared(layout, keys, scales, turns)
        return
    tokens = keys.movedim(-1, -2)  # [P, KH, 64, D]
    if layout.is_dense:
        tokens.copy_(tokens.float() @ turns)
        return
    of_tokens = scales.movedim(-1, -2)
    codes, fresh = quantize(dequantize(tokens, of_tokens, layout.keys) @ turns, layout.keys)
    tokens.copy_(codes)
    of_tokens.copy_(fresh)


def _turn_shared(layout: LatentLayout, keys: Tensor, scales: Tensor, turns: Tensor) -> None:
    latent, shared = layout.runs
    if layout.is_dense:
        tokens = keys[..., latent:]  # [P, 1, 64, shared]
        tokens.copy_(tokens.float() @ turns)
        return
    codes = keys.flatten(-2)  # [P, 1, 64, bytes], a copy
    own = codes[..., codes.shape[-1] * latent // layout.head_dim :]
    of_tokens = scales.movedim(-1, -2)[..., 1:]
    turned, fresh = quantize(dequantize(own, of_tokens, layout.keys, (shared,)) @ turns, layout.keys, (shared,))
    own.copy_(turned)
    keys.copy_(codes.view(keys.shape))
    of_tokens.copy_(fresh)
