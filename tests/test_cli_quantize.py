"""`quantize`, `--weights`, and what `list`, `show` and `rm` know of packed weights: the command line's contract."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.output import Output
from localllm.cli.quantize import recipe_name
from localllm.hub import ModelFiles
from localllm.hub.locks import exclusive
from localllm.hub.names import TINY_DIRECTORY
from localllm.hub.packed import packed_directory, source_id
from localllm.models.families import load_config
from localllm.models.packed import PackedModel
from localllm.quant.recipe import RECIPES, recipe
from localllm.settings import WEIGHTS
from tests.cli_support import Result, fork_cli, run_cli, write_checkpoint, write_settings
from tests.patience import PATIENCE_S
from tests.thinning import every_other

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fetched(checkpoint: Path, tmp_path: Path) -> Path:
    """The snapshot of maker/model in the hub's folders."""
    folder = tmp_path / "hub" / "models--maker--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return shutil.copytree(checkpoint, folder / "snapshots" / COMMIT)


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A folder of this test's own."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return empty_cache


def place(model: Path, weights: str) -> Path:
    return packed_directory(ModelFiles(model, str(model)), weights)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files are there: another inode or time after everything that was written."""
    states = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (state.st_ino, state.st_mtime_ns) for name, state in states.items()}


def ask(model: Path | str, *arguments: str) -> Result:
    return run_cli("run", model, "-p", "the fox", "--max-tokens", "4", "--temperature", "0", *arguments)


def row_of(name: object) -> dict[str, object]:
    (row,) = (row for row in run_cli("list", "--json").json["models"] if row["name"] == str(name))
    return row


# quantize


def test_quantize_packs_and_says_where_and_how_large(model: Path) -> None:
    result = run_cli("quantize", model)
    assert result.code == 0
    size, out = size_of(place(model, "int4-g64")), result.out.decode()
    assert re.search(rf"packed.*int4-g64, {size / 1024:.1f} KiB, .*checkpoint of .* KiB", out)
    assert out.rstrip().endswith(str(place(model, "int4-g64")))
    assert f"packing {model} to int4-g64: 100% of" in result.err


def test_quantize_json_has_the_keys_of_the_contract(model: Path) -> None:
    answer = run_cli("quantize", model, "--weights", "int8", "--json").json
    directory = place(model, "int8")
    assert answer == {
        "schema_version": 1,
        "model": str(model),
        "weights": "int8",
        "was_packed": False,
        "directory": str(directory),
        "size_bytes": size_of(directory),
        "checkpoint_bytes": size_of(model),
    }
    assert run_cli("quantize", model, "--weights", "int8", "--json").json == {**answer, "was_packed": True}


def test_what_is_packed_already_is_said_and_not_written_again(model: Path) -> None:
    run_cli("quantize", model)
    before = files_in(place(model, "int4-g64"))
    again = run_cli(*["quantize", "--group", "64", "--method", "hqq"], model)
    assert again.code == 0 and again.err.startswith(f"{model} is packed to int4-g64 already")
    assert files_in(place(model, "int4-g64")) == before


def test_quantize_mends_a_block_that_was_damaged(model: Path) -> None:
    run_cli("quantize", model)
    text = ask(model, "--weights", "int4").out
    directory = place(model, "int4-g64")
    before, block = files_in(directory), directory / "layers.0.mlp.safetensors"
    data = bytearray(block.read_bytes())
    data[-5000] ^= 1
    block.write_bytes(data)
    refused = ask(model, "--weights", "int4")
    assert refused.code == 1
    mended = run_cli(*refused.error_lines[2].split()[2:])
    assert mended.code == 0 and b"and is mended: int4-g64" in mended.out
    kept = {name for name, state in files_in(directory).items() if before[name] == state}
    assert set(before) - kept == {block.name, "index.json"}
    assert ask(model, "--weights", "int4").out == text


@pytest.mark.parametrize(
    ("weights", "setting", "group", "method", "name"),
    [
        ("int4", "auto", 32, None, "int4-g32"),
        ("int4", "auto", 128, "rtn", "int4-g128-rtn"),
        (None, "auto", None, "rtn", "int4-g64-rtn"),
        ("int4-g32", "auto", None, None, "int4-g32"),
        ("int8", "int4", None, None, "int8"),
        (None, "nf4", None, None, "nf4"),
        (None, "bf16", None, None, "int4-g64"),
        (None, "int8", 32, None, "int4-g32"),
    ],
)
def test_the_flags_name_a_format(
    weights: str | None, setting: str, group: int | None, method: str | None, name: str
) -> None:
    assert recipe_name(weights, setting, group, method) == name and recipe(name).name == name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--weights bf16", "bf16 is not packed"),
        ("--weights fp32", "one of int8, int4, nf4"),
        ("--weights int5", "one of int8, int4, nf4"),
        ("--weights int8 --group 64", "--group and --weights int8"),
        ("--weights nf4 --method hqq", "--method and --weights nf4"),
        ("--weights int4-g32 --group 64", "--group and --weights int4-g32"),
        ("--group 48", "--group is 48"),
        ("--weights bf16 --group 48", "--group is 48"),
        ("--group 64.5", "--group"),
        ("--method gptq", "--method is 'gptq'"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(model: Path, cache: Path, line: str, expected: str) -> None:
    result = run_cli("quantize", model, *line.split())
    assert (result.code, result.out) == (2, b"") and len(result.error_lines) == 4
    assert expected in " ".join(result.error_lines)
    assert [path.name for path in cache.iterdir()] == ["kernels"]


def test_quantize_takes_the_format_of_the_settings(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_WEIGHTS", "int8")
    assert run_cli("quantize", model, "--json").json["weights"] == "int8"


def test_a_model_that_cannot_run_is_refused_before_anything_is_written(model: Path, cache: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert run_cli("quantize", model).error_lines[-1] == "more:  localllm help unsupported-model"
    assert [path.name for path in cache.iterdir()] == ["kernels"]


def test_an_interrupted_conversion_keeps_what_is_done_and_goes_on(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "large", hidden=1024, layers=6)
    with start(tmp_path, "quantize", model, "--json") as process:
        while b"40%" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert re.search(rb"what was packed is kept. To go on: localllm quantize \S+ --weights int4-g64\n$", err)
    directory = place(model, "int4-g64")
    done = files_in(directory)
    assert sum(name.endswith(".safetensors") for name in done) >= 3
    assert "index.json" not in done
    assert [(packed["weights"], packed["state"]) for packed in row_of(model)["packed"]] == [("int4-g64", "unfinished")]
    assert run_cli("quantize", model, "--json").json["was_packed"] is False
    finished = files_in(directory)
    assert all(finished[name] == state for name, state in done.items() if name in finished)
    assert not [name for name in finished if name.startswith(".")]


def test_a_conversion_by_another_process_is_waited_for(model: Path, tmp_path: Path) -> None:
    with exclusive(place(model, "int8"), lambda _: None):
        process = start(tmp_path, "quantize", model, "--weights", "int8", "--json")
        assert process.stderr.readline() == f"process {os.getpid()} is packing it; waiting for that\n".encode()
    with process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, json.loads(out)["was_packed"]) == (0, False)


def test_a_full_disk_is_exit_code_four_with_numbers(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "large", hidden=256)
    small_disk = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (200_000, 200_000))
    with start(tmp_path, "quantize", model, preexec_fn=small_disk) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (4, b"")
    assert re.search(rb"why: .*[\d.]+ \w+ more are needed, [\d.]+ \w+ are free", err)
    assert not list(tmp_path.rglob("*.tmp"))


def start(home: Path, *arguments: str | Path, **options: object) -> Any:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = {"LOCALLLM_CACHE": os.environ["LOCALLLM_CACHE"]}
    return fork_cli(home, *arguments, variables=variables, **streams, **options)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (100, "to int4-g128-rtn [###############    ]  80% 3.2 GiB/4.0 GiB 10.0 MiB/s 1:21 left"),
        (80, "to int4-g128-rtn  80% 3.2 GiB/4.0 GiB 10.0 MiB/s 1:21 left"),
        (70, "to int4-g128-rtn  80% 3.2 GiB/4.0 GiB 1:21 left"),
        (60, "to int4-g128-rtn [####  ]  80% 1:21 left"),
        (52, "to int4-g128-rtn  80% 1:21 left"),
    ],
)
def test_the_time_left_is_that_of_the_last_moments_and_has_its_place_on_a_narrow_terminal(
    columns: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stream = 1000.0, Tty()
    monkeypatch.setattr("localllm.cli.output.time.monotonic", lambda: now)
    monkeypatch.setattr("localllm.cli.output._columns", lambda _: columns)
    line = Output(None, stream, {"TERM": "xterm"}).progress("packing mistral-7b to int4-g128-rtn")
    mib, total = 1 << 20, 4096 << 20
    for done in (1000 * mib, 3000 * mib):  # what was there before is verified in no time
        line.update(done, total)
        now += 1
    for second in range(30):
        line.update((3000 + 10 * second) * mib, total)
        now += 1
    shown = stream.getvalue().rpartition("\x1b[2K")[2]
    assert len(shown) < columns and shown.endswith(expected)


def test_a_note_stands_above_what_is_drawn() -> None:
    stream = Tty()
    output = Output(None, stream, {"TERM": "xterm", "NO_COLOR": "1"})
    line = output.progress("loading tiny")
    line.show("loading tiny ...")
    output.note("GET /v1/models 200")
    output.warn("a second one")
    line.clear()
    output.note("serving tiny")
    drawn = ["", "loading tiny ...", "GET /v1/models 200\nloading tiny ...", "warning: a second one\nloading tiny ..."]
    assert stream.getvalue().split("\r\x1b[2K") == [*drawn, "serving tiny\n"]


# --weights


def test_every_format_of_the_settings_is_a_recipe_and_the_other_way_round() -> None:
    assert {recipe(name).name for name in WEIGHTS if name not in ("auto", "kept")} == set(RECIPES) - {"fp32"}


@pytest.mark.parametrize("weights", every_other(["int8", "nf4", "int4", "int4-g32", "int4-g64-rtn", "int4-g128"]))
def test_a_first_use_packs_and_says_so_and_a_second_one_is_silent(model: Path, cache: Path, weights: str) -> None:
    first = ask(model, "--weights", weights)
    assert first.code == 0
    assert re.fullmatch(rf"packing {model} to {weights}, once: [\d.]+ KiB in {cache}/packed\n", first.err)
    again = ask(model, "--weights", weights)
    assert (again.err, again.out) == ("", first.out)
    assert [packed["weights"] for packed in row_of(model)["packed"]] == [recipe(weights).name]


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_a_small_model_is_read_as_it_is_unless_asked(model: Path, cache: Path, weights: str) -> None:
    result = ask(model, "--weights", weights)
    assert (result.code, result.err) == (0, "")
    assert not (cache / "packed").exists()


@pytest.mark.parametrize("weights", every_other(["bf16", "int8", "int4", "nf4", "int4-g32"]))
def test_the_built_in_model_runs_in_every_format(weights: str) -> None:
    if not (TINY_DIRECTORY / "model.safetensors").is_file():
        pytest.skip("localllm/tiny has no weights yet: python -m tools.train_tiny")
    before = files_in(TINY_DIRECTORY)
    assert len(ask("tiny", "--weights", weights, "--json").json["token_ids"]) == 4
    assert files_in(TINY_DIRECTORY) == before


def test_chat_and_perplexity_use_the_format_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("once upon a time there was a fox " * 4)
    line = ("perplexity", model, "-f", tmp_path / "text", "--json", "--weights")
    measured = {weights: run_cli(*line, weights).json["nll"] for weights in ("bf16", "int8", "int4-g64-rtn")}
    assert len(set(measured.values())) == 3 and abs(measured["int8"] - measured["bf16"]) < 0.05
    chat = run_cli("chat", model, "--plain", "--weights", "nf4", "--max-tokens", "2", stdin=b"the fox\n")
    assert chat.code == 0 and f"packing {model} to nf4, once" in chat.err


def test_the_format_can_be_a_setting(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(tmp_path, 'weights = "int8"\n')
    assert f"packing {model} to int8, once" in ask(model).err
    monkeypatch.setenv("LOCALLLM_WEIGHTS", "int4-g128")
    setting = run_cli("config", "show", "--json").json["settings"]["weights"]
    assert setting == {"value": "int4-g128", "origin": "LOCALLLM_WEIGHTS"}
    assert f"packing {model} to int4-g128, once" in ask(model).err
    assert f"packing {model} to nf4, once" in ask(model, "--weights", "nf4").err


@pytest.mark.parametrize("weights", ["fp32", "int3", "INT4", "", "../x"])
def test_an_unknown_format_is_refused_with_the_known_ones(model: Path, cache: Path, weights: str) -> None:
    result = ask(model, "--weights", weights)
    assert (result.code, result.out) == (2, b"")
    assert "one of auto, bf16, int8, int4, nf4, bf12, kept, int4-g32" in " ".join(result.error_lines)
    assert re.fullmatch(r"fix:   localllm run .* --weights \S+", result.error_lines[2])
    assert [path.name for path in cache.iterdir()] == ["kernels"]


def test_a_checkpoint_that_has_changed_is_packed_anew(model: Path) -> None:
    ask(model, "--weights", "int8")
    state = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))
    assert f"packing {model} to int8, once" in ask(model, "--weights", "int8").err
    assert [packed["state"] for packed in row_of(model)["packed"]] in (["whole", "orphan"], ["orphan", "whole"])


def test_ctrl_c_during_a_first_use_leaves_and_keeps_what_is_done(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "large", hidden=1024, layers=6)
    with start(tmp_path, "run", model, "-p", "the fox", "--weights", "int4") as process:
        assert b"packing" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert err.decode() == "interrupted; what was packed is kept. To go on: the same command\n"
    assert not (place(model, "int4-g64") / "index.json").exists()


# list, show, rm


def test_list_and_show_have_what_is_packed(model: Path) -> None:
    sizes = [run_cli("quantize", model, "--weights", name, "--json").json["size_bytes"] for name in ("int4", "int8")]
    (place(model, "int8") / "index.json").unlink()
    row = row_of(model)
    assert (row["state"], row["directory"]) == ("folder", str(model))
    assert row["packed"] == run_cli("show", model, "--json").json["packed"]
    packed = row["packed"]
    assert [(each["weights"], each["state"]) for each in packed] == [("int4-g64", "whole"), ("int8", "unfinished")]
    assert (packed[0]["size_bytes"], packed[0]["directory"]) == (sizes[0], str(place(model, "int4-g64")))
    assert re.search(r"int4-g64 \d+\.\d KiB, int8 \d+\.\d KiB \(unfinished\)", run_cli("list").out.decode())
    assert re.search(r"^packed +int4-g64 .* in /.*\npacked +int8 ", run_cli("show", model).out.decode(), re.MULTILINE)


def test_packed_weights_of_a_folder_that_is_gone_are_listed_and_freed(model: Path, cache: Path) -> None:
    size = run_cli("quantize", model, "--json").json["size_bytes"]
    shutil.rmtree(model)
    assert row_of(model)["state"] == "orphan"
    assert "localllm rm NAME --packed" in run_cli("list").err
    assert run_cli("rm", model, "--yes", "--json").json["freed_bytes"] == size
    assert list((cache / "packed").iterdir()) == []


def test_rm_packed_frees_and_leaves_the_folder_as_it_was(model: Path) -> None:
    before = files_in(model)
    size = run_cli("quantize", model, "--json").json["size_bytes"]
    assert run_cli("rm", model, "--yes").code == 2
    removed = run_cli("rm", model, "--packed", "--yes")
    assert removed.out.decode() == f"removed what was packed of {model}: {size / 1024:.1f} KiB freed\n"
    assert files_in(model) == before and run_cli("rm", model, "--packed", "--yes").code == 3


def test_rm_packed_asks_and_without_a_terminal_says_how_not_to_be_asked(model: Path) -> None:
    run_cli("quantize", model)
    refused = run_cli("rm", model, "--packed")
    assert refused.code == 2 and f"fix:   localllm rm {model} --packed --yes" in refused.err
    assert place(model, "int4-g64").is_dir()


def test_rm_does_not_ask_about_a_folder_that_it_leaves_alone(model: Path) -> None:
    assert f"{model}, a folder of yours, is not removed" in run_cli("rm", model).err
    run_cli("quantize", model)
    assert f"fix:   localllm rm {model} --packed" in run_cli("rm", model).err


def test_a_full_disk_is_no_reason_to_delete_the_model_that_is_packed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.models.convert.free_bytes", lambda _: 0)
    result = run_cli("quantize", model)
    assert result.code == 4
    assert "localllm list" in result.error_lines[2] and str(model) not in result.error_lines[2]


@pytest.mark.parametrize("state", ["unfinished", "of another revision", "a link"])
def test_rm_asks_about_all_that_it_would_delete(tmp_path: Path, fetched: Path, state: str) -> None:
    folder = fetched.parent.parent
    if state == "of another revision":
        (folder / "refs" / "main").rename(folder / "refs" / "v2")
    if state == "unfinished":
        (fetched / "tokenizer.json").unlink()
    if state == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    result = run_cli("rm", "maker/model")
    assert (result.code, result.error_lines[2]) == (2, "fix:   localllm rm maker/model --yes")
    assert (folder / "refs").is_dir()


def test_rm_of_a_fetched_model_frees_its_packed_weights_and_counts_them(fetched: Path) -> None:
    assert ask("maker/model", "--weights", "int8").code == 0
    packed = run_cli("quantize", "maker/model", "--weights", "int8", "--json").json
    assert packed["was_packed"] is True
    assert packed["directory"].endswith(f"/packed/hub/maker/model/@{COMMIT}/int8")
    assert row_of("maker/model")["packed"][0]["size_bytes"] == packed["size_bytes"]
    unasked = run_cli("rm", "maker/model")
    assert (unasked.code, unasked.error_lines[2]) == (2, "fix:   localllm rm maker/model --yes")
    own = size_of(fetched) + len(COMMIT)
    (fetched / "config.json").rename(fetched / "kept.json")
    (fetched / "config.json").write_text("{")
    assert "fix:   localllm rm maker/model && localllm pull maker/model" in run_cli("quantize", "maker/model").err
    (fetched / "kept.json").rename(fetched / "config.json")
    assert run_cli("rm", "maker/model", "--yes", "--json").json["freed_bytes"] == own + packed["size_bytes"]
    assert "maker/model" not in run_cli("list", "--json").out.decode()
    assert not Path(packed["directory"]).exists()


def test_rm_while_another_process_packs_is_refused(model: Path) -> None:
    run_cli("quantize", model)
    with exclusive(place(model, "int4-g64"), lambda _: None):
        refused = run_cli("rm", model, "--packed", "--yes")
    assert (refused.code, len(refused.error_lines)) == (1, 4)
    assert f"process {os.getpid()} is packing it" in refused.err and ask(model, "--weights", "int4").err == ""


def test_rm_while_another_process_loads_is_refused(model: Path) -> None:
    run_cli("quantize", model)
    files, weights = ModelFiles(model, str(model)), recipe("int4")
    with PackedModel.open(place(model, "int4-g64"), load_config(model), weights, source_id(files)):
        refused = run_cli("rm", model, "--packed", "--yes")
    assert (refused.code, len(refused.error_lines)) == (1, 4)
    assert "another process is reading it" in refused.err
    assert run_cli("rm", model, "--packed", "--yes").code == 0
