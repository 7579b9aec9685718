"""An embedding's rows from the disk are those of the whole matrix, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError
from localllm.models.block_layouts import block_layouts
from localllm.models.layout import EMBED, BlockLayout
from localllm.models.packed import PackedModel
from localllm.quant.recipe import recipe
from tests.packed_support import FORMATS, open_packed, pack, spoil

Model = tuple[Path, Path, str]  # its checkpoint, it packed, its format


@pytest.fixture(scope="module", params=FORMATS)
def model(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    return checkpoint, pack(checkpoint, tmp_path_factory.mktemp("packed") / "model", request.param), request.param


def embedding(packed: PackedModel) -> BlockLayout:
    return next(layout for layout in block_layouts(packed.config) if layout.name == EMBED)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_the_matrix(model: Model, data: st.DataObject) -> None:
    with open_packed(*model) as packed:
        layout = embedding(packed)
        (matrix,) = layout.matrices
        ids = torch.tensor(data.draw(st.lists(st.integers(0, matrix.out_features - 1), min_size=1, max_size=150)))
        tensors = {name.partition(".")[2]: tensor for name, tensor in packed.tensors(layout).items()}
        expected = matrix.format(recipe(model[2])).rows(tensors, ids, matrix.in_features)
        stored = packed.disk_embedding(layout)
        assert torch.equal(stored.rows(ids), expected)
        stored.close()


def test_a_file_that_is_written_to_or_cut_is_refused_by_name(checkpoint: Path, target: Path) -> None:
    path = target / "embed.safetensors"
    with open_packed(checkpoint, target) as packed:
        stored = packed.disk_embedding(embedding(packed))
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"embed\.safetensors was changed while it was in use"):
            stored.rows(torch.tensor([3]))
        spoil(path, -5000)
        with pytest.raises(CheckpointError, match=r"embed\.safetensors is damaged") as caught:
            packed.disk_embedding(embedding(packed))
        assert caught.value.fix.startswith("localllm quantize")
