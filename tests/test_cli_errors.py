"""Lines that cannot be honoured: four lines on stderr, an exit code, and a fix that can be pasted."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli_support import REPOSITORY, ask, run_cli, write_settings
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("own_folders")


# Bad lines

BAD_LINES = {
    "no command": (["hlp"], 2, "help"),
    "unknown flag": (["run", "--debgu"], 2, "--debgu"),
    "unknown model": (["run", "mistrl-7b"], 3, "mistral-7b"),
    "one word": (["run", "hello"], 3, "--prompt=hello"),
    "absent model": (["run", "mistral-7b", "-p", "x"], 3, "localllm pull mistral-7b"),
    "no prompt": (["run", "MODEL"], 2, "localllm run"),
    "prompt twice": (["run", "MODEL", "x", "-p", "y"], 2, "-p/--prompt"),
    "json and jsonl": (["run", "MODEL", "--json", "--jsonl", "-p", "x"], 2, "--json and --jsonl"),
    "jsonl unstreamed": (["run", "MODEL", "--jsonl", "--no-stream", "-p", "x"], 2, "--no-stream"),
    "raw system": (["run", "MODEL", "--raw", "-s", "s", "-p", "x"], 2, "--raw and --system"),
    "raw messages": (["run", "MODEL", "--raw", "--messages", "m.json"], 2, "--raw and --messages"),
    "messages and prompt": (["run", "MODEL", "--messages", "m.json", "-p", "x"], 2, "--messages and --prompt"),
    "messages and argument": (["run", "MODEL", "x", "--messages", "m.json"], 2, "--messages and a prompt"),
    "logprobs for nobody": (["run", "MODEL", "--logprobs", "2", "-p", "x"], 2, "--json"),
    "show and json": (["run", "MODEL", "--show-prompt", "--json", "-p", "x"], 2, "--show-prompt and --json"),
    "temperature": (["run", "MODEL", "-p", "x", "--temperature", "-1"], 2, "temperature"),
    "temperature nan": (["run", "MODEL", "-p", "x", "--temperature", "nan"], 2, "temperature"),
    "top p": (["run", "MODEL", "-p", "x", "--top-p", "1.5"], 2, "--top-p is 1.5"),
    "no number": (["run", "MODEL", "-p", "x", "--top-k", "many"], 2, "--top-k"),
    "no tokens": (["run", "MODEL", "-p", "x", "--max-tokens", "0"], 2, "--max-tokens is 0"),
    "empty stop": (["run", "MODEL", "-p", "x", "--stop", ""], 2, "stop"),
    "bias": (["run", "MODEL", "-p", "x", "--logit-bias", "a=b"], 2, "--logit-bias"),
    "bias of no token": (["run", "MODEL", "-p", "x", "--logit-bias", "99999=1"], 2, "99999"),
    "device": (["run", "MODEL", "-p", "x", "--device", "tpu"], 2, "--device"),
    "dtype": (["run", "MODEL", "-p", "x", "--dtype", "fp8"], 2, "--dtype"),
    "threads": (["run", "MODEL", "-p", "x", "--threads", "0"], 2, "threads"),
    "context": (["run", "MODEL", "-p", "x", "--ctx", "100000"], 2, "100000"),
    "overflow": (["run", "MODEL", "-p", "x " * 300, "--ctx", "64"], 5, "64"),
    "absent file": (["run", "MODEL", "-f", "nowhere.txt", "-p", "x"], 2, "nowhere.txt"),
    "a folder as file": (["run", "MODEL", "-f", "/", "-p", "x"], 2, "'/'"),
    "binary file": (["run", "MODEL", "-f", "BINARY", "-p", "x"], 2, "binary"),
    "endless file": (["run", "MODEL", "-f", "/dev/zero", "-p", "x"], 2, "too large"),
    "messages no json": (["run", "MODEL", "--messages", "LATIN"], 2, "--messages"),
    "messages and prompt of blanks": (["run", "two words", "--messages", "m.json"], 2, "--messages and a prompt"),
    "messages empty": (["run", "MODEL", "--messages", "NONE"], 2, "no messages"),
    "messages empty in an object": (["run", "MODEL", "--messages", "NONE OBJECT"], 2, "no messages"),
    "a message alone": (["run", "MODEL", "--messages", "ALONE"], 2, "[{...}]"),
    "prompt empty": (["run", "MODEL", ""], 2, "there is no prompt"),
    "prompt empty and no model": (["run", ""], 2, "there is no prompt"),
    "prompt blank": (["run", "MODEL", "-p", " \n"], 2, "it is blank"),
    "prompt file empty": (["run", "MODEL", "-f", "EMPTY"], 2, "there is no prompt"),
    "raw prompt empty": (["run", "MODEL", "--raw", "-p", ""], 2, "there is no prompt"),
    "prompts": (["run", "MODEL", "-p", "a", "-p", "b"], 2, "more than once"),
    "no offline run": (["run", "MODEL", "--offline", "-p", "x"], 2, "fix:   localllm run --help"),
    "dry base for nobody": (["run", "MODEL", "-p", "x", "--dry-base", "2"], 2, "--dry-base needs --dry-multiplier"),
    "dry length, dry off": (
        ["chat", "MODEL", "--plain", "--dry-multiplier", "0", "--dry-allowed-length", "2"],
        2,
        "--dry-allowed-length needs --dry-multiplier",
    ),
    "show and stats": (["run", "MODEL", "--show-prompt", "--stats", "-p", "x"], 2, "--show-prompt and --stats"),
    "show unstreamed": (["run", "MODEL", "--show-prompt", "--no-stream", "-p", "x"], 2, "--show-prompt and --no"),
    "show logprobs": (["run", "MODEL", "--show-prompt", "--logprobs", "1", "-p", "x"], 2, "--show-prompt and --log"),
    "seed": (["run", "MODEL", "-p", "x", "--seed", "-1"], 2, "from 0 to 9223372036854775807"),
    "a GGUF file cut short": (["run", "GGUF.gguf", "-p", "x"], 1, "GGUF.gguf is cut short"),
    "a folder of a GGUF file cut short": (["run", "FOLDER", "-p", "x"], 1, "model.gguf is cut short"),
    "messages wrong": (["run", "MODEL", "--messages", "NUMBER"], 2, "messages"),
    "prompt no text": (["run", "MODEL", "-p", "\udcff"], 2, "UTF-8"),
    "a folder without model": (["run", "/", "-p", "x"], 3, "config.json"),
    "perplexity without text": (["perplexity", "MODEL"], 2, "--file"),
    "perplexity of nothing": (["perplexity", "MODEL", "--file", "EMPTY"], 2, "nothing to predict"),
    "rm absent": (["rm", "mistral-7b"], 3, "mistral-7b"),
    "rm built in": (["rm", "tiny", "--yes"], 2, "built-in"),
    "pull offline": (["pull", "mistral-7b", "--offline"], 3, "offline"),
    "show nothing": (["show", "no-such-thing"], 3, "no-such-thing"),
    "help nothing": (["help", "nope"], 2, "nope"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_ends_with_four_lines_and_its_exit_code(name: str, model: Path, tmp_path: Path) -> None:
    files = {
        "BINARY": b"\x7fELF\0\1",
        "LATIN": "é".encode("latin-1"),
        "NUMBER": b"3",
        "EMPTY": b"",
        "NONE": b"[]",
        "NONE OBJECT": b'{"messages": []}',
        "ALONE": b'{"role": "user", "content": "hi"}',
        "GGUF.gguf": b"GGUF",
        "FOLDER/model.gguf": b"GGUF",
    }
    (tmp_path / "FOLDER").mkdir()
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    arguments, code, word = BAD_LINES[name]
    places = {"MODEL": str(model), **{file: str(tmp_path / file) for file in [*files, "FOLDER"]}}
    result = run_cli(*(places.get(argument, argument) for argument in arguments))
    assert (result.code, result.out) == (code, b"")
    said = [line.split(":")[0] for line in result.err.splitlines()]
    assert [begin for begin in said if begin != "or"] == ["error", "why", "fix", "more"]  # or: another fix
    assert word in result.err


def test_a_settings_file_with_an_unknown_key_is_an_error_that_names_the_nearest(model: Path, tmp_path: Path) -> None:
    write_settings(tmp_path, "temprature = 1\n")
    result = ask(model)
    assert result.code == 2 and "temperature" in result.err


def test_control_characters_of_a_name_reach_neither_line_nor_terminal(model: Path) -> None:
    result = run_cli("run", "evil\x1b[31mname\x9b", "-p", "x")
    assert result.code == 3 and not re.search(r"[\x1b\x9b]", result.err)
    assert len(result.err.splitlines()) == 4


def test_an_unforeseen_exception_is_called_a_bug_and_shows_no_traceback(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.hub.locate", lambda *_, **__: 1 / 0)
    result = ask(model)
    assert result.code == 1
    assert result.error_lines[0] == "error: this is a bug in localllm: ZeroDivisionError"
    assert "--debug" in result.error_lines[2] and "Traceback" not in result.err
    assert "Traceback" in ask(model, "--debug").err


# Fixes

RUN = "localllm run MODEL -p x"


@pytest.mark.parametrize(
    ("arguments", "stdin", "fix"),
    [
        (["run", "tinyy", "A fox"], b"", "localllm run tiny 'A fox'"),
        (["run", "tinyy"], b"", "localllm run tiny\nor:    localllm run --prompt=tinyy"),
        (
            ["run", "--stats", "--max-tokens", "3", "tinyy"],
            b"",
            "localllm run --stats --max-tokens 3 tiny\nor:    localllm run --stats --max-tokens 3 --prompt=tinyy",
        ),
        (["run", "tinyy", "-p", "tinyy"], b"", "localllm run tiny -p tinyy"),
        (["run", "-p", "tinyy", "-m", "tinyy"], b"", "localllm run -p tinyy -m tiny"),
        (["run", "--", "-hello"], b"", "localllm list --all\nor:    localllm run --prompt=-hello"),
        (["run", "MODEL", "x", "--no-stats"], b"", "localllm run --help"),
        (["run", "-p", "--sead", "MODEL", "--sead", "1"], b"", "localllm run -p --sead MODEL --seed 1"),
        (["run", "MODEL", "-f", "./LATEN", "-p", "x"], b"", "LATIN in place of LATEN"),
        (["run", "MODEL", "-f", "LATEN", "-p", "x"], b"", "localllm run MODEL -f LATIN -p x"),
        (["run", "MODEL", "--file=LATEN", "-p", "x"], b"", "localllm run MODEL --file=LATIN -p x"),
        (["run", "A fox", "tiny"], b"", "localllm run tiny 'A fox'"),
        (["pull", "mistrl-7b"], b"", "localllm pull mistral-7b"),
        (["run", "MODEL", "-p", "x", "--weights", "INT4"], b"", f"{RUN} --weights int4"),
        (["tokenize", "hello"], b"", "localllm list --all, or if it is the text: localllm tokenize tiny hello"),
        (["run", "MODEL", "-p", "x", "--temperature", "-1"], b"", f"{RUN} --temperature 0"),
        (["run", "MODEL", "-p", "x", "--threads", "0"], b"", f"{RUN} --threads 4"),
        (["run", "MODEL", "-p", "x", "--kv", "--top-k", "6"], b"", f"{RUN} --top-k 6 --kv auto"),
        (
            ["run", "MODEL", "-p", "x", "--dry-base", "0.5", "--dry-multiplier", "1"],
            b"",
            f"{RUN} --dry-multiplier 1 --dry-base 1",
        ),
        (["plan", "MODEL", "--vram", "4GiB", "--device", "cpu"], b"", "localllm plan MODEL --device cpu"),
        (["tokenize", "MODEL"], b"\xe9", "iconv -f ISO-8859-1 -t UTF-8 FILE | localllm tokenize MODEL"),
        (
            ["perplexity", "MODEL", "--file", "LATIN"],
            b"",
            "iconv -f ISO-8859-1 -t UTF-8 LATIN > LATIN.utf8, then the same command with --file LATIN.utf8",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fix_mends_the_line_that_was_typed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], stdin: bytes, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LATIN").write_bytes(b"\xe9")
    places = {"MODEL": str(model), "LATIN": str(tmp_path / "LATIN")}
    err = run_cli(*(places.get(argument, argument) for argument in arguments), stdin=stdin).err
    shown = err.replace(str(model), "MODEL").replace(str(tmp_path / "LATIN"), "LATIN")
    assert f"fix:   {fix}\n" in shown


@pytest.mark.parametrize(
    ("variable", "flags", "fix"),
    [
        ("LOCALLLM_OFFLINE", [], "env -u LOCALLLM_OFFLINE localllm pull mistral-7b"),
        ("HF_HUB_OFFLINE", [], "env -u HF_HUB_OFFLINE localllm pull mistral-7b"),
        ("LOCALLLM_TOP_K", ["--offline"], "localllm pull mistral-7b"),
    ],
)
def test_a_pull_that_is_kept_offline_says_by_what(
    variable: str, flags: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", variable == "HF_HUB_OFFLINE")
    result = run_cli("pull", "mistral-7b", *flags)
    assert (result.code, result.error_lines[2]) == (3, f"fix:   {fix}")


@pytest.mark.parametrize("line", ["run x", "chat --plain", "quantize", "tokenize x", "bench", "bench --random-weights"])
def test_an_empty_name_stands_for_no_model_and_not_for_the_usual_one(line: str) -> None:
    command, *rest = line.split()
    result = run_cli(command, "", *rest)
    assert (result.code, result.out) == (3, b"")
    assert result.err.startswith("error: '' is not a model name\n")


def test_a_bad_name_in_the_settings_file_is_traced_to_its_line(tmp_path: Path) -> None:
    write_settings(tmp_path, 'model = "tinyy"\n')
    result = run_cli("run", "-p", "x")
    assert result.code == 3 and "config.toml:1" in result.error_lines[1]
    assert "localllm run tiny -p TEXT" in result.error_lines[2]


def test_a_fix_that_is_a_flag_is_shown_as_the_command_to_paste(model: Path) -> None:
    result = run_cli("run", model, "--ctx", "100000", "-p", "two words")
    assert result.code == 2
    assert f"fix:   localllm run {model} -p 'two words' --ctx 512" in result.err


def test_a_model_without_a_template_is_told_the_line_that_continues_the_text(model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model, tmp_path / "plain"))
    (model / "tokenizer_config.json").write_text("{}")
    result = run_cli("run", model, "-p", "Once upon", "--max-tokens", "4")
    assert result.error_lines[2] == f"fix:   localllm run {model} -p 'Once upon' --max-tokens 4 --raw"
    assert run_cli(*shlex.split(result.error_lines[2])[2:]).code == 0
    system = run_cli("run", model, "-p", "Once upon", "--system", "Be brief")
    assert system.error_lines[2].startswith(f"fix:   localllm run {model} --raw --prompt")


def test_a_fix_of_several_flags_takes_the_place_of_those_that_were_typed(model: Path) -> None:
    result = run_cli("run", model, "--dtype", "fp32", "--weights", "bf16", "-p", "x")
    assert result.code == 2
    assert f"fix:   localllm run {model} -p x --weights bf16 --dtype bf16" in result.err


def damaged(model: Path, tmp_path: Path) -> Path:
    """A copy with a block that computes NaN."""
    folder = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_model_that_computes_nan_ends_json_with_an_error_that_names_the_block(model: Path, tmp_path: Path) -> None:
    folder = damaged(model, tmp_path)
    result = ask(folder, "--json")
    assert (result.code, result.json["finish_reason"], result.json["text"]) == (1, "error", "")
    assert "layers.1.mlp" in result.json["error"]["what"]
    exact = ask(folder, "--json", "--dtype", "fp32").json
    assert exact["error"]["fix"] == f"copy the model's files into {folder} anew"
    assert "layers.1.mlp" in result.err
    assert result.err.rstrip().splitlines()[-2].endswith("--dtype fp32")


def test_a_damaged_folder_of_the_users_is_not_to_be_fetched_anew(model: Path, tmp_path: Path) -> None:
    folder = damaged(model, tmp_path)
    result = run_cli("quantize", folder)
    assert result.code == 1
    assert result.error_lines[2] == f"fix:   copy the model's files into {folder} anew"


def test_only_the_word_that_stands_for_the_model_gives_way_to_its_name(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "MODEL")
    (folder / "config.json").write_text("{")
    result = run_cli("run", folder, "-p", "x")
    assert result.error_lines[2] == f"fix:   copy the model's files into {folder} anew"


def test_the_line_that_repeats_a_bug_is_the_line_that_was_typed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.cli.run.read_source", lambda *_: 1 / 0)
    line = ["run", str(model), "-p", "the word MODEL here"]
    assert run_cli(*line).error_lines[2] == f"fix:   {shlex.join(['localllm', '--debug', *line])}"


def test_a_config_that_cannot_run_is_refused_before_torch_is_loaded(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bloom"}')
    code = (
        "import sys\nfrom localllm.cli.dispatch import dispatch\nfrom localllm.cli.interrupts import Interrupts\n"
        f"code = dispatch(['run', {str(tmp_path / 'other')!r}, '-p', 'x'], Interrupts())\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=REPOSITORY
    )
    assert done.stdout.split() == ["1", "False"] and "bloom" in done.stderr


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"adapter_config.json": "{}", "adapter_model.safetensors": "", "tokenizer.json": "{}"},
            "is an adapter, not a model",
        ),
        ({"config.json": '{"model_type": "llama"}', "pytorch_model.bin": ""}, "pytorch_model.bin could run code"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}"}, "no .safetensors and no .gguf file"),
        ({"README.md": ""}, "it has no config.json"),
    ],
    ids=["adapter", "pickles", "no weights", "no model"],
)
def test_a_folder_that_is_no_model_is_told_for_what_it_is(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = run_cli("run", tmp_path, "-p", "x")
    assert said in result.err and result.code in (1, 3), result.err


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (["run", "tiny", "-p", "hi", "--temprature", "1"], "localllm run tiny -p hi --temperature 1"),
        (["run", "tiny", "-p", "hi", "--temprature=1"], "localllm run tiny -p hi --temperature=1"),
        (["run", "--temp", "0.5", "hi"], "localllm run --temperature 0.5 hi"),
        (["chat", "--verbose"], "localllm chat --stats"),
        (["list", "--temp"], "localllm list --help"),
        (["config", "reset", "temperature"], "localllm config unset temperature"),
    ],
    ids=" ".join,
)
def test_a_flag_that_is_called_otherwise_gives_the_line_to_type(line: list[str], fix: str) -> None:
    result = run_cli(*line)
    assert result.code == 2 and f"fix:   {fix}\n" in result.err
