"""A packed model: files that any safetensors reader opens, tensors where kernels want them, and never a wrong byte."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError
from localllm.hub.packed import PACKED_INDEX
from localllm.models import packed_file
from localllm.models.block_layouts import block_layouts
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.checkpoints.safetensors_file import SafetensorsFile
from localllm.models.families import load_config
from localllm.models.load import load_decoder
from localllm.models.packed_file import needs_conversion
from localllm.offload.streaming import disk_read
from localllm.offload.streaming.disk_read import PAGE_BYTES
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.quant.recipe import recipe
from tests.checkpoints import FAMILIES
from tests.packed_support import (
    FORMATS,
    SOURCE,
    everything_of,
    open_packed,
    pack,
    read_all,
    same,
    small_checkpoint,
    spoil,
)
from tests.thinning import examples, one_in

CPU = torch.device("cpu")


# What is in it


# int4 and int8 for every family, and every format for the one whose sizes fill no tile.
PAIRS = [(name, weights) for name in FAMILIES for weights in ("int4-g64", "int8")]
PAIRS += [("llama-one-kv-head-odd-sizes", weights) for weights in FORMATS if weights not in ("int4-g64", "int8")]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: small_checkpoint(tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize(("name", "weights"), one_in(5, PAIRS))
def test_a_decoder_from_a_packed_model_is_the_one_from_the_checkpoint(families, name, weights, tmp_path):
    family = families(name)
    pack(family, tmp_path / "p", weights)
    config, chosen = load_config(family), recipe(weights)
    with Checkpoint.open(family, config.stored) as checkpoint, open_packed(family, tmp_path / "p", weights) as packed:
        blocks = CheckpointBlocks(checkpoint, config, chosen)
        direct = load_decoder(blocks, blocks.config, chosen, dtype=torch.bfloat16, device=CPU)
        assert packed.config == blocks.config
        loaded = load_decoder(packed, packed.config, chosen, dtype=torch.bfloat16, device=CPU)
    assert same(everything_of(direct), everything_of(loaded))


@pytest.mark.parametrize("weights", FORMATS)
def test_a_block_is_a_safetensors_file_with_aligned_data_and_tensors(checkpoint, weights, tmp_path):
    pack(checkpoint, tmp_path, weights)
    for layout in block_layouts(load_config(checkpoint)):
        path = tmp_path / f"{layout.name}.safetensors"
        specs = layout.specs(recipe(weights))
        with safetensors.safe_open(path, "pt") as file:
            assert specs.keys() <= set(file.keys())
            assert all(name.startswith("padding.") for name in set(file.keys()) - specs.keys())
            assert file.metadata()["source"] == SOURCE
        with SafetensorsFile(path) as ours:
            assert min(ours.entry(name).begin for name in ours.entries) % PAGE_BYTES == 0
            assert all(ours.entry(name).begin % 64 == 0 for name in specs)
        assert path.stat().st_size % PAGE_BYTES == 0


def test_the_index_tells_where_every_tensor_is(checkpoint, made):
    index = json.loads((made / PACKED_INDEX).read_text())
    for block in index["blocks"]:
        assert (made / block["file"]).stat().st_size == block["bytes"]
        with SafetensorsFile(made / block["file"]) as file:
            for name, told in block["tensors"].items():
                spec = file.entry(name)
                assert (spec.dtype, list(spec.shape), spec.begin) == (told["dtype"], told["shape"], told["offset"])


def test_a_source_that_is_no_text_is_kept_apart_all_the_same(checkpoint, tmp_path):
    source = os.fsdecode(b"/models/\xff\xfe@1")
    pack(checkpoint, tmp_path, source=source)
    read_all(open_packed(checkpoint, tmp_path, source=source))
    with pytest.raises(CheckpointError):
        open_packed(checkpoint, tmp_path, source=os.fsdecode(b"/models/\xff\xfd@1"))


# How it is read


def test_the_tensors_of_a_block_are_views_of_one_aligned_buffer(checkpoint, made):
    with open_packed(checkpoint, made) as packed:
        for layout in block_layouts(packed.config):
            tensors = packed.tensors(layout).values()
            (storage,) = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            assert storage % PAGE_BYTES == 0
            assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_blocks_may_be_asked_for_in_any_order(checkpoint, made):
    expected = read_all(open_packed(checkpoint, made))
    with open_packed(checkpoint, made) as packed:
        for layout in [*reversed(block_layouts(packed.config)), block_layouts(packed.config)[3]]:
            for name, tensor in packed.tensors(layout).items():
                assert torch.equal(tensor, expected[f"{layout.name}/{name}"])


def test_no_more_than_one_block_is_read_ahead(checkpoint, made, monkeypatch):
    opened: list[str] = []
    real = disk_read.open_plain
    monkeypatch.setattr(disk_read, "open_plain", lambda path, flags=0: (opened.append(path.name), real(path, flags))[1])
    with open_packed(checkpoint, made) as packed:
        layouts = block_layouts(packed.config)
        for number, layout in enumerate(layouts, 1):
            packed.tensors(layout)
            assert list(dict.fromkeys(opened)) == [f"{x.name}.safetensors" for x in layouts[: number + 1]]


@pytest.mark.usefixtures("no_descriptor_left")
def test_a_load_that_is_given_up_leaves_no_descriptor_open(checkpoint, made):
    with open_packed(checkpoint, made) as packed:
        for number in (0, 5):  # the second of which is not the one that is read ahead
            packed.tensors(block_layouts(packed.config)[number])


@pytest.mark.parametrize("way", ["no O_DIRECT", "refused when opened", "refused when read", "cached", "short reads"])
def test_every_way_to_read_gives_the_same_bytes(checkpoint, made, monkeypatch, way):
    expected = read_all(open_packed(checkpoint, made))
    monkeypatch.setattr(disk_read, "cached_share", lambda *_: float(way == "cached"))
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def open_file(path: object, flags: int, *mode: int, **named: object) -> int:
        if way == "refused when opened" and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        descriptor = real_open(path, flags & ~os.O_DIRECT, *mode, **named)  # type: ignore[arg-type]
        direct.discard(descriptor)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if way == "refused when read" and descriptor in direct:
            raise OSError(22, "Invalid argument")
        if way == "short reads":
            if descriptor in direct and offset % 512:
                raise OSError(22, "Invalid argument")
            buffers = [buffers[0][:5000]]
        return real_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read)
    if way == "no O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
        monkeypatch.setattr(os, "open", real_open)
    assert same(read_all(open_packed(checkpoint, made)), expected)


def test_a_file_that_cannot_be_mapped_is_read_all_the_same(checkpoint, made, monkeypatch):
    expected = read_all(open_packed(checkpoint, made))
    real = mmap.mmap

    def refuse_files(descriptor: int, *arguments: int, **named: int) -> mmap.mmap:
        if descriptor != -1:
            raise OSError(errno.ENODEV, "No such device")
        return real(descriptor, *arguments, **named)

    monkeypatch.setattr(mmap, "mmap", refuse_files)
    assert same(read_all(open_packed(checkpoint, made)), expected)


def test_the_page_cache_is_noticed(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 20)  # nothing but a hole: no page of it is anywhere
    with path.open("r+b", buffering=0) as file:
        assert disk_read.cached_share(file.fileno(), 1 << 20) < 0.1
        file.write(bytes(1 << 20))
        assert disk_read.cached_share(file.fileno(), 1 << 20) > 0.9


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(MemoryError, match=str(1 << 55)):
        host_buffer(1 << 55)
    assert host_buffer(0).shape == (0,)


# What is refused


def refusal(checkpoint: Path, target: Path, **other: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_all(open_packed(checkpoint, target, **other))
    assert "localllm quantize 'my model' --weights" in caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("key", "other"), [("source", "maker/model@4567"), ("weights", "int4-g64-rtn"), ("weights", "int8")]
)
def test_what_was_made_from_another_revision_or_in_another_format_is_refused(checkpoint, target, key, other):
    assert f"'{key.replace('weights', 'recipe')}' is" in refusal(checkpoint, target, **{key: other}).why


def test_a_model_of_another_shape_is_refused(checkpoint, target, tmp_path):
    biased = small_checkpoint(tmp_path / "biased", "llama-biases-tied")
    assert "'model' is" in refusal(biased, target).why


def edited(target: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((target / PACKED_INDEX).read_text())
    change(index)
    (target / PACKED_INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(("version", "kind"), [(7, "a newer"), ("7", "another"), (7.0, "another"), (None, "another")])
def test_another_layout_is_refused_with_both_versions(checkpoint, target, version, kind):
    edited(target, lambda index: index.update(layout_version=version))
    error = refusal(checkpoint, target)
    assert error.what == f"{target / PACKED_INDEX} is of {kind} layout version"
    assert error.why == f"it is {version!r}; this localllm reads {packed_file.LAYOUT_VERSION}"
    assert error.fix.startswith("update localllm, or") == (kind == "a newer")
    assert not needs_conversion(target)


def test_an_older_layout_is_made_anew(target, monkeypatch):
    assert not needs_conversion(target)
    monkeypatch.setattr(packed_file, "LAYOUT_VERSION", 2)
    assert needs_conversion(target)


def test_a_folder_without_an_index_is_not_finished(checkpoint, target):
    (target / PACKED_INDEX).unlink()
    assert needs_conversion(target)
    assert needs_conversion(target / "absent")
    assert PACKED_INDEX in refusal(checkpoint, target).what


BROKEN = [b"", b"{", b"[]", b"null", b'{"layout_version": NaN}', b'{"layout_version": 1}', b"\xff"]


@pytest.mark.parametrize("content", BROKEN)
def test_an_index_that_is_broken_is_refused(checkpoint, target, content):
    (target / PACKED_INDEX).write_bytes(content)
    assert not needs_conversion(target)
    assert PACKED_INDEX in refusal(checkpoint, target).what


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(extra=1),
        lambda index: index.pop("model"),
        lambda index: index["blocks"].pop(),
        lambda index: index["blocks"].reverse(),
        lambda index: index["blocks"][1].update(file="../other.safetensors"),
        lambda index: index["blocks"][1].update(checksum=7),
        lambda index: index["blocks"][1].update(checksum="z" * 32),
        lambda index: index["blocks"].insert(0, None),
        lambda index: index.update(blocks={}),
        lambda index: index["model"].update(norm_weight_offset=1.0),
        lambda index: index["model"].update(tie_word_embeddings=True),
    ],
)
def test_an_index_that_says_anything_else_is_refused(checkpoint, target, change):
    edited(target, change)
    assert PACKED_INDEX in refusal(checkpoint, target).what


def test_a_checksum_of_the_index_that_is_wrong_is_found(checkpoint, target):
    edited(target, lambda index: index["blocks"][1].update(checksum="0" * 32))
    assert "layers.0.attention.safetensors is damaged" in refusal(checkpoint, target).what


@pytest.mark.parametrize("size", [0, 7, 8, 4095, 4096, 4097, 12287])
def test_a_block_that_is_cut_is_refused_with_both_sizes(checkpoint, target, size):
    path = target / "layers.1.attention.safetensors"
    whole = path.stat().st_size
    os.truncate(path, size)
    error = refusal(checkpoint, target)
    assert str(path) in error.what and "cut short" in error.what
    assert str(whole) in error.why and str(size) in error.why


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, 1 << 20), lambda path: (path.unlink(), path.mkdir())]
)
def test_a_block_that_is_absent_or_something_else_is_refused(checkpoint, target, damage):
    path = target / "layers.1.mlp.safetensors"
    damage(path)
    assert str(path) in refusal(checkpoint, target).what


def test_a_pipe_in_the_place_of_a_block_does_not_block(checkpoint, target):
    path = target / "layers.1.mlp.safetensors"
    opened = open_packed(checkpoint, target)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_all(opened)


def test_blocks_that_changed_places_are_refused(checkpoint, target):
    one, other = target / "layers.1.mlp.safetensors", target / "layers.2.mlp.safetensors"
    assert one.stat().st_size == other.stat().st_size
    for path, content in ((one, other.read_bytes()), (other, one.read_bytes())):
        path.write_bytes(content)
    assert f"{one} is damaged" in refusal(checkpoint, target).what


def test_the_blocks_of_another_checkpoint_are_refused(checkpoint, target, tmp_path):
    other = pack(small_checkpoint(tmp_path / "other", seed=1), tmp_path / "q")
    shutil.copy(other / "layers.1.mlp.safetensors", target)
    assert "layers.1.mlp.safetensors is damaged" in refusal(checkpoint, target).what


@pytest.mark.parametrize("change", ["cut", "overwritten"])
def test_a_block_that_changes_while_it_is_read_is_refused(checkpoint, target, monkeypatch, change):
    path = target / "layers.1.mlp.safetensors"
    real, done = os.preadv, []

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not done and Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            done.append(True)
            if change == "cut":
                os.truncate(path, 4096)
            else:
                spoil(path, 5000)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    assert str(path) in refusal(checkpoint, target).what


def test_a_disk_that_fails_is_an_error_that_names_the_file(checkpoint, made, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    error = refusal(checkpoint, made)
    assert "embed.safetensors cannot be read" in error.what and "Input/output error" in error.why


@pytest.fixture(scope="module")
def spoilt(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(made, tmp_path_factory.mktemp("spoilt") / "p")


BLOCKS = [f"layers.{i}.{kind}" for i in range(4) for kind in ("attention", "mlp")]
PLACES = {"place": st.floats(0, 1, exclude_max=True), "bit": st.integers(0, 7)}
EACH = settings(max_examples=examples(150), deadline=None)


@EACH
@given(block=st.sampled_from(["embed", *BLOCKS, "head"]), **PLACES)
def test_a_flipped_bit_anywhere_in_a_block_is_found(checkpoint, made, spoilt, block, place, bit):
    path = spoilt / f"{block}.safetensors"
    spoil(path, int(place * path.stat().st_size), 1 << bit)
    assert f"{path} is damaged" in refusal(checkpoint, spoilt).what
    shutil.copy(made / path.name, path)


@EACH
@given(**PLACES)
def test_a_flipped_bit_in_the_index_is_found_or_changes_nothing(checkpoint, made, spoilt, place, bit):
    spoil(spoilt / PACKED_INDEX, int(place * (made / PACKED_INDEX).stat().st_size), 1 << bit)
    expected = read_all(open_packed(checkpoint, made))
    try:
        found = read_all(open_packed(checkpoint, spoilt))
    except CheckpointError as error:
        assert str(spoilt) in error.what
    else:
        assert same(found, expected)
    shutil.copy(made / PACKED_INDEX, spoilt)
