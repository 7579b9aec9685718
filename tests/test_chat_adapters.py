"""Adapters in chats: `/adapter`, what the history keeps of them, and what a resumed chat does with them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.adapter_support import write_peft
from tests.adapters import write_peft_adapter
from tests.cli_support import Result, environment, run_cli, write_checkpoint


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters fox and owl of the model, and wide, which is another's."""
    folder = tmp_path_factory.mktemp("adapters")
    peer = AutoModelForCausalLM.from_pretrained(model)
    for seed, name in enumerate(("fox", "owl")):
        write_peft_adapter(folder / name, peer, seed=seed, size=0.6)
    other = write_checkpoint(folder / "other", hidden=128)
    write_peft_adapter(folder / "wide", AutoModelForCausalLM.from_pretrained(other))
    return folder


@pytest.fixture
def talk(talk: Callable[..., Result], made: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(made)
    return lambda *lines, **how: talk(*lines, **{"flags": ("--temperature", "0", *how.pop("flags", ())), **how})


def answers(result: Result) -> list[str]:
    return result.out.decode().splitlines()


def last_facts() -> list[dict[str, object]]:
    return [each["facts"] for each in run_cli("sessions", "show", "last", "--json").json["messages"]]


def adapters_of_answers() -> list[object]:
    return [facts.get("adapters") for facts in last_facts()[1::2]]


def test_a_switch_answers_as_a_chat_that_was_begun_with_the_adapter_and_off_as_one_without(talk) -> None:
    plain = answers(talk("Tell me"))
    begun = {name: answers(talk("Tell me", flags=("--adapter", name))) for name in ("fox", "owl:-1")}
    assert len({*map(tuple, (plain, *begun.values()))}) == 3
    lines = ["/adapter fox", "Tell me", "/clear", "/adapter owl:-1", "Tell me", "/clear", "/adapter off", "Tell me"]
    switched = talk(*lines)
    assert answers(switched) == [*begun["fox"], *begun["owl:-1"], *plain]


def test_adapters_are_added_removed_and_listed(talk, made: Path) -> None:
    result = talk(
        "/adapter fox:0.5", "/adapter + ./owl", "/adapter - fox", "/adapter", "/set adapter -", "/set adapter"
    )
    said = [line for line in result.err.splitlines() if line.startswith("adapters: ")]
    assert said == [f"adapters: {each}" for each in ("fox:0.5", "fox:0.5 + owl", "owl", "owl", "none", "none")]
    assert (
        "/adapter NAME[:SCALE] uses one" in result.err and "no adapter on this disk says that it is for" in result.err
    )


def test_an_adapter_is_removed_by_its_path_in_any_spelling(talk, made: Path) -> None:
    for spelt in ("./owl", str(made / "owl"), f"../{made.name}/owl", "owl"):
        for scale in ("", ":0.5"):
            result = talk("/adapter fox", "/adapter + ./owl:0.5", f"/adapter - {spelt}{scale}")
            said = [line for line in result.err.splitlines() if line.startswith("adapters: ")]
            assert said[-1] == "adapters: fox", result.err


def test_adapters_of_one_name_are_told_apart_by_their_paths(talk, made: Path) -> None:
    twin = made / "twin" / "fox"
    shutil.copytree(made / "fox", twin)
    fox = made / "fox"
    on = "/adapter ./fox", "/adapter + ./twin/fox"
    result = talk(*on, "/adapter - fox", "/adapter")
    assert f"{fox} and {twin}" in result.err and f"/adapter - {twin}" in result.err
    assert result.err.count(f"adapters: {fox} + {twin}\n") == 2
    assert "adapters: fox\n" in talk(*on, f"/adapter - {twin}").err


def test_a_sign_alone_is_refused_and_off_says_where_nothing_is_on(talk) -> None:
    result = talk("Tell me", "/adapter fox", "/adapter -", "/adapter", "/adapter off", "/adapter off")
    assert "/adapter - is followed by a name" in result.err and "/adapter off removes all" in result.err
    assert "adapters: fox\n" in result.err and result.err.count("no adapter is on") == 1
    assert result.err.count("computed anew") == 2


def preset(name: str, model: Path | str, *adapters: str) -> None:
    given = [word for adapter in adapters for word in ("--adapter", adapter)]
    assert run_cli("preset", "save", name, "--model", str(model), *given, "--replace").code == 0


def adapters_said(result: Result) -> list[str]:
    return [line.removeprefix("adapters: ") for line in result.err.splitlines() if line.startswith("adapters: ")]


def test_a_preset_brings_its_adapters_and_takes_them_with_it(talk, model: Path, made: Path) -> None:
    preset("foxy", model, "./fox:0.5")
    preset("plain", model)
    asked = "/model foxy", "/adapter", "/model plain", "/adapter", "/adapter owl", "/model foxy", "/adapter"
    result = talk(*asked, f"/model {model}", "/adapter")
    assert adapters_said(result) == ["fox:0.5", "none", "owl", "fox:0.5", "none"]
    assert f"loaded {model} + fox:0.5: " in result.err
    begun = run_cli("chat", "foxy", "--plain", stdin=f"/adapter + owl\n/model {model}\n/adapter\n".encode())
    assert adapters_said(begun) == ["fox:0.5 + owl", "owl"]


def test_what_was_chosen_in_the_chat_or_on_the_line_goes_on_with_a_preset_without_adapters(talk, model: Path) -> None:
    preset("plain", model)
    assert adapters_said(talk("/model plain", "/adapter", flags=("--adapter", "fox"))) == ["fox"]
    assert adapters_said(talk("/adapter fox", "/model plain", "/adapter")) == ["fox", "fox"]
    preset("foxy", model, "./fox")
    asked = "/model foxy", "/adapter", "/model plain", "/adapter"
    assert adapters_said(talk(*asked, flags=("--adapter", "owl"))) == ["fox", "owl"]


def test_a_miss_behind_a_switch_has_one_reason(talk) -> None:
    err = talk("word " * 40, "/adapter fox", "more", "/cache").err
    assert "computed: the adapters were switched, and what was computed with others is not used" in err
    assert "what was computed before ends" not in err


def test_a_resumed_chat_knows_what_was_computed_without_an_adapter(talk) -> None:
    talk("word " * 40)
    err = talk("/adapter fox", "/adapter off", named=False, flags=("--resume",)).err
    assert "were computed with the same before" in err.partition("adapters: none")[2]


def test_the_list_of_commands_has_a_blank_between_its_columns_and_names_off(talk) -> None:
    err = talk("/help").err
    [line] = [line for line in err.splitlines() if line.startswith("/adapter")]
    assert "off" in line
    assert all(each[22] == " " for each in err.splitlines() if each.startswith("/"))


def test_a_switch_says_how_many_tokens_are_computed_anew(talk) -> None:
    result = talk("/adapter fox", "word " * 40, "/adapter owl", "/tokens", "/adapter fox", "/cache", "more", "/cache")
    costs = re.findall(r"([\d,]+) tokens of this chat are computed anew(.*)", result.err)
    assert len(costs) == 2 and costs[0][1] == "" and "were computed with the same before" in costs[1][1]
    known = int(re.findall(r"the first ([\d,]+)", costs[1][1])[0])
    assert int(costs[0][0]) == int(costs[1][0]) + known
    found = re.findall(r"(\d+) of the last prompt's", result.err)
    assert int(found[-1]) == known, result.err


def test_what_cannot_be_used_is_refused_at_once_and_the_chat_goes_on_as_it_was(talk) -> None:
    plain = answers(talk("Tell me", flags=("--adapter", "fox")))
    result = talk("/adapter wide", "/adapter nosuch", "/adapter fox:1000", "/adapter - owl", "/adapter +", "Tell me",
                  flags=("--adapter", "fox"))  # fmt: skip
    assert answers(result) == plain
    for text in (
        "wide",
        "the adapter nosuch is not on this disk",
        "/adapter fox:1",
        "no adapter 'owl'",
        "/adapter - fox",
    ):
        assert text in result.err
    assert result.err.count("error:") == 5 and "/attach" not in result.err


def test_a_wrong_adapter_on_the_line_ends_a_chat_before_its_first_question(talk) -> None:
    for name in ("wide", "nosuch"):
        result = talk("Tell me", flags=("--adapter", name))
        assert result.code != 0 and result.out == b"" and name in result.err


def test_an_answer_keeps_its_adapters_and_a_resumed_chat_goes_on_with_them(talk, made: Path) -> None:
    talk("/adapter ./fox:0.5", "Tell me", "/adapter + owl", "more", "/adapter off", "and", "/adapter fox", "last")
    fox, owl = str(made / "fox"), str(made / "owl")
    half = {"name": fox, "scale": 0.5}
    kept = [[half], [half, {"name": owl, "scale": 1.0}], None, [{"name": fox, "scale": 1.0}]]
    assert adapters_of_answers() == kept
    shown = run_cli("sessions", "show", "last").out.decode()
    headings = [line for line in shown.splitlines() if line.startswith("## Model")]
    assert headings == ["## Model + fox:0.5", "## Model + fox:0.5 + owl", "## Model", "## Model + fox"]
    assert "adapters: fox\n" in talk("/adapter", named=False, flags=("--resume",)).err
    assert "adapters: owl\n" in talk("/adapter", named=False, flags=("--resume", "--adapter", "owl")).err
    run_cli("run", "-c", "-p", "once", "--max-tokens", "2")
    assert adapters_of_answers()[-1] == [{"name": fox, "scale": 1.0}]
    exported = run_cli("sessions", "export", "last", "--format", "json").json["sessions"][0]["messages"]
    assert exported[1]["facts"]["adapters"] == [half]


def test_a_chat_opened_in_another_has_its_own_adapters(talk) -> None:
    talk("one", flags=("--adapter", "fox"))
    result = talk("two", "/adapter owl", "/sessions one", "/adapter")
    assert "adapters: fox, as of its last answer" in result.err and "adapters: fox\n" in result.err


def test_a_chat_that_another_model_goes_on_with_names_the_adapters_of_its_own(talk) -> None:
    talk("one", flags=("--adapter", "fox"))
    for result in (
        run_cli("chat", "other", "--plain", "--resume", stdin=b"/adapter\n"),
        run_cli("chat", "other", "--plain", stdin=b"/sessions last\n/adapter\n"),
    ):
        assert "its last answer was given by" in result.err and "with fox: " in result.err
        assert result.code == 0 and "adapters: none\n" in result.err


@pytest.mark.parametrize("command", ["chat --plain --resume", "run -c -p once --max-tokens 2"])
def test_an_adapter_that_is_gone_is_named_and_the_chat_goes_on_without_it(talk, made: Path, command: str) -> None:
    copy = made / f"gone{len(command)}"
    shutil.copytree(made / "fox", copy)
    talk("one", flags=("--adapter", f"{copy.name}:2", "--adapter", "owl"))
    copy.rename(copy.with_name(f"elsewhere{len(command)}"))
    result = run_cli(*command.split(), stdin=b"two\n")
    back = "once it is back, /adapter in the chat or --adapter on the line uses it again"
    gone = f"going on without the adapter {copy.name}:2: there is no adapter '{copy}' (nothing is there); {back}\n"
    assert result.code == 0 and result.err.count("going on without") == 1 and gone in result.err
    assert [[each["name"] for each in of] for of in adapters_of_answers()[1:]] == [[str(made / "owl")]]


def test_another_model_goes_on_without_adapters_that_are_not_its_own(talk) -> None:
    result = talk("one", "/model other", "/adapter", "two", flags=("--adapter", "fox"))
    assert result.code == 0 and "going on without the adapter fox" in result.err and "adapters: none\n" in result.err


@pytest.mark.parametrize(
    "command",
    [
        "run --adapter", "chat --adapter", "merge tiny", "rm", "load tiny --adapter", "stop tiny --adapter",
        "config set adapter",
    ],
)  # fmt: skip
def test_names_of_adapters_on_this_disk_are_completed(tmp_path: Path, command: str) -> None:
    repository, commit = tmp_path / "hub" / "models--maker--Fox-LoRA", "c" * 40
    write_peft(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    words, number = f"localllm {command} fo", str(1 + len(command.split()))
    asked = {"COMP_WORDS": words, "COMP_CWORD": number, "_LOCALLLM_COMPLETE": "complete_bash"}
    variables = environment(tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"), **asked)
    line = [sys.executable, "-m", "localllm"]
    assert subprocess.run(line, env=variables, capture_output=True, text=True).stdout.split() == ["fox-lora"]
