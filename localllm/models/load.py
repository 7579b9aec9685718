"""A decoder from the tensors of its blocks, wherever those come from and rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.layers.attention import Attention
from localllm.layers.config import MLPConfig
from localllm.layers.linear import Embedding, Linear, RowLookup
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.norm import RMSNorm
from localllm.layers.rotary import Rotary
from localllm.models.architecture import ModelConfig
from localllm.models.block_source import BlockSource
from localllm.models.decoder import ALL_RESIDENT, Block, BlockStream, Decoder
from localllm.models.layout import BlockLayout, block_layouts, model_bytes
from localllm.quant.recipe import Recipe

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of one block, by the names of `layout.specs(recipe)`, all on one device.

    beside: of an MLP block whose intermediate features are split, those that another device computes.
    """

    layout: BlockLayout
    tensors: Mapping[str, Tensor]
    beside: BlockTensors | None = None


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

    def assembled(self, blocks: list[BlockTensors], stream: BlockStream, stored: RowLookup | None = None) -> Decoder:
        """blocks: the embedding, each attention and MLP block, the head, as `block_layouts` has them. stored: the
        embedding, where that is not among them and no head needs it."""
        config = self.config
        embed, *middle, head = [_Loaded(block, self) for block in blocks]
        is_tied = config.tie_word_embeddings
        embedding = embed.linear("embed_tokens") if stored is None or is_tied else stored
        return Decoder(
            config=config,
            embed=Embedding(embedding, self.dtype, config.embedding_scale),
            blocks=tuple(_block(block, index) for index, block in enumerate(middle)),
            final_norm=head.norm("final_norm"),
            head=embed.linear("embed_tokens") if is_tied else head.linear("lm_head"),
            rotaries=tuple(Rotary(rope, dim, self.device) for rope, dim in config.rotations),
            dtype=self.dtype,
            device=self.device,
            stream=stream,
        )


@dataclass(frozen=True)
class _Loaded:
    """One block, and the layers that its tensors make."""

    block: BlockTensors
    parts: DecoderParts

    def linear(self, name: str) -> Linear:
        matrix = next(matrix for matrix in self.block.layout.matrices if matrix.name == name)
        weight_format = matrix.format(self.parts.recipe)
        specs = weight_format.specs(matrix.out_features, matrix.in_features)
        given = self.block.tensors
        bias = given[f"{name}.linear_bias"].to(self.parts.dtype) if matrix.has_bias else None
        tensors = {part: given[f"{name}.{part}"] for part in specs}
        return Linear(weight_format, tensors, matrix.out_features, matrix.in_features, bias)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.block.tensors[name], self.parts.config.norm_eps)

    def optional_norm(self, name: str) -> RMSNorm | None:
        return self.norm(name) if name in self.block.tensors else None

    def mlp(self, config: MLPConfig) -> MLP | SplitMLP:
        whole = MLP(self.linear("gate_up_proj"), self.linear("down_proj"), config.activation)
        if self.block.beside is None:
            return whole
        there = replace(self, block=self.block.beside).mlp(config)
        assert isinstance(there, MLP)
        return SplitMLP(whole, there)


def _block(loaded: _Loaded, index: int) -> Block:
    layer = loaded.parts.config.layers[index // 2]
    body = loaded.mlp(layer.feed_forward) if index % 2 else _attention(loaded, index // 2)
    return Block(
        name=loaded.block.layout.name,
        body=body,
        norm_in=loaded.optional_norm("norm_in"),
        norm_out=loaded.optional_norm("norm_out"),
        device=body.device,
    )


def _attention(loaded: _Loaded, layer: int) -> Attention:
    model = loaded.parts.config
    config = model.attentions[layer]
    return Attention(
        config=config,
        layer=layer,
        rotation=model.rotations.index((config.rope, config.rotary_dim)),
        qkv_proj=loaded.linear("qkv_proj"),
        o_proj=loaded.linear("o_proj"),
        q_norm=loaded.optional_norm("q_norm"),
        k_norm=loaded.optional_norm("k_norm"),
    )
