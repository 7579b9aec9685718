"""A GPU's kernels compiled, and brought to the card, before the first prompt asks for them.

What Triton compiles is made for a model's shapes, so no check of the machine does it. Triton keeps it on the disk: the
first load of a model takes up to a minute, later ones a moment.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from localllm.kernels.gpu import product
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch, Draw
from localllm.layers.beside import SingleMixer
from localllm.layers.latent_attention import LatentAttention
from localllm.layers.mlp import MLP, SplitMLP
from localllm.layers.moe import MoE
from localllm.layers.segment import KVStore, Segment
from localllm.models.decoder import ALL_RESIDENT, Block, Decoder
from localllm.models.expert_records import ExpertRecords, RecordForm, SlottedExperts
from localllm.models.gpu_capabilities import is_ours
from localllm.models.gpu_program import CHUNK_ROWS, GpuProgram
from localllm.quant.weight_format import WeightFormat

_ROWS = tuple(1 << i for i in range(product.FEW_ROWS.bit_length()))  # of forwards that draw
_MANY_ROWS = (32, 64, 128, 256, CHUNK_ROWS)  # columns are shared out over programs by their number
_FAR = 256  # tokens, behind which attention is shared out over programs
TOKENS = _FAR + _MANY_ROWS[-1]  # of the sequence that it is done with


@torch.inference_mode()
def warm_up(decoder: Decoder, kv: KVStore) -> None:
    """Launch whatever forwards of this decoder will launch, each variant once: every kind of block, in every number of
    rows that is computed in its own way.

    What comes from anywhere else than the device's memory is not waited for: nobody reads the results.
    kv: nobody's, with room for TOKENS; what is in it is overwritten.

    Raises what a kernel raises that this card does not take, and what an allocation raises.
    """
    kinds = {_kind(block): block for block in decoder.blocks if _is_launched(block, decoder.device, kv)}
    reduced = replace(decoder, blocks=tuple(kinds.values()), stream=ALL_RESIDENT)
    for chooses in (False, True) if kv.chosen_pages else (False,):
        step = GpuProgram(reduced, chooses=chooses)
        for past, rows in (*((0, rows) for rows in _ROWS), (_FAR, 1)):
            step.draw(_batch(decoder, kv, past, rows), [Draw(1, 1.0, 0.0)] * rows).tokens()
        for rows in _MANY_ROWS:
            step.logits([_batch(decoder, kv, _FAR, rows)])


def _is_launched(block: Block, device: torch.device, kv: KVStore) -> bool:
    """Return whether the block launches kernels of ours: by itself, or within what operators compute of a block in
    two parts."""
    return is_ours(block, device, kv) or (block.device == device and isinstance(block.body, SplitMLP))


def _batch(decoder: Decoder, kv: KVStore, past: int, rows: int) -> Batch:
    return Batch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(past, past + rows),
        segments=(Segment(0, rows, kv, past, past + rows),),
        logit_rows=torch.tensor([rows - 1]),
        rotaries=decoder.rotaries,
    )


def _record_formats(form: RecordForm) -> tuple[WeightFormat, ...]:
    return tuple(matrix.format(form.recipe) for matrix in form.matrices)


def _mixer_kind(mixer: SingleMixer) -> Hashable:
    if isinstance(mixer, Attention):
        return mixer.config, mixer.rotation, mixer.q_norm is None
    if isinstance(mixer, LatentAttention):
        return mixer.config, mixer.rotation
    return mixer.config


def _kind(block: Block) -> Hashable:
    """Return what blocks have in common that are computed by the same variants of kernels."""
    body, norms = block.body, (block.norm_in is None, block.norm_out is None)
    matrices = (*body.linears, *block.head_linears)
    linears = [(linear.in_features, linear.out_features, linear.format, linear.bias is None) for linear in matrices]
    own: object = type(body)
    if block.mixers:
        own = tuple(_mixer_kind(mixer) for mixer in block.mixers)
    elif isinstance(body, MLP):
        own = body.config.glu
    elif isinstance(body, MoE) and isinstance(body.experts, ExpertRecords | SlottedExperts):
        own = (type(body.experts), body.config, body.router.in_features, _record_formats(body.experts.form))
    return (own, norms, tuple(linears))
