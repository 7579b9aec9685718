"""The safetensors reader: as strict as the reference, exact in what it reads, loud when a file is cut or changed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from localllm.errors import CheckpointError
from localllm.models.checkpoints import safetensors_file
from localllm.models.checkpoints.safetensors_file import SafetensorsFile
from tests.thinning import examples


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "a.weight": torch.randn(3, 5, generator=generator).bfloat16(),
        "b": torch.randn(4, generator=generator),
        "c": torch.randn(2, 2, 2, generator=generator).half(),
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(1.5),
    }


@pytest.fixture
def path(tmp_path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(save(tensors(), {"format": "pt"}))
    return file


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_is_read_bit_for_bit(name, path):
    with SafetensorsFile(path) as file:
        read, stored = file.read_raw(name), tensors()[name]
        assert (file.entry(name).shape, read.dtype) == (tuple(stored.shape), stored.dtype)
        assert torch.equal(read, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_converted_into_the_rows_it_is_given(dtype, path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "READ_BYTES", 8)  # several chunks, the last one short
    whole = torch.full((7, 5), 9.0, dtype=dtype)
    with SafetensorsFile(path) as file:
        file.read_into("a.weight", whole[2:5])
    assert torch.equal(whole[2:5], tensors()["a.weight"].to(dtype))
    assert (whole[:2] == 9).all() and (whole[5:] == 9).all()


def test_chunks_are_the_stored_bytes(path):
    with SafetensorsFile(path) as file:
        stored = b"".join(file.chunks("b", chunk_bytes=7))
    assert stored == tensors()["b"].numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_read_is_refused_with_its_name_only_when_read(dtype, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(save({"w": torch.ones(4).to(dtype)}))
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        with pytest.raises(CheckpointError) as refusal:
            file.read_into("w", torch.empty(4))
        assert file.entry("w").dtype in refusal.value.why


def test_a_missing_tensor_is_named(path):
    with SafetensorsFile(path) as file, pytest.raises(CheckpointError) as refusal:
        file.read_raw("nothing")
    assert "'nothing'" in refusal.value.why


def test_a_file_cut_at_any_byte_is_refused_with_both_sizes(path):
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as refusal:
            SafetensorsFile(path)
        assert str(path) in refusal.value.what and "cut short" in refusal.value.what
        assert str(size) in refusal.value.why


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def overwrite(path: Path) -> None:
    time.sleep(0.02)  # past the clock tick of the file system
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [shrink, overwrite, replace, Path.unlink])
def test_a_file_that_changes_after_it_was_opened_is_an_error_and_no_signal(change, path):
    with SafetensorsFile(path) as file:
        change(path)
        with pytest.raises(CheckpointError) as refusal:
            for name in file.entries:
                file.read_raw(name)
    assert str(path) in refusal.value.what


def test_short_reads_are_continued(path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:3]], offset))
    with SafetensorsFile(path) as file:
        assert torch.equal(file.read_raw("a.weight"), tensors()["a.weight"])


def test_a_failing_disk_is_an_error_that_names_the_byte(path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with SafetensorsFile(path) as file, pytest.raises(CheckpointError) as refusal:
        file.read_raw("b")
    assert f"byte {file.entry('b').begin}" in refusal.value.why


@pytest.mark.usefixtures("no_descriptor_left")
def test_closing_gives_the_descriptor_back_also_when_forgotten(path):
    for _ in range(20):
        SafetensorsFile(path)
        SafetensorsFile(path).close()


@pytest.mark.usefixtures("no_descriptor_left")
def test_a_refused_file_leaves_no_descriptor_open(path):
    shrink(path)
    for _ in range(20):
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


def test_a_hundred_thousand_tensors_open_within_five_seconds(tmp_path):
    def described(i: int) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]}

    entries = {f"model.layers.{i}.self_attn.q_proj.weight": described(i) for i in range(100_000)}
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(400_000))
    started = time.process_time()
    with SafetensorsFile(path) as file:
        assert len(file.entries) == 100_000
    assert time.process_time() - started < 5.0


def reference(data: bytes) -> dict[str, Any] | None:
    try:
        found = safetensors.deserialize(data)
        return {name: (info["dtype"], info["shape"], bytes(info["data"])) for name, info in found}
    except safetensors.SafetensorError:
        return None


def ours(path: Path) -> dict[str, Any] | str:
    try:
        with SafetensorsFile(path) as file:
            specs = {name: file.entry(name) for name in file.entries}
            return {name: (s.dtype, list(s.shape), b"".join(file.chunks(name))) for name, s in specs.items()}
    except CheckpointError as refusal:
        assert str(path) in refusal.what
        return refusal.why


VALID = save(tensors(), {"format": "pt"})
VALID_HEADER = VALID[8 : 8 + int.from_bytes(VALID[:8], "little")]
VALID_DATA = VALID[8 + len(VALID_HEADER) :]
# What the reference lets pass and this reader does not: two readers could disagree about it.
STRICTER = (
    *("appears twice", "does not start with an object", "is not described by dtype", "__metadata__ is not a map"),
    *("claims", "sizes up to"),
)
PUNCTUATION = tuple(bytes([byte]) for byte in b'{}[],:"01-9. ')
FRAGMENTS = st.sampled_from(
    (
        *(*PUNCTUATION, b"e5", b"null", b"true", b"\xff", b"\\ud800", b"18446744073709551616"),
        *(b'"a":', b'"dtype":"F32"', b'"shape":[0]', b'"data_offsets":[0,0]'),
    )
)


@st.composite
def mutated_headers(draw: st.DrawFn) -> bytes:
    """The valid header with a few pieces cut out or put in."""
    header = VALID_HEADER
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(header)))
        end = min(len(header), start + draw(st.integers(0, 4)))
        header = header[:start] + draw(FRAGMENTS | st.just(b"")) + header[end:]
    return header


@st.composite
def described_tensors(draw: st.DrawFn) -> bytes:
    """A header in good JSON whose numbers are close to right."""
    small = st.integers(-1, 9) | st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 70])
    entries, begin = {}, 0
    for name in draw(st.lists(st.text(max_size=3), max_size=3, unique=True)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3) | st.lists(small, max_size=3))
        size = 4 * math.prod(shape)
        wrong = draw(st.sampled_from([0, 0, 0, 0, 1, -1, 4]))
        dtype = draw(st.sampled_from(["F32", "F32", "F32", "I32", "BF16", "F4", "nonsense"]))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size + wrong]}
        begin += size
    return json.dumps(entries, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def assert_agrees_with_reference(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    expected, found = reference(data), ours(path)
    if isinstance(found, str):
        assert expected is None or any(reason in found for reason in STRICTER), found
    else:
        assert found == expected


FUZZ = settings(max_examples=examples(600), deadline=None)


@FUZZ
@given(header=mutated_headers(), data=st.just(VALID_DATA) | st.binary(max_size=60))
def test_a_mutated_header_means_what_the_reference_says_or_is_refused(header, data, tmp_path):
    assert_agrees_with_reference(len(header).to_bytes(8, "little") + header + data, tmp_path / "x.safetensors")


@FUZZ
@given(header=described_tensors(), size=st.integers(0, 100))
def test_described_tensors_mean_what_the_reference_says_or_are_refused(header, size, tmp_path):
    assert_agrees_with_reference(len(header).to_bytes(8, "little") + header + bytes(size), tmp_path / "x.safetensors")


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_file_with_changed_bytes_means_what_the_reference_says_or_is_refused(tmp_path, changes):
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    assert_agrees_with_reference(bytes(data), tmp_path / "x.safetensors")
