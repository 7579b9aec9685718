"""Headers of GGUF files: those that the gguf package writes, and hostile ones, which cost neither time nor memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import CheckpointError
from localllm.gguf.header import (
    TENSOR_TYPES,
    GgufEntry,
    is_later_part,
    read_floats,
    read_header,
    read_model,
    split_files,
)
from tests.thinning import examples

U32, F32, STRING, ARRAY, BOOL = 4, 6, 8, 9, 7


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    numbers = struct.pack(f"<{len(shape)}Q", *shape)
    count = len(shape) if dims is None else dims
    return text(name) + struct.pack("<I", count) + numbers + struct.pack("<IQ", kind, offset)


def file_of(
    *keys: bytes,
    tensors: tuple[bytes, ...] = (),
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: int = 0,
    magic: bytes = b"GGUF",
) -> bytes:
    """data: bytes of weights behind the header."""
    counts = len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32 + data) if tensors else header


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def test_a_file_of_the_gguf_package_reads_as_its_own_reader_reads_it(tmp_path: Path) -> None:
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    path, writer = tmp_path / "model.gguf", gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", (1 << 32) - 1)
    writer.add_int32("a.i32", -(1 << 31))
    writer.add_uint64("a.u64", (1 << 64) - 1)
    writer.add_int64("a.i64", -(1 << 63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Bäume 🌳")
    writer.add_array("a.strings", ["", "a", "ä" * 300])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.25])
    writer.add_array("a.flags", [True, False])
    weights = {"matrix": (3, 64), "vector": (5,), "cube": (2, 3, 32), "half": (4, 7)}
    for name, shape in weights.items():
        values = np.arange(np.prod(shape)).reshape(shape)
        writer.add_tensor(name, values.astype(np.float16 if name == "half" else np.float32))
    packed = gguf.quants.quantize(np.ones((3, 256), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header, theirs = read_header(path), gguf.GGUFReader(path)
    own = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == own.keys()
    for name, field in own.items():
        value = header.metadata[name]
        assert (list(value) if isinstance(value, array) else value) == field.contents()
    assert list(header.tensors) == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        shape = tuple(int(size) for size in reversed(each.shape))
        expected = GgufEntry(each.name, each.tensor_type.name, shape, int(each.data_offset), int(each.n_bytes))
        assert header.tensors[each.name] == expected
    assert header.tensors["packed"].shape == (3, 256)
    assert read_floats(header, "vector") == (0.0, 1.0, 2.0, 3.0, 4.0)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_floats(header, "matrix")


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    # Of activations alone, never in a file: ggml has 36 bytes, the package says 40.
    theirs[int(gguf.GGMLQuantizationType.Q8_1)] = ("Q8_1", 32, 36)
    assert dict(TENSOR_TYPES) | theirs == dict(TENSOR_TYPES)


def test_versions_2_and_3_read_alike(written: Callable[[bytes], Path]) -> None:
    parts = key("general.alignment", U32, struct.pack("<I", 64)), tensor("w", (32, 2), kind=8)
    second, third = (
        read_header(written(file_of(parts[0], tensors=(parts[1],), version=version, data=128))) for version in (2, 3)
    )
    assert second == third
    assert third.tensors["w"] == GgufEntry("w", "Q8_0", (2, 32), 128, 68)


def refusal(path: Path) -> str:
    """The error of a file, found in little time and memory."""
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert time.process_time() - start < 3.0  # on a busy machine; it is a second at most on one of its own
    assert str(path) in caught.value.what
    assert caught.value.fixes
    return f"{caught.value.what}: {caught.value.why}"


def peak_bytes(path: Path) -> int:
    """The memory that reading a refused file takes. It takes ten times as long while it is counted."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MATRIX = tensor("w", (32, 2))
HOSTILE = {
    "empty": (b"", "cut short"),
    "magic": (file_of(magic=b"GGML"), "begins with"),
    "version 1": (file_of(version=1), "version 1"),
    "version 99": (file_of(version=99), "version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (file_of(num_tensors=1 << 60), "1152921504606846976 tensors"),
    "fewer tensors": (file_of(num_tensors=90_000), "cut short"),
    "keys": (file_of(num_keys=1 << 60), "1152921504606846976 keys"),
    "fewer keys": (file_of(num_keys=90_000), "cut short"),
    "length of a key": (file_of(struct.pack("<Q", 1 << 40), num_keys=1), "cut short"),
    "length of a text": (file_of(key("a", STRING, struct.pack("<Q", 1 << 40))), "1099511627776 bytes"),
    "length of a text in an array": (
        file_of(key("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 40))),
        "1099511627776 bytes",
    ),
    "texts": (file_of(key("a", ARRAY, struct.pack("<IQ", STRING, 1 << 60))), "strings"),
    "numbers": (file_of(key("a", ARRAY, struct.pack("<IQ", F32, 1 << 60))), "values of 'a'"),
    "few numbers": (file_of(key("a", ARRAY, struct.pack("<IQ", F32, 1 << 20))), "cut short"),
    "flags": (file_of(key("a", ARRAY, struct.pack("<IQ", BOOL, 1 << 60))), "values of 'a'"),
    "arrays in an array": (file_of(key("a", ARRAY, struct.pack("<IQIQ", ARRAY, 1, F32, 0))), "array of arrays"),
    "type of a value": (file_of(key("a", 13, bytes(8))), "type 13"),
    "type in an array": (file_of(key("a", ARRAY, struct.pack("<IQ", 99, 0))), "type 99"),
    "flag": (file_of(key("a", BOOL, b"\2")), "neither 0 nor 1"),
    "text": (file_of(key("a", STRING, text(b"\xff"))), "not UTF-8"),
    "text in an array": (file_of(key("a", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))), "not UTF-8"),
    "name": (file_of(tensors=(text(b"\xff") + tensor("", (1,))[8:],), data=4), "not UTF-8"),
    "alignment 0": (file_of(key("general.alignment", U32, bytes(4)), tensors=(MATRIX,), data=256), "power of two"),
    "alignment 24": (
        file_of(key("general.alignment", U32, struct.pack("<I", 24)), tensors=(MATRIX,), data=256),
        "power of two",
    ),
    "alignment of text": (file_of(key("general.alignment", STRING, text("32"))), "power of two"),
    "key twice": (file_of(*[key("a", U32, bytes(4))] * 2), "'a' twice"),
    "tensor twice": (file_of(tensors=(MATRIX, tensor("w", (1,), offset=256)), data=512), "two tensors 'w'"),
    "type of a tensor": (file_of(tensors=(tensor("w", (32, 2), kind=4),), data=256), "'w' has the type 4"),
    "dimensions": (file_of(tensors=(tensor("w", (1,) * 5),), data=256), "5 dimensions"),
    "all dimensions": (file_of(tensors=(tensor("w", (1,), dims=0xFFFFFFFF),), data=256), "4294967295 dimensions"),
    "no rows": (file_of(tensors=(tensor("w", (32, 0)),), data=256), "shape (0, 32)"),
    "part of a block": (file_of(tensors=(tensor("w", (48, 2), kind=8),), data=256), "blocks of 32"),
    "product": (file_of(tensors=(tensor("w", (1 << 32,) * 4),), data=256), "cut short"),
    "product that wraps": (file_of(tensors=(tensor("w", (1 << 63, 2)),), data=256), "cut short"),
    "offset": (file_of(tensors=(tensor("w", (1,), offset=(1 << 64) - 32),), data=256), "cut short"),
    "odd offset": (file_of(tensors=(tensor("w", (1,), offset=16),), data=256), "alignment 32"),
    "overlap": (file_of(tensors=(MATRIX, tensor("v", (1,), offset=32)), data=512), "inside another tensor"),
    "cut data": (file_of(tensors=(MATRIX,), data=255), "cut short"),
    "no data": (file_of(tensors=(MATRIX,)), "cut short"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(written: Callable[[bytes], Path], name: str) -> None:
    data, reason = HOSTILE[name]
    path = written(data)
    assert reason in refusal(path)
    assert peak_bytes(path) < 10 << 20


def test_claims_that_the_file_has_bytes_for_are_bounded_too(tmp_path: Path) -> None:
    """Sparse files of terabytes, in which every count and length has room."""
    for name, begin, reason in [
        ("keys", file_of(num_keys=1 << 30), "at most 100000"),
        ("tensors", file_of(num_tensors=1 << 30), "at most 100000"),
        ("text", file_of(key("a", STRING, struct.pack("<Q", 1 << 40))), "no end within 67108864 bytes"),
        ("texts", file_of(key("a", ARRAY, struct.pack("<IQ", STRING, 1 << 30))), "at most 2000000"),
        ("numbers", file_of(key("a", ARRAY, struct.pack("<IQ", F32, 1 << 30))), "at most 67108864"),
        ("flags", file_of(key("a", ARRAY, struct.pack("<IQ", BOOL, 1 << 30))), "at most 2000000"),
        ("empty texts", file_of(key("a", ARRAY, struct.pack("<IQ", STRING, 2_000_000)), num_keys=2), "twice"),
        ("empty tensors", file_of(num_tensors=90_000), "two tensors ''"),
    ]:
        path = tmp_path / f"{name}.gguf"
        with path.open("wb") as file:
            file.write(begin)
            if name == "empty texts":
                file.write(bytes(8 * 2_000_000) + key("a", U32, bytes(4)))
            file.truncate(1 << 42)
        assert reason in refusal(path)
        if name != "empty texts":
            assert peak_bytes(path) < 100 << 20


def test_a_whole_vocabulary_takes_about_a_second_at_most(written: Callable[[bytes], Path]) -> None:
    tokens = b"".join(text(f"token{index}") for index in range(780_000))
    path = written(file_of(key("tokens", ARRAY, struct.pack("<IQ", STRING, 780_000) + tokens)))
    start = time.process_time()
    found = read_header(path).metadata["tokens"]
    assert time.process_time() - start < 3.0  # it takes 0.3 s on a processor of its own
    assert isinstance(found, list)
    assert (len(found), found[-1]) == (780_000, "token779999")


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_changed_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    strings = key("strings", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc"))
    numbers = key("numbers", ARRAY, struct.pack("<IQ", F32, 2) + bytes(8))
    content = bytearray(file_of(strings, numbers, key("n", U32, bytes(4)), tensors=(MATRIX,), data=256))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)):
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    for each in header.tensors.values():
        assert 0 <= each.begin <= each.end <= len(content)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent.gguf")


# Models of several files


def split(number: int, count: int, tensors: int) -> list[bytes]:
    return [
        key("split.no", 2, struct.pack("<H", number)),
        key("split.count", 2, struct.pack("<H", count)),
        key("split.tensors.count", 5, struct.pack("<i", tensors)),
    ]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        own = [key("general.architecture", STRING, text("llama"))] if number == 0 else []
        path.write_bytes(file_of(*own, *split(number, 3, 3), tensors=(tensor(f"w{number}", (8,)),), data=32))
    return paths


def test_any_file_of_a_split_model_is_the_model(parts: list[Path]) -> None:
    for path in parts:
        assert split_files(path) == tuple(parts)
        assert is_later_part(path) == (path != parts[0])
        headers = read_model(path)
        assert [header.path for header in headers] == parts
        assert headers[0].metadata["general.architecture"] == "llama"
        assert [list(header.tensors) for header in headers] == [["w0"], ["w1"], ["w2"]]


def test_one_file_is_a_model_of_one(written: Callable[[bytes], Path]) -> None:
    path = written(file_of(tensors=(MATRIX,), data=256))
    assert [header.path for header in read_model(path)] == [path]


def test_a_missing_file_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"a-00002-of-00003\.gguf is missing"):
        read_model(parts[0])


def test_names_of_no_split_are_refused(tmp_path: Path) -> None:
    for name in ("a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-00001-of-99999.gguf"):
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            split_files(tmp_path / name)


@pytest.mark.parametrize(
    ("number", "content", "reason"),
    [
        (1, file_of(*split(2, 3, 3), tensors=(tensor("w1", (8,)),), data=32), "file 2 of 3"),
        (1, file_of(*split(1, 2, 3), tensors=(tensor("w1", (8,)),), data=32), "file 1 of 2"),
        (1, file_of(*split(1, 3, 3), tensors=(tensor("w0", (8,)),), data=32), "is also in"),
        (0, file_of(*split(0, 3, 4), tensors=(tensor("w0", (8,)),), data=32), "announces 4 tensors"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    parts: list[Path], number: int, content: bytes, reason: str
) -> None:
    parts[number].write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_model(parts[0])
    assert reason in caught.value.why


def test_a_renamed_part_is_no_model(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError) as caught:
        read_model(renamed)
    assert "file 0 of 3" in caught.value.why
