"""The command line's contract, in this process: what is printed where, and how each line ends."""

from __future__ import annotations

import json
import math
import re
import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.chat.answer import Answer, statistics
from localllm.cli.help import read_sections
from localllm.engine.events import FinishedEvent, StepSplit, Timings, Usage
from localllm.errors import LocalLLMError
from tests.cli_support import REPOSITORY, TEMPLATE, ask, run_cli, write_checkpoint, write_settings

pytestmark = pytest.mark.usefixtures("own_folders")


# The answer


def test_the_answer_alone_goes_to_stdout_and_ends_its_line(model: Path) -> None:
    result = ask(model)
    assert result.code == 0 and result.err == ""
    assert result.out.decode() == ask(model, "--json").json["text"].removesuffix("\n") + "\n"


def test_json_is_one_object_with_the_keys_of_the_contract(model: Path) -> None:
    answer = ask(model, "--json").json
    assert list(answer) == [
        "schema_version", "model", "text", "token_ids", "finish_reason", "complete", "context", "usage", "timings",
        "speculation", "evicted_turns", "evicted_tokens", "cache_miss", "session",
    ]  # fmt: skip
    assert answer["context"] == {"used": sum(answer["usage"].values()) - answer["usage"]["cached_tokens"], "limit": 512}
    assert list(answer["usage"]) == [
        "prompt_tokens", "cached_tokens", "completion_tokens", "evicted_tokens", "reused_tokens",
    ]  # fmt: skip
    assert list(answer["timings"]) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "split"]
    assert list(answer["timings"]["split"]) == ["compute_s", "wait_s", "sample_s", "copy_s", "copied_bytes"]
    assert (answer["schema_version"], answer["finish_reason"]) == (1, "length")
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 4


def test_json_has_logprobs_where_they_were_asked_for(model: Path) -> None:
    answer = ask(model, "--json", "--logprobs", "2").json
    assert [row["token_id"] for row in answer["logprobs"]] == answer["token_ids"]
    assert all(len(row["top"]) == 2 and row["logprob"] <= 0 for row in answer["logprobs"])


def test_jsonl_is_a_start_then_events_then_a_finish_and_the_same_text(model: Path) -> None:
    lines = [json.loads(line) for line in ask(model, "--jsonl").out.splitlines()]
    kinds = [kind for kind, _ in groupby(line["type"] for line in lines)]  # a long prefill is told more than once
    assert kinds == ["start", "prefill", "token", "finish"]
    assert sum(line["type"] == "token" for line in lines) == 4
    assert "".join(line.get("text", "") for line in lines) == ask(model, "--json").json["text"]


def test_no_stream_prints_the_same_answer(model: Path) -> None:
    assert ask(model, "--no-stream").out == ask(model).out


def test_statistics_go_to_stderr(model: Path) -> None:
    result = ask(model, "--stats")
    assert result.out == ask(model).out and "answer 4 tokens" in result.err
    assert result.err.endswith("seed 1, ended by length\n")


def test_statistics_share_out_the_time_of_the_steps_and_name_the_copying_beside_it() -> None:
    split = StepSplit(compute_s=2.0, wait_s=7.0, sample_s=1.0, copy_s=8.0, copied_bytes=16_000_000_000)
    finished = FinishedEvent(0, "stop", Usage(), Timings(split=split))
    shares = "20% computing, 10% sampling, 70% waiting for blocks, meanwhile 80% reading and copying (16.0 GB"
    assert shares in statistics(Answer(0, finished=finished))


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model: Path) -> None:
    first, again, other = (run_cli("run", model, "-p", "the fox", "--seed", s, "--max-tokens", "12") for s in "112")
    assert first.out == again.out != other.out


def test_a_stop_string_ends_the_answer_before_itself(model: Path) -> None:
    text = ask(model, "--json").json["text"]
    stop = text[-1]
    answer = ask(model, "--json", "--stop", stop).json
    assert answer["finish_reason"] == "stop" and answer["text"] == text.partition(stop)[0]


def test_a_logit_bias_forces_a_token(model: Path) -> None:
    assert ask(model, "--json", "--logit-bias", "40=1000").json["token_ids"] == [40] * 4


@pytest.mark.parametrize(
    ("ctx", "advice"), [("24", "--ctx makes it larger"), ("512", "it is the longest that the model has")]
)
def test_an_answer_that_fills_the_context_says_so(model: Path, ctx: str, advice: str) -> None:
    result = run_cli("run", model, "-p", "x" + " once" * (int(ctx) // 6), "--ctx", ctx)
    assert result.code == 0 and f"the context of {ctx} tokens is full ({advice}" in result.err


def test_a_drawn_seed_is_told_and_repeats_the_answer(model: Path) -> None:
    line = ("run", model, "-p", "the fox", "--max-tokens", "8")
    first = run_cli(*line, "--jsonl").out.splitlines()
    seed = json.loads(first[0])["seed"]
    assert 0 <= seed < 2**31
    again = run_cli(*line, "--seed", str(seed), "--jsonl").out.splitlines()
    assert [json.loads(row)["text"] for row in first[2:]] == [json.loads(row)["text"] for row in again[2:]]
    assert re.search(r"seed \d+, ended", run_cli(*line, "--stats").err)


def test_the_load_time_has_all_of_the_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.engine.engine import Engine

    load = Engine.load

    def slow(*arguments: object, **options: object) -> Engine:
        time.sleep(0.2)  # what Engine.load itself does not measure
        return load(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "load", slow)
    assert ask(model, "--json").json["timings"]["load_s"] > 0.2


def test_with_no_model_named_the_built_in_one_answers() -> None:
    if not (REPOSITORY / "localllm" / "tiny" / "model.safetensors").is_file():
        pytest.skip("localllm/tiny has no weights yet: python -m tools.train_tiny")
    answer = run_cli("run", "--prompt", "A tale about an owl, please.", "--max-tokens", "12", "--json").json
    assert answer["model"] == "tiny" and answer["text"].isprintable()
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


def test_an_empty_pipe_adds_nothing_and_the_newline_at_the_end_of_a_piped_prompt_is_not_meant(model: Path) -> None:
    prompt = "<|bos|><|user|>hi<|eos|><|assistant|>"
    assert shown(model, "-p", "hi", stdin=b"") == shown(model, stdin=b"hi\n") == prompt


HI = '[{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (HI, "<|bos|><|user|>hi<|eos|><|assistant|>"),
        (f'{{"messages": {HI}}}', "<|bos|><|user|>hi<|eos|>"),
        (f'{{"messages": {HI}, "add_generation_prompt": true, "bos_token": "B"}}', "B<|user|>hi<|eos|><|assistant|>"),
    ],
)
def test_messages_are_an_array_or_an_object_of_template_variables(
    model: Path, tmp_path: Path, content: str, expected: str
) -> None:
    (tmp_path / "m.json").write_text(content)
    for source, stdin in ((tmp_path / "m.json", b"not read"), ("-", content.encode())):
        result = run_cli("run", model, "--show-prompt", "--messages", source, stdin=stdin)
        assert (result.code, result.out.decode()) == (0, expected)
        says_so = "messages" in content and "add_generation_prompt" not in content
        assert ("add_generation_prompt" in result.err) is says_so


def test_one_argument_with_a_blank_is_the_prompt_and_two_are_model_and_prompt(model: Path, tmp_path: Path) -> None:
    write_settings(tmp_path, f'model = "{model}"\n')
    assert shown(Path("a tale")) == "<|bos|><|user|>a tale<|eos|><|assistant|>"
    assert shown(model, "tale") == "<|bos|><|user|>tale<|eos|><|assistant|>"


def test_a_flag_beats_a_variable_which_beats_the_settings_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path, "max_tokens = 2\n")

    def count(*arguments: str) -> int:
        return len(run_cli("run", model, "-p", "x", "--json", *arguments).json["token_ids"])

    assert count() == 2
    monkeypatch.setenv("LOCALLLM_MAX_TOKENS", "3")
    assert count() == 3 and count("--max-tokens", "5") == 5


# Listings


def test_tokenize_prints_ids_and_tokens_without_special_ones(model: Path) -> None:
    result = run_cli("tokenize", model, "the <|bos|> é", "--json").json
    assert "".join(result["tokens"]).startswith("the <|bos|> ") and 0 not in result["token_ids"]
    assert len(result["token_ids"]) == len(result["tokens"])


def test_a_byte_order_mark_is_no_part_of_a_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffile")
    assert shown(model, "--raw", "-f", tmp_path / "a.txt", stdin=b"\xef\xbb\xbfpiped") == "piped\n\nfile"


def test_a_dash_is_standard_input_in_the_place_of_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("file")
    text = shown(model, "--raw", "-f", tmp_path / "a.txt", "-f", "-", "-p", "ask", stdin=b"piped")
    assert text == "file\n\npiped\n\nask"
    text = b"the fox found a lantern " * 20
    assert run_cli("perplexity", model, "--file", "-", "--json", stdin=text).json["tokens"] > 20


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ '<' + m.content + '>' }}", "<one\ntwo>"),
        ("{% for p in m.content %}{{ '<' + p.text + '>' }}{% endfor %}", "<one><two>"),
    ],
    ids=["knows texts", "knows parts"],
)
def test_parts_of_text_are_joined_for_a_template_that_knows_no_parts(
    model: Path, tmp_path: Path, body: str, expected: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}" + body + "{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = json.dumps([{"role": "user", "content": parts}]).encode()
    assert shown(tmp_path, "--messages", "-", stdin=messages) == expected


@pytest.mark.parametrize("text", ["the fox\n", "", "\ufeff\0\x1b[0m\r\n"])
def test_tokenize_reads_standard_input_to_the_last_byte(model: Path, text: str) -> None:
    piped = run_cli("tokenize", model, "--json", stdin=text.encode()).json
    assert piped["token_ids"] == run_cli("tokenize", model, text, "--json").json["token_ids"]


def test_perplexity_prints_its_four_figures(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the fox found a lantern " * 20)
    result = run_cli("perplexity", model, "--file", tmp_path / "t.txt", "--ctx", "32", "--json").json
    assert list(result) == ["schema_version", "model", "perplexity", "nll", "tokens", "ctx"]
    assert result["ctx"] == 32 and result["perplexity"] > 1


def test_perplexity_of_files_is_of_the_tokens_of_all_each_file_from_its_beginning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("the fox found a lantern")
    (tmp_path / "b").write_text("once upon a time there was a fox " * 9)
    a, b, both = (
        run_cli("perplexity", model, *(word for name in names for word in ("-f", tmp_path / name)), "--json").json
        for names in ("a", "b", "ab")
    )
    assert both["tokens"] == a["tokens"] + b["tokens"]
    assert both["nll"] == pytest.approx((a["nll"] * a["tokens"] + b["nll"] * b["tokens"]) / both["tokens"])
    assert both["perplexity"] == pytest.approx(math.exp(both["nll"]))


def test_an_empty_file_is_named_before_others_are_measured(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once upon a time")
    (tmp_path / "b.txt").write_text("")
    refused = run_cli("perplexity", model, "-f", tmp_path / "a.txt", "-f", tmp_path / "b.txt")
    assert refused.code == 2 and f"{tmp_path / 'b.txt'}: there is nothing to predict" in refused.err


@pytest.mark.parametrize("line", ["list", "list --all", "show mistral-7b", "config show --origin", "doctor"])
def test_every_listing_is_json_where_asked(line: str) -> None:
    assert run_cli(*line.split(), "--json").json["schema_version"] == 1
    assert run_cli(*line.split()).code == 0


def test_list_all_tells_how_each_model_would_run_here_and_stars_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.hub.repo_cache.free_bytes", lambda _folder: 1 << 40)
    rows = run_cli("list", "--all", "--json").json["models"]
    known = {row["name"]: row for row in rows}
    assert (known["tiny"]["state"], known["mistral-7b"]["state"]) == ("installed", "available")
    assert known["mistral-7b"]["here"]["tok_s"] > 0 and 14e9 < known["mistral-7b"]["download_bytes"] < 15e9
    assert known["gpt-oss-20b"]["download_bytes"] == 13_800_000_000 and known["tiny"]["download_bytes"] is None
    result = run_cli("list", "--all")
    title, *lines = result.out.decode().splitlines()
    assert title.split() == ["NAME", "DOWNLOAD", "MEMORY", "TOK/S", "CONTEXT", "LICENCE"]
    assert sorted(line[2:].split()[0] for line in lines) == sorted(known)
    assert max(map(len, lines)) <= 80
    (star,) = (line for line in lines if line.startswith("*"))
    assert f"localllm chat {star.split()[1]}" in result.err and "no NVIDIA GPU" in result.err


def test_list_all_says_where_its_speeds_were_measured_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    run_cli("list", "--all")
    assert "doctor --measure" not in run_cli("list", "--all").err
    monkeypatch.setattr("localllm.cli.models.kept_profile", lambda: SimpleNamespace(busy=("disk",)))
    assert "localllm doctor --measure measures it anew" in run_cli("list", "--all").err


def test_a_model_whose_download_has_no_room_on_the_disk_gets_no_star(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.hub.repo_cache.free_bytes", lambda _folder: 1 << 20)
    listed = run_cli("list", "--all")
    assert "tiny" in listed.out.decode() and "*" not in listed.out.decode() + listed.err


def test_what_is_not_known_of_a_model_is_not_shown() -> None:
    row = run_cli("show", "qwen3-8b", "--json").json
    assert (row["size_bytes"], row["gated"], row["parameters"] > 7) == (None, False, True)
    text = run_cli("show", "qwen3-8b").out.decode()
    assert not re.search(r"^(size|partial)|0 B$", text, re.MULTILINE)
    assert re.search(r"^gated +no$", text, re.MULTILINE)
    assert re.search(r"^parameters +8\.\d+ billion$", text, re.MULTILINE)
    listed = {row["name"]: row for row in run_cli("list", "--all", "--json").json["models"]}
    assert (listed["qwen3-8b"]["size_bytes"], listed["qwen3-8b"]["parameters"]) == (None, row["parameters"])


def test_show_lists_the_sampling_defaults_of_the_checkpoint_too(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "own")
    (model / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
    assert run_cli("show", model, "--json").json["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    assert re.search(r"^size +\d", run_cli("show", model).out.decode(), re.MULTILINE)


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
    assert run_cli("config").out == run_cli("config", "--help").out and run_cli("config").code == 0


def test_the_usage_line_of_a_command_has_no_braces() -> None:
    assert run_cli("perplexity", "--help").out.startswith(b"Usage: localllm perplexity [OPTIONS] MODEL\n")


def test_an_answer_that_the_context_ends_before_max_tokens_says_so() -> None:
    asked = ("run", "tiny", "--ctx", "60", "--temperature", "0", "-p", "A tale about an owl")
    cut = run_cli(*asked, "--max-tokens", "200")
    assert cut.code == 0 and "the context of 60 tokens is full" in cut.err
    asked_for = run_cli(*asked, "--max-tokens", "5")
    assert asked_for.code == 0 and "is full" not in asked_for.err
