"""`run --compress`: with the built-in model as the judge and as the one that answers."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest

from localllm.runtime.engine_thread import EngineThread
from tests.cli_support import Result, run_cli

TALE = (
    "A fox lived by the river. He was hungry and tired of the rain. He met nobody on the way.\n\n"
    "The password of the mill is silver heron. The old woman laughed until the sun went down behind the hills.\n"
)
CODE = "```\nprint(  'as it   is'  )\n```"
QUESTION = "What is the password of the mill?"

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def tale(tmp_path: Path) -> Path:
    path = tmp_path / "tale.txt"
    path.write_text(f"{TALE}\n{CODE}\n")
    return path


def compress(tale: Path, *arguments: str | Path, ratio: str = "0.4") -> Result:
    line = ("run", "tiny", "-f", tale, "-p", QUESTION, "--compress", ratio, "--max-tokens", "3")
    return run_cli(*line, *arguments)


def test_the_answer_is_to_what_is_kept_and_json_says_what_left(tale: Path) -> None:
    shown, told = compress(tale, "--show-prompt"), compress(tale, "--json", "--private")
    assert (shown.code, told.code) == (0, 0), told.err
    prompt, removed = shown.out.decode(), told.json["compression"]
    assert "silver heron" in prompt and CODE in prompt and QUESTION in prompt and "tired of the rain" not in prompt
    assert set(removed) == {"judge", "ratio", "tokens_before", "tokens_after", "removed"}
    assert (removed["judge"], removed["ratio"]) == ("tiny", 0.4)
    assert 0.3 < removed["tokens_after"] / removed["tokens_before"] <= 0.4
    assert any("tired of the rain" in run for run in removed["removed"])
    whole = run_cli("run", "tiny", "-f", tale, "-p", QUESTION, "--max-tokens", "3", "--json", "--private").json
    left = whole["usage"]["prompt_tokens"] - told.json["usage"]["prompt_tokens"]
    assert left == pytest.approx(removed["tokens_before"] - removed["tokens_after"], abs=4)
    kept = f"{removed['tokens_after']} of {removed['tokens_before']} tokens kept (judge: tiny)"
    assert f"compressed the context: {kept}" in told.err and kept in shown.err


def test_the_first_line_of_jsonl_says_what_left_and_messages_lose_words_too(tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    system = {"role": "system", "content": TALE}
    path.write_text(json.dumps([system, {"role": "user", "content": f"{TALE}\n{QUESTION}"}]))
    line = ("run", "tiny", "--messages", path, "--compress", "0.5", "--max-tokens", "2")
    first = json.loads(run_cli(*line, "--jsonl").out.splitlines()[0])
    assert first["type"] == "start" and first["compression"]["tokens_after"] > 0
    shown = run_cli(*line[:-2], "--show-prompt").out.decode()
    assert shown.count("tired of the rain") == 1 and shown.count("silver heron") == 2


def test_the_chat_that_is_saved_has_the_whole_question(tale: Path) -> None:
    assert compress(tale).code == 0
    saved = run_cli("sessions", "show", "last").out.decode()
    assert "tired of the rain" in saved


def test_a_file_that_is_no_prose_by_its_name_stays(tmp_path: Path, tale: Path) -> None:
    code = tmp_path / "notes.py"
    code.write_text("import nothing\n\nthe words of a comment that would be prose elsewhere\n")
    shown = compress(tale, "-f", code, "--show-prompt", ratio="0.1")
    assert code.read_text().strip() in shown.out.decode()
    assert f"--compress leaves {code} as it is" in shown.err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--compress", "1"), "--compress is 1"),
        (("--compress", "0"), "--compress is 0"),
        (("--compress", "nan"), "--compress is nan"),
        (("--compress", "0.5", "--raw"), "--compress and --raw cannot go together"),
        (("--compress-with", "tiny"), "--compress-with needs --compress"),
        (("--compress", "0.5"), "--compress has nothing to remove"),
        (("--compress", "0.5", "-f", "code.txt"), "--compress has nothing to remove"),
        (("--compress", "0.5", "-f", "tale.txt", "--compress-with", "nobody"), "there is no model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, tale: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.txt").write_text(CODE)
    result = run_cli("run", "tiny", "-p", QUESTION, *arguments)
    assert result.code != 0 and what in result.err and len(result.error_lines) == 4, result.err


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("-p hi --compress 0.5 --compress-with tiny", "localllm run tiny -p hi"),
        (
            "--raw -p hi --compress 0.5 --compress-with tiny",
            "localllm run tiny -p hi --compress 0.5 --compress-with tiny\nor:    localllm run tiny --raw -p hi",
        ),
        ("--batch f --compress 0.5", "localllm run tiny --batch f"),
        ("--compress 0.5", "localllm run tiny --compress 0.5 -p 'Tell me a tale about a fox.'"),
    ],
)
def test_the_fix_of_an_idle_flag_is_the_typed_line_without_all_that_needs_it(flags: str, fix: str) -> None:
    refused = run_cli("run", "tiny", *flags.split())
    assert refused.code == 2 and f"\nfix:   {fix}\nmore:" in refused.err
    assert ("--compress cannot do without one" in refused.err) == ("no prompt" in refused.err)


def test_a_job_is_not_compressed(tmp_path: Path) -> None:
    result = run_cli("run", "tiny", "--batch", tmp_path / "any.jsonl", "--compress", "0.5")
    assert result.code == 2 and "--compress and --batch cannot go together" in result.err


def test_ctrl_c_ends_the_judging(tale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = EngineThread.submit

    def pressed(self: EngineThread, *given: object) -> object:
        stream = submit(self, *given)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)
        return stream

    monkeypatch.setattr(EngineThread, "submit", pressed)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        result = compress(tale)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (result.code, result.out) == (130, b"")


def test_where_a_file_does_not_fit_the_share_is_named_with_which_it_does(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(40 * TALE)
    line = ("run", "tiny", "-f", path, "-p", QUESTION, "--max-tokens", "3")
    refused = run_cli(*line)
    ratio = refused.err.partition("--compress ")[2].split()[0]
    assert refused.code == 5 and run_cli(*line, "--compress", ratio).code == 0
    path.write_text(100 * f"{CODE}\n\n")  # of code nothing may leave
    assert "--compress" not in run_cli(*line).err


@pytest.mark.parametrize(("ratio", "ctx", "fix"), [("0.7", (), "--compress 0."), ("0.3", ("--ctx", "256"), "--ctx 7")])
def test_what_does_not_fit_with_that_share_either_is_refused_before_a_judge_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: str, ctx: tuple[str, ...], fix: str
) -> None:
    path = tmp_path / "book.txt"
    path.write_text(40 * TALE)
    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "submit", None)
        refused = compress(path, *ctx, ratio=ratio)
    assert refused.code == 5 and "would stay" in refused.err
    whole = run_cli("run", "tiny", "-f", path, "-p", QUESTION, *ctx, "--overflow", "stop", "--private").err
    count = whole.partition("the prompt has ")[2].split()[0]
    assert count and f"of its {int(count):,} tokens" in refused.err
    line = refused.error_lines[2].removeprefix("fix:   localllm ")
    assert fix in line and run_cli(*shlex.split(line)).code == 0
