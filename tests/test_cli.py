"""The command line's contract, in this process: what is printed where, and how each line ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from localllm.cli.help import read_sections
from localllm.errors import LocalLLMError
from tests.cli_support import REPOSITORY, TEMPLATE, Result, run_cli, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def ask(model: Path, *arguments: str, stdin: bytes = b"") -> Result:
    return run_cli("run", model, "-p", "the fox", "--max-tokens", "4", "--seed", "1", *arguments, stdin=stdin)


# The answer


def test_the_answer_alone_goes_to_stdout_and_ends_its_line(model: Path) -> None:
    result = ask(model)
    assert result.code == 0
    assert result.err == ""
    assert result.out.decode() == ask(model, "--json").json["text"].removesuffix("\n") + "\n"


def test_json_is_one_object_with_the_keys_of_the_contract(model: Path) -> None:
    answer = ask(model, "--json").json
    assert list(answer) == ["schema_version", "model", "text", "token_ids", "finish_reason", "usage", "timings"]
    assert list(answer["usage"]) == ["prompt_tokens", "cached_tokens", "completion_tokens"]
    assert list(answer["timings"]) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"]
    assert (answer["schema_version"], answer["finish_reason"]) == (1, "length")
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 4


def test_json_has_logprobs_where_they_were_asked_for(model: Path) -> None:
    answer = ask(model, "--json", "--logprobs", "2").json
    assert [row["token_id"] for row in answer["logprobs"]] == answer["token_ids"]
    assert all(len(row["top"]) == 2 and row["logprob"] <= 0 for row in answer["logprobs"])


def test_jsonl_is_a_start_then_events_then_a_finish_and_the_same_text(model: Path) -> None:
    lines = [json.loads(line) for line in ask(model, "--jsonl").out.splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds == ["start", "prefill", "token", "token", "token", "token", "finish"]
    assert "".join(line.get("text", "") for line in lines) == ask(model, "--json").json["text"]


def test_no_stream_prints_the_same_answer(model: Path) -> None:
    assert ask(model, "--no-stream").out == ask(model).out


def test_statistics_go_to_stderr(model: Path) -> None:
    result = ask(model, "--stats")
    assert result.out == ask(model).out
    assert "answer 4 tokens" in result.err
    assert "ended by length" in result.err


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: Path) -> None:
    first, again, other = (run_cli("run", model, "-p", "the fox", "--seed", s, "--max-tokens", "12") for s in "112")
    assert first.out == again.out != other.out


def test_a_stop_string_ends_the_answer_before_itself(model: Path) -> None:
    text = ask(model, "--json").json["text"]
    stop = text[-1]
    answer = ask(model, "--json", "--stop", stop).json
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text.partition(stop)[0]


def test_a_logit_bias_forces_a_token(model: Path) -> None:
    assert ask(model, "--json", "--logit-bias", "40=1000").json["token_ids"] == [40] * 4


def test_an_answer_that_fills_the_context_says_so(model: Path) -> None:
    result = run_cli("run", model, "-p", "x", "--ctx", "24")
    assert result.code == 0
    assert "the context of 24 tokens is full" in result.err


def test_with_no_model_named_the_built_in_one_answers() -> None:
    if not (REPOSITORY / "localllm" / "tiny" / "model.safetensors").is_file():
        pytest.skip("localllm/tiny has no weights yet: python -m tools.train_tiny")
    answer = run_cli("run", "--prompt", "A tale about an owl, please.", "--max-tokens", "12", "--json").json
    assert answer["model"] == "tiny"
    assert answer["text"].isprintable()
    assert len(answer["text"].split()) > 4


# The prompt


def shown(model: Path, *arguments: str | Path, stdin: bytes = b"") -> str:
    result = run_cli("run", model, "--show-prompt", *arguments, stdin=stdin)
    assert (result.code, result.err) == (0, "")
    return result.out.decode()


def test_show_prompt_prints_the_rendered_prompt_byte_for_byte(model: Path) -> None:
    assert shown(model, "-p", "hi\n", "-s", "be é") == "<|bos|><|system|>be é<|eos|><|user|>hi\n<|eos|><|assistant|>"


def test_raw_is_the_prompt_as_it_is(model: Path) -> None:
    assert shown(model, "--raw", "-p", " once\n") == " once\n"
    assert shown(model, "--raw", stdin=b"once\n") == "once\n"


def test_show_prompt_needs_no_weights(tmp_path: Path, model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    assert shown(tmp_path, "-p", "hi") == "<|bos|><|user|>hi<|eos|><|assistant|>"


def test_what_is_piped_in_comes_first_then_the_files_then_the_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file\n")
    (tmp_path / "b.txt").write_text("other")
    text = shown(model, "-f", tmp_path / "a.txt", "-f", tmp_path / "b.txt", "-p", "ask", stdin=b"piped\n")
    assert text == "<|bos|><|user|>piped\n\nfile\n\nother\n\nask<|eos|><|assistant|>"


def test_an_empty_pipe_adds_nothing(model: Path) -> None:
    assert shown(model, "-p", "hi", stdin=b"") == "<|bos|><|user|>hi<|eos|><|assistant|>"


def test_the_newline_at_the_end_of_a_piped_prompt_is_not_meant(model: Path) -> None:
    assert shown(model, stdin=b"hi\n") == "<|bos|><|user|>hi<|eos|><|assistant|>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"role": "user", "content": "hi"}]', "<|bos|><|user|>hi<|eos|><|assistant|>"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "<|bos|><|user|>hi<|eos|>"),
        (
            '{"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true, "bos_token": "B"}',
            "B<|user|>hi<|eos|><|assistant|>",
        ),
    ],
)
def test_messages_are_an_array_or_an_object_of_template_variables(
    model: Path, tmp_path: Path, content: str, expected: str
) -> None:
    (tmp_path / "m.json").write_text(content)
    assert shown(model, "--messages", tmp_path / "m.json") == expected
    assert shown(model, "--messages", "-", stdin=content.encode()) == expected


def test_one_argument_with_a_blank_is_the_prompt_and_two_are_model_and_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "config").mkdir(parents=True)
    (tmp_path / "home" / "config" / "config.toml").write_text(f'model = "{model}"\n')
    assert shown(Path("a tale")) == "<|bos|><|user|>a tale<|eos|><|assistant|>"
    assert shown(model, "tale") == "<|bos|><|user|>tale<|eos|><|assistant|>"


def test_a_flag_beats_a_variable_which_beats_the_settings_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "config").mkdir(parents=True)
    (tmp_path / "home" / "config" / "config.toml").write_text("max_tokens = 2\n")

    def count(*arguments: str) -> int:
        return len(run_cli("run", model, "-p", "x", "--json", *arguments).json["token_ids"])

    assert count() == 2
    monkeypatch.setenv("LOCALLLM_MAX_TOKENS", "3")
    assert count() == 3
    assert count("--max-tokens", "5") == 5


# Bad lines

BAD_LINES = {
    "no command": (["hlp"], 2, "help"),
    "unknown flag": (["run", "--debgu"], 2, "--debgu"),
    "unknown model": (["run", "mistrl-7b"], 3, "mistral-7b"),
    "one word": (["run", "hello"], 3, "-p hello"),
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
    "top p": (["run", "MODEL", "-p", "x", "--top-p", "1.5"], 2, "top_p"),
    "no number": (["run", "MODEL", "-p", "x", "--top-k", "many"], 2, "--top-k"),
    "no tokens": (["run", "MODEL", "-p", "x", "--max-tokens", "0"], 2, "max_tokens"),
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
    "latin-1 file": (["run", "MODEL", "-f", "LATIN", "-p", "x"], 2, "UTF-8"),
    "endless file": (["run", "MODEL", "-f", "/dev/zero", "-p", "x"], 2, "too large"),
    "messages no json": (["run", "MODEL", "--messages", "LATIN"], 2, "--messages"),
    "messages wrong": (["run", "MODEL", "--messages", "NUMBER"], 2, "messages"),
    "prompt no text": (["run", "MODEL", "-p", "\udcff"], 2, "UTF-8"),
    "a folder without model": (["run", "/", "-p", "x"], 3, "config.json"),
    "perplexity without text": (["perplexity", "MODEL"], 2, "--file"),
    "perplexity of nothing": (["perplexity", "MODEL", "--file", "EMPTY"], 2, "tokens"),
    "rm unasked": (["rm", "mistral-7b"], 2, "--yes"),
    "rm absent": (["rm", "mistral-7b", "--yes"], 3, "mistral-7b"),
    "rm built in": (["rm", "tiny", "--yes"], 2, "built-in"),
    "pull offline": (["pull", "mistral-7b", "--offline"], 3, "offline"),
    "show nothing": (["show", "no-such-thing"], 3, "no-such-thing"),
    "help nothing": (["help", "nope"], 2, "nope"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_ends_with_four_lines_and_its_exit_code(name: str, model: Path, tmp_path: Path) -> None:
    files = {"BINARY": b"\x7fELF\0\1", "LATIN": "é".encode("latin-1"), "NUMBER": b"3", "EMPTY": b""}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    arguments, code, word = BAD_LINES[name]
    places = {"MODEL": str(model), **{file: str(tmp_path / file) for file in files}}
    result = run_cli(*(places.get(argument, argument) for argument in arguments))
    assert (result.code, result.out) == (code, b"")
    assert [line.split(":")[0] for line in result.err.splitlines()] == ["error", "why", "fix", "more"]
    assert word in result.err


def test_a_settings_file_with_an_unknown_key_is_an_error_that_names_the_nearest(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "config").mkdir(parents=True)
    (tmp_path / "home" / "config" / "config.toml").write_text("temprature = 1\n")
    result = ask(model)
    assert result.code == 2
    assert "temperature" in result.err


def test_control_characters_of_a_name_reach_neither_line_nor_terminal(model: Path) -> None:
    result = run_cli("run", "evil\x1b[31mname\x9b", "-p", "x")
    assert result.code == 3
    assert not re.search(r"[\x1b\x9b]", result.err)
    assert len(result.err.splitlines()) == 4


def test_an_unforeseen_exception_is_called_a_bug_and_shows_no_traceback(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("localllm.hub.locate", explode)
    result = ask(model)
    assert result.code == 1
    assert result.error_lines[0] == "error: this is a bug in localllm: ZeroDivisionError"
    assert "--debug" in result.error_lines[2]
    assert "Traceback" not in result.err
    assert "Traceback" in ask(model, "--debug").err


# Listings


def test_tokenize_prints_ids_and_tokens_without_special_ones(model: Path) -> None:
    result = run_cli("tokenize", model, "the <|bos|> é", "--json").json
    assert "".join(result["tokens"]).startswith("the <|bos|> ")
    assert 0 not in result["token_ids"]
    assert len(result["token_ids"]) == len(result["tokens"])


@pytest.mark.parametrize("text", ["the fox\n", "", "\ufeff\0\x1b[0m\r\n"])
def test_tokenize_reads_standard_input_to_the_last_byte(model: Path, text: str) -> None:
    piped = run_cli("tokenize", model, "--json", stdin=text.encode()).json
    assert piped["token_ids"] == run_cli("tokenize", model, text, "--json").json["token_ids"]


def test_perplexity_prints_its_four_figures(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the fox found a lantern " * 20)
    result = run_cli("perplexity", model, "--file", tmp_path / "t.txt", "--ctx", "32", "--json").json
    assert list(result) == ["schema_version", "model", "perplexity", "nll", "tokens", "ctx"]
    assert result["ctx"] == 32
    assert result["perplexity"] > 1


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["list", "--all"], ["show", "mistral-7b"], ["config", "show", "--origin"], ["doctor"]],
    ids=" ".join,
)
def test_every_listing_is_json_where_asked(arguments: list[str]) -> None:
    assert run_cli(*arguments, "--json").json["schema_version"] == 1
    assert run_cli(*arguments).code == 0


def test_list_all_names_what_can_be_pulled() -> None:
    rows = run_cli("list", "--all", "--json").json["models"]
    assert any(row["name"] == "mistral-7b" and row["state"] == "available" for row in rows)


def test_show_template_prints_the_template(model: Path) -> None:
    assert run_cli("show", model, "--template").out.decode() == TEMPLATE + "\n"


def test_config_show_names_the_origin_of_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_TOP_K", "7")
    settings = run_cli("config", "show", "--json").json["settings"]
    assert settings["top_k"] == {"value": 7, "origin": "LOCALLLM_TOP_K"}
    assert settings["model"]["origin"] == "default"


# Help


def all_errors(kind: type[LocalLLMError] = LocalLLMError) -> set[str]:
    return {kind.code}.union(*(all_errors(child) for child in kind.__subclasses__()))


def test_every_error_has_a_section_in_the_errors_page() -> None:
    assert {code for code in all_errors() if code != "failure"} <= set(read_sections())


@pytest.mark.parametrize("code", sorted(read_sections()))
def test_help_prints_the_section_of_an_error(code: str) -> None:
    assert run_cli("help", code).out.decode().startswith(f"## {code}\n")


def test_help_of_a_command_is_its_help_flag() -> None:
    assert run_cli("help", "run").out == run_cli("run", "--help").out


def test_version_and_bare_command() -> None:
    assert run_cli("--version").out.startswith(b"localllm ")
    assert run_cli().out == run_cli("--help").out


def test_a_fix_that_is_a_flag_is_shown_as_the_command_to_paste(model: Path) -> None:
    result = run_cli("run", model, "--ctx", "100000", "-p", "two words")
    assert result.code == 2
    assert f"fix:   localllm run {model} -p 'two words' --ctx 512" in result.err
