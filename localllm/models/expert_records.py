"""Experts of a mixture as records: all of a block in memory, or those of them that a pool has brought from the disk."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from localllm.layers.config import MLPConfig
from localllm.layers.linear import Linear
from localllm.layers.mlp import MLP
from localllm.models.layout import EXPERTS, BlockLayout, Matrix, Record
from localllm.offload.streaming.card_slots import CardSlots
from localllm.offload.streaming.expert_pool import ExpertPool
from localllm.quant.recipe import Recipe


@dataclass(frozen=True)
class RecordForm:
    """What a record means. matrices: of any expert of the block. dtype: of activations. name: of all of them."""

    record: Record
    matrices: tuple[Matrix, ...]
    config: MLPConfig
    recipe: Recipe
    dtype: torch.dtype
    name: str

    @classmethod
    def of(cls, layout: BlockLayout, recipe: Recipe, dtype: torch.dtype) -> RecordForm:
        experts = layout.experts
        assert experts is not None
        name = f"{layout.name}.{EXPERTS}"
        return cls(experts.record(recipe), experts.matrices(0), experts.config, recipe, dtype, name)

    def mlp(self, content: Tensor, number: int) -> MLP:
        """Return the expert whose record this is, uint8 [bytes]: nothing is copied."""
        tensors = {
            name: content[placed.begin : placed.end].view(placed.spec.torch_dtype).view(placed.spec.shape)
            for name, placed in self.record.tensors.items()
        }
        prefix = f"{self.name}.{number}"
        gate_up, down = (new_linear(matrix, tensors, self.recipe, self.dtype, prefix) for matrix in self.matrices)
        return MLP(gate_up, down, self.config)


@dataclass(frozen=True)
class ExpertRecords:
    """All experts of a block, one behind the other. memory: uint8 [experts, bytes of a record]."""

    memory: Tensor
    form: RecordForm

    @property
    def record_bytes(self) -> int:
        return self.form.record.num_bytes

    @cached_property
    def table(self) -> Tensor:
        """The address of each record, int64 [experts], where the records are."""
        numbers = torch.arange(len(self.memory), device=self.memory.device)
        return numbers * self.record_bytes + self.memory.data_ptr()

    def held(self, experts: Sequence[int]) -> Generator[list[tuple[int, MLP]], None, None]:
        yield [(index, self.form.mlp(self.memory[index], index)) for index in experts]


@dataclass(frozen=True)
class PooledExperts:
    """The experts of a block that rest on the disk, and are computed with in the slots of a pool."""

    pool: ExpertPool
    block: str
    form: RecordForm

    @property
    def record_bytes(self) -> int:
        return self.form.record.num_bytes

    @property
    def table(self) -> Tensor:
        """The address of each record that is in a slot, int64 [experts]: the pool keeps it true."""
        return self.pool.table(self.block)

    def held(self, experts: Sequence[int]) -> Generator[list[tuple[int, MLP]], None, None]:
        with closing(self.pool.held(self.block, experts)) as groups:
            for group in groups:
                yield [(index, self.form.mlp(self.pool.record(self.block, index), index)) for index in group]


@dataclass(frozen=True)
class SlottedExperts:
    """The experts of a block that rest in the host's memory, and are computed with there, or in slots of a device."""

    home: ExpertRecords
    slots: CardSlots
    block: str

    @property
    def form(self) -> RecordForm:
        return self.home.form

    @property
    def record_bytes(self) -> int:
        return self.home.record_bytes

    @property
    def table(self) -> Tensor:
        """The address of each record that is in a slot, int64 [experts], on the device."""
        return self.slots.table(self.block)

    def held(self, experts: Sequence[int]) -> Generator[list[tuple[int, MLP]], None, None]:
        """Yield copies on the device, one after the other: slots are for our kernels."""
        for index in experts:
            content = self.home.memory[index].to(self.slots.memory.device)
            yield [(index, self.form.mlp(content, index))]


def new_linear(
    matrix: Matrix, tensors: Mapping[str, Tensor], recipe: Recipe, dtype: torch.dtype, prefix: str
) -> Linear:
    """Return a matrix of its tensors.

    dtype: of its bias, which follows that of activations; a router computes in fp32.
    prefix: of its name in the model.
    """
    weight_format = matrix.format(recipe)
    specs = weight_format.specs(matrix.out_features, matrix.in_features)
    own = {name: tensors[f"{matrix.name}.{name}"] for name in specs}
    bias_dtype = torch.float32 if matrix.role == "router" else dtype
    bias = tensors[f"{matrix.name}.linear_bias"].to(bias_dtype) if matrix.has_bias else None
    name = f"{prefix}.{matrix.name}"
    return Linear(weight_format, own, matrix.out_features, matrix.in_features, bias, name)
