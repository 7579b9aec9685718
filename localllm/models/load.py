"""A decoder from the tensors of its blocks, wherever those come from and rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from localllm.layers.altup import AltUpEnd, AltUpStart, StateMixer
from localllm.layers.attention import Attention
from localllm.layers.beside import Beside, SingleMixer
from localllm.layers.body_parts import BodyParts
from localllm.layers.config import (
    AttentionConfig,
    BesideConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MambaConfig,
    Mixer,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
    RopeConfig,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
    ShortConvConfig,
)
from localllm.layers.config import SingleMixer as SingleMixerConfig
from localllm.layers.delta_net import DeltaNet
from localllm.layers.draft_inputs import DraftInputs
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.linear import Embedding, Linear, RowLookup
from localllm.layers.mamba import Mamba
from localllm.layers.mamba2 import Mamba2
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.moe import ExpertBank, MoE, MoENorms
from localllm.layers.norm import LayerNorm, Norm, RMSNorm
from localllm.layers.per_layer import PerLayerGate, PerLayerInputs
from localllm.layers.rotary import Rotary
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.layers.short_conv import ShortConv
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.block_source import BlockSource
from localllm.models.decoder import ALL_RESIDENT, Block, BlockStream, Decoder
from localllm.models.expert_records import ExpertRecords, PooledExperts, RecordForm, SlottedExperts, new_linear
from localllm.models.layout import COEFFICIENTS, EXPERTS, BlockLayout
from localllm.offload.streaming.card_slots import CardSlots
from localllm.offload.streaming.expert_pool import ExpertPool
from localllm.quant.recipe import Recipe

_LOADERS: Mapping[type, Callable[[BodyParts, Any, int], SingleMixer]] = MappingProxyType(
    {
        LatentAttentionConfig: LatentAttention.loaded,
        DeltaNetConfig: DeltaNet.loaded,
        MambaConfig: Mamba.loaded,
        Mamba2Config: Mamba2.loaded,
        ShortConvConfig: ShortConv.loaded,
        Rwkv7TimeMixConfig: Rwkv7TimeMix.loaded,
        Rwkv7ChannelMixConfig: Rwkv7ChannelMix.loaded,
    }
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of one block, by the names of `layout.specs(recipe)`, all on one device but for experts with slots.

    beside: of an MLP block whose intermediate features are split, those that another device computes.
    pool: of a mixture, where its experts are brought, if they are not among the tensors.
    slots: of a mixture whose experts are in the host's memory, those of the device.
    """

    layout: BlockLayout
    tensors: Mapping[str, Tensor]
    beside: BlockTensors | None = None
    pool: ExpertPool | None = None
    slots: CardSlots | None = None


def load_decoder(
    source: BlockSource,
    config: ModelConfig,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_host: Collection[str] = (),
    progress: Progress = lambda _done, _total: None,
) -> Decoder:
    """Read every block once, in the order in which a forward needs them. dtype: of activations and KV cache.

    on_host: names of blocks that are computed there, whatever the device is.
    Raises what the source raises: CheckpointError naming a tensor that is missing, misshapen or not of this family.
    """
    total, done = model_bytes(config, recipe), 0
    loaded: list[BlockTensors] = []
    for layout in block_layouts(config):
        home = torch.device("cpu") if layout.name in on_host else device
        tensors = {name: tensor.to(home) for name, tensor in source.tensors(layout).items()}
        loaded.append(BlockTensors(layout, tensors))
        done += layout.nbytes(recipe)
        progress(done, total)
    source.finish()
    return DecoderParts(config, recipe, dtype, device).assembled(loaded, ALL_RESIDENT)


@dataclass(frozen=True)
class DecoderParts:
    """The parts that are alike in all decoders of a model. device: where batches are made."""

    config: ModelConfig
    recipe: Recipe
    dtype: torch.dtype
    device: torch.device

    def assembled(
        self,
        blocks: list[BlockTensors],
        stream: BlockStream,
        stored: RowLookup | None = None,
        in_head: RowLookup | None = None,
    ) -> Decoder:
        """Return the decoder of these blocks.

        blocks: the embedding, each attention and MLP block, the head, as `block_layouts` has them.
        stored: the first block's matrix, where that is not among them and no head needs it.
        in_head: the token embedding, where that is the head's matrix and the first block has another, if `blocks` has
            the head where it passes.
        """
        config = self.config
        embed, *middle, head = [_Loaded(block, self) for block in blocks]
        rows, per_layer = None, config.per_layer
        if per_layer is not None:
            table = stored or embed.linear("embed_tokens_per_layer")
            rows = Embedding(table, self.dtype, per_layer.features**0.5)
            embedding = in_head or head.linear("lm_head")
        else:
            embedding = embed.linear("embed_tokens") if stored is None or config.is_tied else stored
        norm_eps = config.norm_eps if config.normalizes_embeddings else None
        return Decoder(
            config=config,
            weights=self.recipe.name,
            embed=Embedding(embedding, self.dtype, config.embedding_scale, norm_eps),
            per_layer_rows=rows,
            blocks=tuple(_block(block, index) for index, block in enumerate(middle)),
            final_norm=head.norm("final_norm"),
            head=self._head(embed, head),
            rotaries=tuple(Rotary(rope, dim, self.device) for rope, dim in config.rotations),
            dtype=self.dtype,
            device=self.device,
            stream=stream,
        )

    def draft_head(self, blocks: list[BlockTensors], model: Decoder) -> Decoder:
        """Return a head that drafts for a model as one of its own. blocks: as `block_layouts` has them."""
        inputs, *middle, last = [_Loaded(block, self) for block in blocks]
        embed = DraftInputs(
            model.embed.matrix,
            model.embed.dtype,
            model.embed.scale,
            norm_embedding=inputs.norm("norm_embedding"),
            norm_hidden=inputs.norm("norm_hidden"),
            joined_proj=inputs.linear("joined_proj"),
        )
        return replace(
            model,
            config=self.config,
            embed=embed,
            blocks=tuple(_block(block, index) for index, block in enumerate(middle)),
            final_norm=last.norm("final_norm"),
            rotaries=tuple(Rotary(rope, dim, self.device) for rope, dim in self.config.rotations),
            stream=ALL_RESIDENT,
        )

    def _head(self, embed: _Loaded, head: _Loaded) -> Linear:
        linear = embed.linear("embed_tokens") if self.config.is_tied else head.linear("lm_head")
        bias = head.block.tensors.get("head_bias")
        return linear if bias is None else replace(linear, bias=bias.to(self.dtype))


@dataclass(frozen=True)
class _Loaded:
    """One block, and the layers that its tensors make."""

    block: BlockTensors
    parts: DecoderParts

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.block.tensors

    @property
    def norm_eps(self) -> float:
        return self.parts.config.norm_eps

    def rotation(self, rope: RopeConfig, rotary_dim: int) -> int:
        return self.parts.config.rotations.index((rope, rotary_dim))

    def linear(self, name: str) -> Linear:
        matrix = next(matrix for matrix in self.block.layout.matrices if matrix.name == name)
        return new_linear(matrix, self.block.tensors, self.parts.recipe, self.parts.dtype, self.block.layout.name)

    def norm(self, name: str) -> Norm:
        tensors, config = self.block.tensors, self.parts.config
        eps = config.norm_eps if name != "norm_out" or config.norm_out_eps is None else config.norm_out_eps
        if config.norm_kind == "rms":
            return RMSNorm(tensors[name], eps)
        return LayerNorm(tensors[name], tensors.get(f"{name}_bias"), eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name in self.block.tensors else None

    def head_norm(self, name: str, config: AttentionConfig) -> Norm | None:
        """Return a norm of queries or keys, where there is one."""
        if config.qk_norm is None or (name == "k_norm" and not config.key_heads):
            return None
        eps, weight = self.parts.config.norm_eps, self.block.tensors.get(name)
        if weight is None:  # it has none
            device = next(iter(self.block.tensors.values())).device
            weight = torch.ones(config.head_dim, device=device)
        if config.qk_norm == "own":
            return LayerNorm(weight.view(-1, config.head_dim), None, eps)
        return RMSNorm(weight, eps)

    def per_layer_inputs(self) -> PerLayerInputs:
        norm = RMSNorm(self.block.tensors["norm_per_layer_inputs"], self.parts.config.norm_eps)
        return PerLayerInputs(self.linear("per_layer_inputs"), norm)

    def per_layer_gate(self, config: PerLayerConfig, layer: int) -> PerLayerGate:
        linears = self.linear("per_layer_gate"), self.linear("per_layer_proj")
        return PerLayerGate(layer, config.activation, *linears, self.norm("norm_per_layer"))

    def altup(self, layer: int, *, begins: bool) -> AltUpStart | AltUpEnd | None:
        """Return what begins or ends a layer of several hidden states."""
        model = self.parts.config
        if model.altup is None or model.per_layer is None:
            return None
        mixer = StateMixer(self.linear("altup_router"), self.norm("norm_altup"), self.linear("altup_coefficients"))
        names = [matrix.name for matrix in self.block.layout.matrices if "projections." in matrix.name]
        projections = [self.linear(name) for name in names]
        if begins:
            laurel = self.linear("laurel_left"), self.linear("laurel_right"), self.norm("norm_laurel")
            return AltUpStart(mixer, laurel, projections)
        gate, scale = self.per_layer_gate(model.per_layer, layer), self.block.tensors.get("altup_scale")
        return AltUpEnd(mixer, gate, scale, projections)

    def moe(self, config: MoEConfig) -> MoE:
        layout, tensors = self.block.layout, self.block.tensors
        assert layout.experts is not None
        shared = None
        if config.shared is not None:
            linears = self.linear("shared.gate_up_proj"), self.linear("shared.down_proj")
            shared = MLP(*linears, config.shared)
        return MoE(
            config=config,
            router=self.linear("router"),
            experts=self._experts(RecordForm.of(layout, self.parts.recipe, self.parts.dtype)),
            correction=tensors.get("correction"),
            shared=shared,
            shared_gate=self.linear("shared_gate") if config.gates_shared else None,
            expert_scales=tensors.get("expert_scales"),
            norms=self._moe_norms() if config.has_own_norms else None,
        )

    def _moe_norms(self) -> MoENorms:
        tensors, eps = self.block.tensors, self.parts.config.norm_eps
        names = ("experts_in", "experts_out", "shared_in", "shared_out")
        router = RMSNorm(tensors["norm_router"] * self.parts.config.hidden_size**-0.5, eps)
        return MoENorms(router, *(RMSNorm(tensors[f"norm_{name}"], eps) for name in names))

    def _experts(self, form: RecordForm) -> ExpertBank:
        name, pool, slots = self.block.layout.name, self.block.pool, self.block.slots
        if pool is not None:
            return PooledExperts(pool, name, form)
        records = ExpertRecords(self.block.tensors[EXPERTS], form)
        return records if slots is None else SlottedExperts(records, slots, name)

    def mlp(self, config: MLPConfig) -> MLP | SplitMLP:
        coefficients = self.block.tensors.get(COEFFICIENTS)
        whole = MLP(self.linear("gate_up_proj"), self.linear("down_proj"), config, coefficients)
        if self.block.beside is None:
            return whole
        there = replace(self, block=self.block.beside).mlp(config)
        assert isinstance(there, MLP)
        return SplitMLP(whole, there)


def _block(loaded: _Loaded, index: int) -> Block:
    config = loaded.parts.config
    (layer, what), per_layer = config.blocks[index], config.per_layer
    is_mixer = not isinstance(what, MLPConfig | MoEConfig)
    body = _feed_forward(loaded, what) if isinstance(what, MLPConfig | MoEConfig) else _mixer(loaded, layer, what)
    return Block(
        name=loaded.block.layout.name,
        body=body,
        is_parallel=config.layers[layer].norm_placement == "parallel",
        norm_embedding=loaded.optional_norm("norm_embedding"),
        per_layer_inputs=loaded.per_layer_inputs() if per_layer is not None and index == 0 else None,
        per_layer_gate=loaded.per_layer_gate(per_layer, layer) if per_layer is not None and not is_mixer else None,
        scalar=loaded.block.tensors.get("scalar"),
        altup=loaded.altup(layer, begins=is_mixer),
        norm_in=loaded.optional_norm("norm_in"),
        norm_out=loaded.optional_norm("norm_out"),
        device=body.device,
    )


def _feed_forward(loaded: _Loaded, config: MLPConfig | MoEConfig) -> MLP | SplitMLP | MoE:
    return loaded.mlp(config) if isinstance(config, MLPConfig) else loaded.moe(config)


def _mixer(loaded: _Loaded, layer: int, config: Mixer) -> SingleMixer | Beside:
    if isinstance(config, BesideConfig):
        return Beside(tuple(_single_mixer(loaded, layer, each) for each in config.mixers))
    return _single_mixer(loaded, layer, config)


def _single_mixer(loaded: _Loaded, layer: int, config: SingleMixerConfig) -> SingleMixer:
    number = loaded.parts.config.kept_number(layer, config)
    if isinstance(config, AttentionConfig):
        return _attention(loaded, config, number)
    return _LOADERS[type(config)](loaded, config, number)


def _attention(loaded: _Loaded, config: AttentionConfig, number: int) -> Attention:
    model = loaded.parts.config
    return Attention(
        config=config,
        layer=number,
        rotation=loaded.rotation(config.rope, config.rotary_dim),
        qkv_proj=loaded.linear("qkv_proj"),
        o_proj=loaded.linear("o_proj"),
        q_norm=loaded.head_norm("q_norm", config),
        k_norm=loaded.head_norm("k_norm", config),
        sinks=loaded.block.tensors.get("sinks"),
        norm_eps=model.norm_eps,
    )
