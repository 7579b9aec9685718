"""`localllm bench` as a command: its JSON, its table, its refusals, and two results side by side."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localllm.bench import target
from localllm.bench.report import BenchmarkReport, BenchmarkRun, MachineFloors, Spread, read_report
from localllm.bench.workload import Workload
from localllm.errors import ContextOverflowError, UsageError
from localllm.models.shapes import find_shape
from localllm.offload.measurements import roofline as floors
from localllm.offload.planner.machine import Memory
from tests.cli_support import Result, fork_cli, run_cli, write_checkpoint
from tests.conftest import REPOSITORY
from tests.patience import PATIENCE_S
from tests.test_imports import HEAVY, loaded_by
from tests.thinning import every_other

QUICK = ("--prompt-tokens", "12", "--gen-tokens", "4", "--rounds", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def small_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("localllm.bench.run.DISK_BYTES", 16 << 20)
    monkeypatch.setattr(floors, "MATMUL_SHAPE", (16, 64, 64))


def no_network(*_arguments: Any) -> None:
    raise AssertionError("bench went to the network")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_machine: Callable[[Path], None]) -> Path:
    for name in [name for name in os.environ if name.startswith(("LOCALLLM_", "HF_")) and name != "LOCALLLM_TEST_DATA"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    known_machine(tmp_path / "cache")
    return tmp_path


@pytest.fixture
def shape_folder(home: Path) -> Path:
    return write_checkpoint(home / "shape", hidden=64, layers=1)


@pytest.fixture
def report() -> BenchmarkReport:
    one = Spread(1.0, 1.0, 1.0)
    found = MachineFloors(40.0, 3.5, None, None, 900.0, "O_DIRECT", {"dram_read_gbs": one})
    rates = (Spread(100.0, 90.0, 110.0), Spread(20.0, 10.0, 40.0), Spread(0.2, 0.1, 0.3))
    figures = (16, 8, 16, *rates, 10**9, 0.9, 2 << 30, None, one, 0.5)
    run = BenchmarkRun("tiny", "int4-g64", "int8", *figures, random_weights=True, rounds=5)
    return BenchmarkReport(1, {"cpu": "abacus", "threads": 1, "gpu": None}, found, (run,))


@pytest.fixture
def fields(report: BenchmarkReport) -> Any:
    return json.loads(json.dumps(asdict(report)))


@pytest.fixture
def result(home: Path, fields: Any) -> Path:
    """A result's file."""
    return written(home / "a.json", fields)


def written(path: Path, fields: Any) -> Path:
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def bench(*arguments: str | Path) -> Result:
    return run_cli("bench", *arguments)


def test_json_is_one_object_with_these_keys_first(shape_folder: Path) -> None:
    """At any depth, as random weights were trained for none."""
    contexts = ("--context", "3", "--context", "3000")
    outcome = bench(shape_folder, "--random-weights", "--weights", "int4", *QUICK, *contexts, "--json")
    assert outcome.code == 0, outcome.err
    assert "round 2 of 2" in outcome.err and b"round" not in outcome.out.split(b"{")[0]
    assert list(outcome.json) == ["schema_version", "machine", "floors", "runs"]
    floors_keys = ["dram_read_gbs", "disk_read_gbs", "device_copy_gbs", "h2d_gbs"]
    assert list(outcome.json["floors"])[:4] == floors_keys
    assert [outcome.json["floors"][key] is None for key in floors_keys] == [False, False, True, True]
    first, second = outcome.json["runs"]
    assert list(first)[:13] == [
        "model", "weights", "kv", "prompt_tokens", "gen_tokens", "context", "prefill_tok_s", "decode_tok_s", "ttft_s",
        "bytes_per_token", "floor_fraction", "peak_rss_bytes", "peak_vram_bytes",
    ]  # fmt: skip
    for rate in ("prefill_tok_s", "decode_tok_s", "ttft_s"):
        assert 0 < first[rate]["min"] <= first[rate]["median"] <= first[rate]["max"]
    assert (first["weights"], first["kv"], first["peak_vram_bytes"]) == ("int4-g64", "bf16", None)
    assert (first["context"], second["context"]) == (3, 3000)
    assert first["bytes_per_token"] < second["bytes_per_token"]
    assert outcome.json["schema_version"] == 1


def test_the_table_has_each_figure_beside_its_floor(shape_folder: Path) -> None:
    outcome = bench(shape_folder, "--random-weights", *QUICK, "--rounds", "1")
    lines = outcome.out.decode().splitlines()
    assert outcome.code == 0, outcome.err
    for words in ("prefill of 12", "bf16 product", "decode at 12", "bytes of a token", "DRAM read", "peak RAM",
                  "disk read"):  # fmt: skip
        assert any(words in line for line in lines), words
    assert lines[1] == "one round" and max(map(len, lines[1:])) <= 80


def test_a_cap_from_the_settings_is_said_not_to_apply_to_random_weights(
    shape_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_RAM", "4GiB")
    outcome = bench(shape_folder, "--random-weights", *QUICK, "--rounds", "1")
    assert outcome.code == 0 and "do not apply to random weights" in outcome.err


def test_what_the_settings_say_of_long_texts_is_not_measured(
    shape_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_KV_EVICT", "heavy:192")
    monkeypatch.setenv("LOCALLLM_REUSE", "chunks")  # which contradict each other, and would be refused
    assert bench(shape_folder, *QUICK, "--rounds", "1").code == 0


def test_an_installed_model_is_measured_as_it_runs(shape_folder: Path) -> None:
    outcome = bench(shape_folder, "--weights", "bf16", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    (run,) = outcome.json["runs"]
    assert (run["weights"], run["random_weights"]) == ("bf16", False)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("mistrl-7b --random-weights", 3, "mistral-7b"),
        ("--gen-tokens 0", 2, "--gen-tokens is 0"),
        ("--prompt-tokens 0", 2, "--prompt-tokens is 0"),
        ("--rounds 0", 2, "--rounds is 0"),
        ("--context -1", 2, "--context is -1"),
        (f"--context 1{'0' * 400} --random-weights", 2, "--context is 1000"),
        (f"--prompt-tokens 1{'0' * 400} --random-weights", 2, "--prompt-tokens is 1000"),
        (f"--gen-tokens 1{'0' * 400} --random-weights", 2, "--gen-tokens is 1000"),
        ("--threads 0", 2, "threads is 0"),
        ("--weights int5", 2, "weights is 'int5'"),
        ("--device tpu", 2, "tpu"),
        ("--random-weights --ram 4GiB", 2, "--random-weights and --ram"),
        ("--random-weights --vram 4GiB --device cuda", 2, "--random-weights and --vram"),
        ("tiny --prompt-tokens 5000", 5, "its context is 1024 tokens"),
        ("tiny --context 1000", 5, "128 tokens behind 1000 others are too many for tiny"),
        ("mistral-7b", 3, "localllm pull mistral-7b"),
        ("--compare a.json", 2, "--compare"),
        ("--compare a.json b.json --json", 2, "--compare and --json"),
        ("--compare a.json b.json --context 3", 2, "--compare and --context"),
        ("tiny --compare a.json b.json", 2, "--compare and MODEL"),
        ("--compare a.json b.json", 2, "cannot read 'a.json'"),
    ],
)
def test_bad_input_is_refused_at_the_door(home: Path, line: str, code: int, words: str) -> None:
    outcome = bench(*line.split())
    assert (outcome.code, outcome.out) == (code, b"") and words in " ".join(outcome.error_lines)
    assert len(outcome.error_lines) == 4 and "reading the disk" not in outcome.err


@pytest.mark.parametrize(
    ("flags", "code"),
    [("--vram 4GiB", 2), ("--vram 4GiB --device cpu", 2), ("--ram 900GiB", 2), ("--ram 16MiB", 4), ("--ram 50%", 2)],
)
def test_a_cap_that_cannot_be_kept_is_refused_before_the_disk_is_touched(
    home: Path, shape_folder: Path, flags: str, code: int
) -> None:
    outcome = bench(shape_folder, "--weights=int4", *flags.split(), *QUICK[:-2])
    assert (outcome.code, len(outcome.error_lines)) == (code, 4)
    assert "reading the disk" not in outcome.err
    assert not [path for path in (home / "cache").rglob("*") if path.suffix == ".safetensors"]


def test_what_is_refused_without_a_gpu_by_name_needs_no_torch(home: Path) -> None:
    line = ["localllm", "bench", "--vram", "4GiB", "--device", "cpu"]
    code = f"import sys; sys.argv = {line}; from localllm.cli.dispatch import dispatch"
    code += "; from localllm.cli.interrupts import Interrupts; assert dispatch(sys.argv[1:], Interrupts()) == 2"
    assert "torch" not in loaded_by(code, home)


def test_a_device_that_is_not_there_is_refused_with_the_line_that_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench("--device", "cuda", "--rounds", "1").error_lines[2] == "fix:   localllm bench --rounds 1 --device cpu"


@pytest.mark.parametrize(("prompt_tokens", "gen_tokens"), [(1023, 1), (5000, 100), (100, 5000), (100, 1023)])
def test_what_a_refusal_proposes_is_accepted(prompt_tokens: int, gen_tokens: int) -> None:
    config = find_shape("tiny").config
    with pytest.raises(ContextOverflowError) as caught:
        Workload(prompt_tokens, gen_tokens, (prompt_tokens,), 5).check("tiny", config)
    flag, value = caught.value.fix.split()
    given = {"--prompt-tokens": prompt_tokens, "--gen-tokens": gen_tokens, flag: int(value)}
    context = given.get("--context", given["--prompt-tokens"])
    Workload(given["--prompt-tokens"], given["--gen-tokens"], (context,), 5).check("tiny", config)


@pytest.mark.parametrize(("free_gib", "fix"), [(6, "--weights int4"), (1, "localllm list --all")])
def test_a_model_that_does_not_fit_is_refused_before_anything_is_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, fix: str
) -> None:
    monkeypatch.setattr(target, "available_bytes", lambda _device: free_gib << 30)
    outcome = bench("mistral-7b", "--random-weights", "--weights", "int8", *QUICK)
    assert outcome.code == 4 and "weights 6.76 GiB (int8)" in outcome.err
    assert fix in outcome.error_lines[2] and "reading the disk" not in outcome.err


def test_an_interrupt_leaves_cleanly(tmp_path: Path) -> None:
    child = fork_cli(tmp_path, "bench", "--random-weights", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert any(b"reading the disk" in line for line in child.stderr)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (130, b"")
    kept = tmp_path / "cache" / "kernels"  # compiled, for the next command
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != kept]


@pytest.mark.parametrize("line", [["bench", "--help"], ["bench", "--compare", "{path}", "{path}"]], ids=" ".join)
def test_what_measures_nothing_loads_nothing_heavy(line: list[str], result: Path) -> None:
    arguments = [word.format(path=result) for word in line]
    loaded = loaded_by(f"sys.argv = ['localllm', *{arguments}]; from localllm.cli import main; main()", result.parent)
    assert "localllm" in loaded
    assert not loaded & (HEAVY - {"pydantic"})  # which typer reads typed values with


# Comparison


def test_two_results_stand_side_by_side(result: Path, fields: dict[str, Any]) -> None:
    run = fields["runs"][0]
    run["decode_tok_s"] = {"median": 30.0, "min": 30.0, "max": 30.0}
    run["prefill_tok_s"] = {"median": 12345.6, "min": 9999.6, "max": 2e6}
    outcome = bench("--compare", result, written(result.parent / "second.json", fields))
    lines = outcome.out.decode().splitlines()
    assert outcome.code == 0, outcome.err
    assert [line[:3] for line in lines[:2]] == ["A: ", "B: "]
    rows = {line[:28].strip(): line[28:].split("  ") for line in lines[2:]}
    assert [cell.strip() for cell in rows["decode, tok/s"] if cell] == ["20 (10 to 40)", "30 (30 to 30)", "1.50"]
    assert "12300 (10000 to 2000000)" in "  ".join(rows["prefill, tok/s"])
    assert all(len(line) <= 80 for line in lines[2:])


def test_a_published_result_can_be_compared(home: Path) -> None:
    published = REPOSITORY / "benchmarks" / "results" / "bench_mistral-7b.json"
    outcome = bench("--compare", published, published)
    assert outcome.code == 0, outcome.err
    assert b"1.00" in outcome.out


def test_contexts_stand_side_by_side_whatever_their_order(home: Path, fields: dict[str, Any]) -> None:
    run = fields["runs"][0]
    deep = {**run, "context": 99, "bytes_per_token": 5 * 10**9}
    a = written(home / "a", {**fields, "runs": [run, deep]})
    b = written(home / "b", {**fields, "runs": [{**deep, "weights": "int8"}]})
    outcome = bench("--compare", a, b)
    lines = outcome.out.decode().splitlines()
    assert outcome.code == 0, outcome.err
    assert "tiny in int4-g64" in lines[0] and "tiny in int8" in lines[1]
    contexts = [line for line in lines if line.startswith("at ")]
    bytes_read = [line.split()[-3:] for line in lines if "bytes a token" in line]
    assert contexts == ["at 16", "at 99"]
    assert bytes_read == [["1", "-", "-"], ["5", "5", "1.00"]]


NAN_FLOORS = dict.fromkeys(("dram_read_gbs", "disk_read_gbs", "device_copy_gbs", "h2d_gbs"), float("nan"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"floors": None}, "floors"),
        ({"floors": {"dram_read_gbs": 1}}, "floors.disk_read_gbs"),
        ({"floors": NAN_FLOORS}, "floors.dram_read_gbs"),
        ({"runs": []}, "runs"),
        ({"runs": ["a"]}, "runs.0"),
        ({"run": {"model": 3}}, "runs.0.model"),
        ({"run": {"context": -1}}, "runs.0.context"),
        ({"run": {"peak_rss_bytes": 10**400}}, "runs.0.peak_rss_bytes"),
        ({"run": {"decode_tok_s": 3}}, "runs.0.decode_tok_s"),
        ({"run": {"decode_tok_s": {"median": 1, "min": 9, "max": 1}}}, "runs.0.decode_tok_s"),
    ],
    ids=str,
)
def test_a_file_of_another_form_is_refused_by_name(
    result: Path, fields: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    change = dict(change)
    fields["runs"][0] |= change.pop("run", {})
    other = written(result.parent / "other.json", fields | change)
    outcome = bench("--compare", result, other)
    assert (outcome.code, outcome.out) == (2, b"") and str(other) in outcome.error_lines[0]
    assert words in outcome.error_lines[1]


def test_a_file_with_two_runs_of_one_context_is_refused(result: Path, fields: dict[str, Any]) -> None:
    other = written(result.parent / "other.json", {**fields, "runs": [*fields["runs"], *fields["runs"]]})
    outcome = bench("--compare", result, other)
    assert outcome.code == 2 and "same context" in outcome.error_lines[1]


def test_what_a_refused_comparison_proposes_names_its_files(home: Path) -> None:
    for typed in ("--json", "tiny"):
        fix = bench("--compare", "a b.json", "c.json", typed).error_lines[2]
        assert fix == "fix:   localllm bench --compare 'a b.json' c.json"


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "[" * 100_000, '{"schema_version": 1}'])
def test_what_is_no_result_is_refused(home: Path, text: str) -> None:
    with pytest.raises(UsageError, match="is not a result"):
        read_report(written(home / "other.json", text))


# Caps, and what a run says of itself


def test_under_a_cap_what_a_step_reads_from_the_disk_stands_beside_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(home / "shape", hidden=64, layers=4)

    def memory(*_: object, packs: bool) -> Memory:
        """Enough to pack it, and less than it takes to run from memory."""
        return Memory(1 << 30 if packs else 180_000, 0, 1 << 30)

    monkeypatch.setattr("localllm.engine.planner.process_memory", memory)
    outcome = bench(folder, "--weights", "int4", "--ram", "3GiB", *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    run = outcome.json["runs"][0]
    assert run["streamed_bytes"] > 0 and run["disk_fraction"] > 0


def test_under_a_cap_that_is_too_small_the_error_names_the_model(home: Path, shape_folder: Path) -> None:
    outcome = bench(shape_folder, "--weights", "int4", "--ram", "16MiB", *QUICK)
    assert outcome.code == 4
    assert outcome.error_lines[0].startswith(f"error: {shape_folder} cannot be packed in 16.0 MiB")


@pytest.mark.parametrize("kv", every_other(["int4", "bf16"]))
def test_the_format_of_keys_and_values_is_the_one_that_was_measured(kv: str) -> None:
    assert [run["kv"] for run in bench("tiny", "--kv", kv, *QUICK, "--json").json["runs"]] == [kv]
