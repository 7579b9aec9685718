"""What a hostile model folder may do: be refused by a typed error, within 5 s and 1 GiB, and run nothing.

Every folder is opened in a process of its own, bounded in time and memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

# The promise is 1 GiB; the readers need far less, and a limit that is lost shows up here.
GROWTH_BYTES = 640 << 20
LIMIT_S = 5.0
# The reader is imported first, so that what is measured is the file's doing.
CHILD = """
import json, resource, sys, time
from pathlib import Path
from localllm.errors import LocalLLMError
if sys.argv[1] == "config":
    from localllm.models.families import load_config as reader
else:
    from localllm.models.checkpoints.checkpoint import Checkpoint
    reader = Checkpoint.open
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for directory in sys.argv[2:]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        reader(Path(directory))
        outcome = ["accepted", ""]
    except LocalLLMError as error:
        outcome = [type(error).__name__, f"{error.what} | {error.why} | {error.fix}"]
    except BaseException as error:
        outcome = [f"crash: {type(error).__name__}", str(error)[:200]]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps([*outcome, time.process_time() - started, grown]), flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """How opening one folder ended: the error's class or "accepted", its text, processor seconds, bytes of growth."""

    error: str
    text: str
    seconds: float
    grown_bytes: int


def open_in_bounds(reader: str, directories: Sequence[Path]) -> list[Outcome]:
    """Run `reader` ("config" or "weights") over the folders under RLIMIT_AS = now + 1 GiB."""
    command = [sys.executable, "-c", CHILD, reader, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    outcomes = [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(directories), f"number {len(outcomes)}: {done.returncode} {done.stderr[-800:]}"
    return outcomes


GOOD = b'{"model_type": "llama", "hidden_size": 64, "vocab_size": 99}'
BOMBS: dict[str, bytes] = {
    "lists 100000 deep": b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "lists 9000 deep": b'{"model_type": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    "a million empty lists": b'{"a": [' + b"[]," * 1_000_000 + b"[]]}",
    "a million numbers": b'{"a": [' + b"1," * 1_000_000 + b"1]}",
    "5 MiB of spaces": GOOD + b" " * (5 << 20),
    "an integer of 100000 digits": GOOD.replace(b"64", b"9" * 100_000, 1),
    "an integer of 4000 digits": GOOD.replace(b"64", b"9" * 4_000, 1),
    "duplicate keys": GOOD.replace(b"{", b'{"vocab_size": 1, ', 1),
    "NaN": GOOD.replace(b"64", b"NaN", 1),
    "Infinity": GOOD.replace(b"64", b"-Infinity", 1),
    "1e999": GOOD.replace(b"64", b"1e999", 1),
    "half a surrogate pair": GOOD.replace(b"llama", b"\\ud800"),
    "escapes in a name": GOOD.replace(b"llama", b"\\u001b[31m\\u202e" * 1000),
    "not UTF-8": GOOD.replace(b"llama", b"\xff\xfe"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "cut": GOOD[:-5],
    "two objects": GOOD + GOOD,
    "HTML": b"<html><body>Sign in to the network</body></html>",
}


SPECIAL = ["pipe", "zero", "folder", "absent"]


def opened(reader: str, root: Path, files: dict[str, tuple[str, bytes]], special: str) -> dict[str, Outcome]:
    """How a folder for each of `files`, and for each of SPECIAL in the place of the file `special`, is read."""
    folders = {name: root / str(number) for number, name in enumerate([*files, *SPECIAL])}
    for name, folder in folders.items():
        folder.mkdir()
        if name in files:
            (folder / files[name][0]).write_bytes(files[name][1])
    os.mkfifo(folders["pipe"] / special)
    (folders["zero"] / special).symlink_to("/dev/zero")
    (folders["folder"] / special).mkdir()
    return dict(zip(folders, open_in_bounds(reader, list(folders.values())), strict=True))


@pytest.fixture(scope="module")
def bombs(tmp_path_factory) -> dict[str, Outcome]:
    files = {name: ("config.json", data) for name, data in BOMBS.items()}
    return opened("config", tmp_path_factory.mktemp("configs"), files, "config.json")


def assert_is_refused(outcome: Outcome, errors: tuple[str, ...], named: str) -> None:
    assert outcome.error in errors, outcome
    assert named in outcome.text and outcome.text.isprintable()
    assert outcome.seconds < LIMIT_S and outcome.grown_bytes < GROWTH_BYTES


@pytest.mark.parametrize("name", [*BOMBS, *SPECIAL])
def test_a_config_bomb_ends_in_a_typed_error_in_time_and_memory(name, bombs):
    assert_is_refused(bombs[name], ("CheckpointError", "UnsupportedModelError"), "config.json")


def header(text: bytes | str, claim: int | None = None, data: bytes = bytes(4)) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if claim is None else claim).to_bytes(8, "little") + raw + data


def tensor(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


ONE = tensor()
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "length 0": header("", 0),
    "length 1": header("{", 1, b"}"),
    "length 2^63": header("{}", 1 << 63),
    "length 2^64 - 1": header("{}", (1 << 64) - 1),
    "length 100 MB in a small file": header("{}", 100_000_000),
    "length past the end by one": header("{}", 7),
    "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0cos\nsystem\n.",
    "a zip": b"PK\x03\x04" + bytes(100),
    "overlap": header(f'{{"a": {tensor(shape=[2], offsets=[0, 8])}, "b": {tensor(offsets=[4, 8])}}}', data=bytes(8)),
    "same range twice": header(f'{{"a": {ONE}, "b": {ONE}}}'),
    "hole": header(f'{{"a": {ONE}, "b": {tensor(offsets=[8, 12])}}}', data=bytes(12)),
    "hole at the start": header(f'{{"a": {tensor(offsets=[4, 8])}}}', data=bytes(8)),
    "trailing bytes": header(f'{{"a": {ONE}}}', data=bytes(5)),
    "trailing bytes of no tensor": header("{}"),
    "cut data": header(f'{{"a": {ONE}}}', data=bytes(3)),
    "offset past the end": header(f'{{"a": {tensor(shape=[1 << 38], offsets=[0, 1 << 40])}}}'),
    "offset 2^63": header(f'{{"a": {tensor(offsets=[1 << 63, (1 << 63) + 4])}}}'),
    "minus zero": header(f'{{"a": {ONE.replace("[0,", "[-0,")}}}'),
    "negative offset": header(f'{{"a": {tensor(offsets=[-4, 0])}}}'),
    "reversed offsets": header(f'{{"a": {tensor(offsets=[4, 0])}}}'),
    "three offsets": header(f'{{"a": {tensor(offsets=[0, 4, 4])}}}'),
    "shape against range": header(f'{{"a": {tensor(shape=[2])}}}'),
    "shape 2^63": header(f'{{"a": {tensor(shape=[1 << 63])}}}'),
    "shape product overflows": header(f'{{"a": {tensor(shape=[1 << 32, 1 << 32, 1])}}}'),
    "shape product overflows, then 0": header(f'{{"a": {tensor(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])}}}'),
    "shape of a million sizes": header(f'{{"a": {tensor(shape=[1] * 1_000_000)}}}'),
    "shape with huge integers": header(f'{{"a": {tensor(shape=[10**4000] * 500)}}}'),
    "negative shape": header(f'{{"a": {tensor(shape=[-1, -1])}}}'),
    "boolean shape": header(f'{{"a": {tensor(shape=[True])}}}'),
    "float shape": header(f'{{"a": {tensor(shape=[1.0])}}}'),
    "shape is a number": header(f'{{"a": {tensor(shape=1)}}}'),
    "unknown dtype": header(f'{{"a": {tensor(dtype="F31")}}}'),
    "dtype is a list": header(f'{{"a": {tensor(dtype=["F32"])}}}'),
    "six bits that fill no byte": header(f'{{"a": {tensor(dtype="F6_E2M3", shape=[5], offsets=[0, 4])}}}'),
    "duplicate tensor": header(f'{{"a": {ONE}, "a": {ONE}}}'),
    "duplicate field": header('{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    "missing field": header('{"a": {"dtype": "F32", "shape": [1]}}'),
    "tensor is a list": header('{"a": ["F32", [1], [0, 4]]}'),
    "metadata of numbers": header(f'{{"__metadata__": {{"a": 1}}, "a": {ONE}}}'),
    "metadata is a list": header(f'{{"__metadata__": [], "a": {ONE}}}'),
    "not UTF-8": header(b'{"\xff": 1}'),
    "half a surrogate pair": header(f'{{"\\ud800": {ONE}}}'),
    "a list": header("[]"),
    "100000 deep": header('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "9000 deep": header('{"a":' * 9_000 + "1" + "}" * 9_000),
    "ten million empty lists": header('{"a": [' + "[]," * 10_000_000 + "[]]}"),
    "ten million zeros": header('{"a": [' + "0," * 10_000_000 + "0]}"),
    "31 MB of one wide string": header('{"' + "\U0001f600" + "a" * 31_000_000 + '": 1}'),
    "101 MB of spaces": header(b"{}" + b" " * 101_000_000, data=b""),
}
# Folders whose index is hostile: each value goes into model.safetensors.index.json.
SHARD_NAMES = ("../x.safetensors", "/etc/passwd", "/x.safetensors", "a/../../x.safetensors", "x\0.safetensors")
SHARD_NAMES += ("", ".", "..")
SHARD_NAMES += ("..%2fx.safetensors", "~/x.safetensors", "C:\\x.safetensors", "model.bin", "x" * 300 + ".safetensors")
INDEXES: dict[str, bytes] = {
    f"shard {name[:30]!r}": json.dumps({"weight_map": {"a": name}}).encode() for name in SHARD_NAMES
}
INDEXES |= {
    "no weight_map": b"{}",
    "weight_map is a list": b'{"weight_map": ["a"]}',
    "weight_map is empty": b'{"weight_map": {}}',
    "shard is a number": b'{"weight_map": {"a": 7}}',
    "shard is a list": b'{"weight_map": {"a": [[["x"]]]}}',
    "missing shard": b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    "duplicate tensor": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "100000 shards": json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(100_000)}}).encode(),
    "100000 deep": b'{"weight_map":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "ten million lists": b'{"weight_map": [' + b"[]," * 10_000_000 + b"[]]}",
    "nothing": b"",
}


WEIGHTS = {f"header: {name}": ("model.safetensors", data) for name, data in HEADERS.items()}
WEIGHTS |= {f"index: {name}": ("model.safetensors.index.json", data) for name, data in INDEXES.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Outcome]:
    return opened("weights", tmp_path_factory.mktemp("weights"), WEIGHTS, "model.safetensors")


@pytest.mark.parametrize("name", [*WEIGHTS, *SPECIAL])
def test_hostile_weights_end_in_a_typed_error_in_time_and_memory(name, weights):
    assert_is_refused(weights[name], ("CheckpointError",), ".safetensors")


WATCH = """
import json, sys
from pathlib import Path
from localllm.errors import CheckpointError
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.families import llama, load_config
folder, seen, armed = Path(sys.argv[1]), [], []
names = ("open", "import", "exec", "compile", "pickle.find_class", "subprocess.Popen", "os.system", "socket.connect")
def hook(event, arguments):
    if armed and event in names and isinstance(arguments[0], str):
        seen.append([event, str(arguments[0])])
sys.addaudithook(hook)
armed.append(True)
load_config(folder)
try:
    Checkpoint.open(folder)
except CheckpointError as error:
    seen.append(["refused", error.why])
print(json.dumps(seen))
"""


def test_code_and_pickles_in_a_folder_are_neither_opened_nor_imported(tmp_path):
    raw = {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}, "trust_remote_code": True}
    raw["_attn_implementation_internal"] = "attacker/kernel"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w')"
    for name in ("evil.py", "configuration_llama.py", "sitecustomize.py", "__init__.py"):
        (tmp_path / name).write_text(trap)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    events = json.loads(done.stdout)
    assert [what for what in events if what[0] == "open"] == [["open", str(tmp_path / "config.json")]]
    assert [what[0] for what in events] == ["open", "refused"]
    assert "pytorch_model.bin" in events[-1][1] and "never opened" in events[-1][1]
    assert not (tmp_path / "sprung").exists()
