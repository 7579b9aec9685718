"""The bodies of RWKV-7: the time mix, whose heads keep states, and the channel mix, a feed-forward of two tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localllm.kernels.cpu_jit import best_isa
from localllm.kernels.cpu_rwkv import TimeMixPlaces, time_mix_step
from localllm.kernels.cpu_tape import Tape
from localllm.kernels.layer_state import LayerState
from localllm.kernels.reference import ACTIVATIONS
from localllm.kernels.rwkv7 import (
    TimeMixWeights,
    before,
    gated_values,
    mix_time,
    shifted,
)
from localllm.kernels.state_shapes import RWKV7_MIXED, StateShape
from localllm.layers.adapted import adapted
from localllm.layers.batch import Batch, moved
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import Rwkv7ChannelMixConfig, Rwkv7TimeMixConfig
from localllm.layers.linear import Linear
from localllm.layers.native_states import is_native, place_of, tables_of
from localllm.layers.segment import by_sequence
from localllm.layers.state_rows import state_rows

FIRST_VALUES = "first values"  # that a batch carries from the first time mix to the others


@dataclass(eq=False)
class LowRankPair:
    """up(activation(down(x))), both matrices small."""

    down: Linear
    up: Linear
    activation: str | None = None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, K] -> fp32 [T, N]."""
        inner = adapted(self.down, x, batch)
        if self.activation is not None:
            inner = ACTIVATIONS[self.activation](inner.double()).to(x.dtype)
        return adapted(self.up, inner, batch).float()


@dataclass(eq=False)
class Rwkv7TimeMix:
    """layer: its number among those with states. value_gate: None in the first layer, whose values are the others'."""

    config: Rwkv7TimeMixConfig
    layer: int
    r_proj: Linear
    k_proj: Linear
    v_proj: Linear
    decay: LowRankPair
    rate: LowRankPair
    gate: LowRankPair
    value_gate: LowRankPair | None
    o_proj: Linear
    weights: TimeMixWeights

    @classmethod
    def loaded(cls, parts: BodyParts, config: Rwkv7TimeMixConfig, number: int) -> Rwkv7TimeMix:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        tensors, shape = parts.tensors, config.shape
        names = ("removal_key", "rate_key", "bonus", "norm", "norm_bias")
        eps = shape.head_dim * parts.norm_eps
        own = {name: tensors[name] for name in names}
        weights = TimeMixWeights(tensors["mixes"].view(-1, shape.features), **own, eps=eps)

        def pair(name: str, activation: str | None = None) -> LowRankPair:
            return LowRankPair(parts.linear(f"{name}_down"), parts.linear(f"{name}_up"), activation)

        return cls(
            config,
            number,
            r_proj=parts.linear("r_proj"),
            k_proj=parts.linear("k_proj"),
            v_proj=parts.linear("v_proj"),
            decay=pair("w", "tanh"),
            rate=pair("a"),
            gate=pair("g", "sigmoid"),
            value_gate=None if config.is_first else pair("v"),
            o_proj=parts.linear("o_proj"),
            weights=weights,
        )

    @property
    def pairs(self) -> tuple[LowRankPair, ...]:
        pairs = (self.decay, self.rate, self.gate)
        return pairs if self.value_gate is None else (*pairs, self.value_gate)

    @property
    def linears(self) -> tuple[Linear, ...]:
        small = (linear for pair in self.pairs for linear in (pair.down, pair.up))
        return self.r_proj, self.k_proj, self.v_proj, *small, self.o_proj

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return self.r_proj.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        wide = x.float()
        mixed = shifted(wide, _before(self.config.shape, self.layer, wide, batch), self.weights.mixes).to(x.dtype)
        inputs = dict(zip(RWKV7_MIXED, mixed, strict=True))
        r, k, v = (
            adapted(linear, inputs[name], batch).float()
            for name, linear in (("r", self.r_proj), ("k", self.k_proj), ("v", self.v_proj))
        )
        w, a, g = self.decay(inputs["w"], batch), self.rate(inputs["a"], batch), self.gate(inputs["g"], batch)
        v = self._values(v, inputs["v"], batch)
        mix = self._native if is_native(self.config.shape, x) else self._mixed
        return adapted(self.o_proj, mix(torch.cat((wide, k, v, w, a, r, g), dim=1), batch).to(x.dtype), batch)

    def _values(self, v: Tensor, mixed: Tensor, batch: Batch) -> Tensor:
        """Return values as they are computed with, fp32: those of the first time mix are what the others look at, also
        where a draft leaves that one out."""
        if self.value_gate is None or FIRST_VALUES not in batch.carried:
            batch.carried[FIRST_VALUES] = v
            return v
        return gated_values(v, self.value_gate(mixed, batch), moved(batch.carried[FIRST_VALUES], v.device))

    def _native(self, wide: Tensor, batch: Batch) -> Tensor:
        """wide fp32 [T, 7 * features], RWKV7_PROJECTED but the last -> fp32 [T, features], by the CPU kernel."""
        shape, tables = self.config.shape, tables_of(batch.segments)  # at which the step points
        place, mixed = place_of(batch.segments, self.layer), torch.empty(len(wide), shape.features)
        places = TimeMixPlaces(wide, wide.shape[1], torch.empty_like(mixed), mixed)
        step = time_mix_step(best_isa(), shape, self.weights, tables, place, places, is_first=True)
        Tape([step]).run()
        return mixed

    def _mixed(self, wide: Tensor, batch: Batch) -> Tensor:
        """What `_native` does, by torch's operators."""
        shape, mixed = self.config.shape, torch.empty_like(wide[:, : self.config.shape.features])
        raw, r, g = torch.split(wide, [shape.row_floats, shape.features, shape.features], dim=1)
        for segment in by_sequence(batch.segments):
            own = slice(segment.begin, segment.end)
            mixed[own] = mix_time(state_rows(segment, shape, self.layer, raw[own]), r[own], g[own], self.weights)
        return mixed


@dataclass(eq=False)
class Rwkv7ChannelMix:
    """layer: its number among those with states. mix: fp32 [features]."""

    config: Rwkv7ChannelMixConfig
    layer: int
    key: Linear
    value: Linear
    mix: Tensor

    @classmethod
    def loaded(cls, parts: BodyParts, config: Rwkv7ChannelMixConfig, number: int) -> Rwkv7ChannelMix:
        """Return the body that a block's parts make. number: of the layer, among those of its kind."""
        return cls(config, number, parts.linear("key"), parts.linear("value"), parts.tensors["mix"])

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.key, self.value

    @property
    def exact_linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def device(self) -> torch.device:
        return self.key.device

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shape, wide = self.config.shape, x.float()
        (mixed,) = shifted(wide, _before(shape, self.layer, wide, batch), self.mix[None])
        for segment in by_sequence(batch.segments):
            state_rows(segment, shape, self.layer, wide[segment.begin : segment.end]).keep()
        inner = functional.relu(adapted(self.key, mixed.to(x.dtype), batch)).square()
        return adapted(self.value, inner, batch)


def _before(shape: StateShape, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """Return what stands before each row of x, fp32 [T, features]."""
    parts = []
    for segment in by_sequence(batch.segments):
        store = segment.kv.state
        assert store is not None, "its layer keeps a state"
        state = LayerState(shape, store.states.layer(layer))
        parts.append(before(state, x[segment.begin : segment.end], segment.past))
    return torch.cat(parts)
