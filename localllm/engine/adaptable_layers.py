"""The layers of a model that adapters can change, and an adapter as these compute with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from localllm.errors import AdapterError
from localllm.kernels.low_rank_record import LowRankRecord
from localllm.layers.linear import Linear
from localllm.layers.low_rank import EMBED, HEAD, Adapter, AdapterWeights, LowRank
from localllm.layers.moe import MoE
from localllm.layers.recurrent import Recurrent
from localllm.models.architecture import ModelConfig
from localllm.models.cpu_buffers import native_sites
from localllm.models.decoder import Decoder
from localllm.models.layout import EXPERTS
from localllm.offload.streaming.host_buffer import host_buffer


@dataclass(frozen=True)
class AdaptableLayers:
    """They are the same wherever blocks are placed.

    widths: the features of each layer's output, but of experts.
    exact: those that are computed in fp32, routers and gates; others in `dtype`.
    native: those to which the CPU's native steps add.
    """

    config: ModelConfig
    dtype: torch.dtype
    widths: Mapping[str, int]
    exact: frozenset[str]
    native: frozenset[str]

    @classmethod
    def of(cls, decoder: Decoder) -> AdaptableLayers:
        exact = [*_exact_layers(decoder)]
        layers = [*exact]
        for block in decoder.blocks:
            layers += [*block.linears, *block.head_linears]
            layers += [] if block.per_layer_inputs is None else [block.per_layer_inputs.projection]
            layers += [] if block.altup is None else block.altup.linears
        widths = {layer.name: layer.out_features for layer in layers}
        names = frozenset(layer.name for layer in exact)
        return cls(decoder.config, decoder.dtype, widths, names, frozenset(native_sites(decoder)))

    def adapter(self, weights: AdapterWeights, *, is_native: bool) -> Adapter:
        """Return an adapter as these layers compute with it: for the CPU's native steps, or for torch's operators,
        which compute all of it where it changes a layer that the steps do not add to. Raises AdapterError."""
        layers = {site: parts for site, parts in weights.sites.items() if site not in (EMBED, HEAD)}
        for site in layers:
            if site not in self.widths and site.split(".")[-3:-2] != [EXPERTS]:
                why = "these matrices are computed as they are"
                raise AdapterError(f"adapters of {site} are not supported ({weights.name})", why=why)
        records = {}
        if is_native and layers.keys() <= self.native:
            sites = (site for site in self.widths if site in layers)
            records = _in_one_run({site: LowRankRecord.of(layers[site], self.widths[site]) for site in sites})
        parts = {
            site: tuple(_as(part, torch.float32 if site in self.exact else self.dtype) for part in each)
            for site, each in weights.sites.items()
            if site not in records
        }
        return Adapter(weights.name, weights.digest, parts, records)


def _exact_layers(decoder: Decoder) -> Iterator[Linear]:
    for block in decoder.blocks:
        body = block.body
        if isinstance(body, MoE):
            yield body.router
            if body.shared_gate is not None:
                yield body.shared_gate
        for mixer in block.mixers:
            yield from mixer.exact_linears if isinstance(mixer, Recurrent) else ()
        if block.altup is not None:
            yield from block.altup.mixer.linears


def _in_one_run(records: Mapping[str, LowRankRecord]) -> dict[str, LowRankRecord]:
    """Return the records one behind the other in huge pages, as a step reads them: eight adapters in small ones made a
    step of a 1.1B shape 1.29 times as long, in huge ones 1.22."""
    memory, placed, begin = host_buffer(sum(each.room_bytes for each in records.values())), {}, 0
    for site, record in records.items():
        placed[site] = record.copied_to(memory[begin : begin + record.room_bytes])
        begin += record.room_bytes
    return placed


def _as(part: LowRank, dtype: torch.dtype) -> LowRank:
    return LowRank(part.a.to(dtype), part.b.to(dtype), part.first_row)
