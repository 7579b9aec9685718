"""Models that think before they answer, at the command line: the answer alone is printed, apart from the thought."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.dialogue import Dialogue
from localllm.chat.harmony import HarmonySplitter
from localllm.chat.recorder import export_chat
from localllm.chat.thoughts import THOUGHT_MARKS, Splitter, Thinking, effort_variables
from localllm.config import load_settings
from localllm.errors import UsageError
from localllm.hub.names import TINY_DIRECTORY
from localllm.text.chat_template import ChatTemplate
from localllm.text.grammar.grammar import Grammar
from tests.cli_support import Result, run_cli
from tests.speaker import EFFORT, KEEPING, OPENING, SWITCHED, THINKS, write_speaker
from tests.thinning import every_other

Thinkers = dict[str, Path]
THOUGHT, ANSWER = "Hm, an owl.", "Once upon a time."
TEMPLATES = {"switched": SWITCHED, "opening": OPENING, "effort": EFFORT, "keeping": KEEPING}
HARMONY = (
    "{% if reasoning_effort is defined %}<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_SAID = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}"


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> Thinkers:
    """Models that think and answer always the same, by what their templates know of it."""
    folder = tmp_path_factory.mktemp("thinkers")
    return {name: write_speaker(folder / name, THINKS, template) for name, template in TEMPLATES.items()}


@pytest.fixture(params=["switched", "opening"])
def thinker(request: pytest.FixtureRequest, thinkers: Thinkers) -> Path:
    return thinkers[request.param]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(model: Path | str, *arguments: str | Path) -> Result:
    return run_cli("run", model, "-p", "A tale, please.", *arguments)


def prompt_of(model: Path | str, *arguments: str | Path) -> str:
    result = run(model, *arguments, "--show-prompt")
    assert result.code == 0, result.err
    return result.out.decode()


@pytest.mark.parametrize("how", every_other(["", "--no-stream", "--beams 2", "--stats", "--best-of 2"]))
def test_the_answer_alone_goes_to_stdout(thinker: Path, how: str) -> None:
    result = run(thinker, *how.split())
    assert (result.code, result.out.decode()) == (0, f"{ANSWER}\n"), result.err
    assert THOUGHT not in result.err


def test_of_several_answers_each_is_printed_alone(thinker: Path) -> None:
    assert run(thinker, "--n", "2").out.decode() == f"{ANSWER}\n---\n{ANSWER}\n"


@pytest.mark.parametrize("how", every_other(["", "--best-of 2", "--n 2", "--beams 2", "--beams 2 --n 2"]))
def test_json_has_what_was_thought_beside_the_text(thinker: Path, how: str) -> None:
    told = run(thinker, "--json", *how.split()).json
    for answer in told.get("answers", [told])[:1] if "--beams" in how else told.get("answers", [told]):
        assert (answer["text"], answer["reasoning"]) == (ANSWER, THOUGHT)
        assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("how", [(), ("--n", "2")])
def test_each_event_tells_them_apart(thinker: Path, how: tuple[str, ...]) -> None:
    lines = [json.loads(line) for line in run(thinker, "--jsonl", *how).out.splitlines()]
    first = [line for line in lines if line.get("index", 0) == 0]
    assert "".join(line.get("text", "") for line in first) == ANSWER
    assert "".join(line.get("reasoning", "") for line in first) == THOUGHT
    assert first[-1]["type"] == "finish"


def test_an_answer_without_a_thought_has_no_reasoning() -> None:
    result = run_cli("run", "tiny", "-p", "Hi.", "--max-tokens", "3", "--json")
    assert "reasoning" not in result.json


def test_a_job_gives_answers_without_thoughts(thinker: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 1}\n')
    result = run_cli("run", thinker, "--batch", tmp_path / "prompts.jsonl")
    first, second = map(json.loads, result.out.splitlines())
    assert (first["text"], first["reasoning"]) == (ANSWER, THOUGHT)
    assert second["text"] == "" and "1 of 2 answers are empty" in result.err


def test_what_is_thought_is_shown_on_stderr_where_that_is_asked_for(thinker: Path) -> None:
    for how in ((), ("--no-stream",), ("--n", "2")):
        result = run(thinker, "--show-thoughts", *how)
        assert f"{THOUGHT}\n" in result.err and THOUGHT not in result.out.decode()


@pytest.mark.parametrize("how", [("--json",), ("--jsonl",), ("--show-prompt",), ("--raw",)])
def test_show_thoughts_is_refused_where_it_would_show_nothing(thinker: Path, how: tuple[str, ...]) -> None:
    result = run(thinker, "--show-thoughts", *how)
    assert result.code == 2 and "--show-thoughts" in result.err


def test_a_raw_prompt_has_all_of_its_answer(thinkers: Thinkers) -> None:
    model = thinkers["switched"]
    assert run(model, "--raw").out.decode() == f"{''.join(THINKS)}\n"
    assert "reasoning" not in run(model, "--raw", "--json").json
    assert run(model, "--raw", "--think", "on").code == 2


def test_an_answer_that_is_cut_in_its_thought_is_empty_and_that_is_told(thinkers: Thinkers) -> None:
    for name, most in (("switched", "3"), ("opening", "1")):
        for how in ((), ("--no-stream",), ("--beams", "2")):
            result = run(thinkers[name], "--max-tokens", most, *how)
            assert (result.code, result.out) == (0, b""), result.err
            assert "the answer is empty: it was cut in its thought" in result.err
        told = run(thinkers[name], "--max-tokens", most, "--json")
        assert (told.json["text"], told.json["reasoning"]) == ("", THOUGHT) and "is empty" in told.err


def test_a_model_that_ends_in_its_thought_has_said_nothing(tmp_path: Path) -> None:
    model = write_speaker(tmp_path / "model", ["<think>", "Hm."], SWITCHED)
    result = run(model)
    assert result.out == b"" and "said nothing behind what it thought" in result.err


def test_the_form_is_the_answers_and_not_the_thoughts(thinker: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["a fox", "an owl"]}')
    result = run(thinker, "--schema", schema, "--strict")
    assert result.code == 0 and json.loads(result.out) in ("a fox", "an owl"), result.err
    told = run(thinker, "--schema", schema, "--json").json
    assert json.loads(told["text"]) in ("a fox", "an owl") and told["reasoning"] == THOUGHT
    cut = run(thinker, "--schema", schema, "--strict", "--max-tokens", "2")
    assert (cut.code, cut.out) == (7, b"")


# What is asked of the template


@pytest.mark.parametrize(
    ("name", "think", "ending"),
    [
        ("switched", "on", "<|assistant|>"),
        ("switched", "off", "<think>\n\n</think>\n\n"),
        ("opening", "on", "<think>\n"),
        ("effort", "off", "<think>\n\n</think>\n\n"),
        ("effort", "high", "<|assistant|>"),
    ],
)
def test_think_reaches_the_template(thinkers: Thinkers, name: str, think: str, ending: str) -> None:
    prompt = prompt_of(thinkers[name], "--think", think)
    assert prompt.endswith(ending) and ("Reasoning: high" in prompt) is (think == "high")


@pytest.mark.parametrize(("name", "think"), [("switched", "low"), ("opening", "off"), ("opening", "high")])
def test_what_a_template_has_no_switch_for_is_refused(thinkers: Thinkers, name: str, think: str) -> None:
    for how in ((), ("--show-prompt",)):
        result = run(thinkers[name], "--think", think, *how)
        assert result.code == 2 and f"--think {think} is not possible with this model" in result.err


def test_a_model_that_does_not_think_is_not_made_to() -> None:
    assert run_cli("run", "tiny", "-p", "Hi.", "--think", "on").code == 2
    assert run_cli("run", "tiny", "-p", "Hi.", "--max-tokens", "2", "--think", "off").code == 0


def test_a_setting_that_a_model_has_no_use_for_is_told_of(thinkers: Thinkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_THINK", "off")
    assert prompt_of(thinkers["switched"]).endswith("</think>\n\n")
    result = run(thinkers["opening"])
    assert result.code == 0 and "think = off (LOCALLLM_THINK) changes nothing" in result.err
    monkeypatch.setenv("LOCALLLM_THINK", "often")
    assert run(thinkers["opening"]).code == 2


def test_thoughts_are_shown_by_a_setting(thinkers: Thinkers, own_home: Path) -> None:
    (own_home / "config").mkdir(parents=True)
    (own_home / "config" / "config.toml").write_text("show_thoughts = true\n")
    assert f"{THOUGHT}\n" in run(thinkers["switched"]).err
    assert run(thinkers["switched"], "--json").code == 0


def test_a_file_goes_before_a_setting_and_a_flag_before_both(
    thinkers: Thinkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "messages.json"
    asked = {"enable_thinking": True, "add_generation_prompt": True}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi."}], **asked}))

    def closes(*arguments: str) -> bool:
        given = ("run", thinkers["switched"], "--messages", path, "--show-prompt", *arguments)
        return b"</think>" in run_cli(*given).out

    monkeypatch.setenv("LOCALLLM_THINK", "off")
    assert not closes() and closes("--think", "off")


def test_a_job_asks_the_template_too(thinkers: Thinkers, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def prompt_tokens(think: str) -> int:
        result = run_cli("run", thinkers["switched"], "--batch", tmp_path / "prompts.jsonl", "--think", think)
        return int(result.json["usage"]["prompt_tokens"])

    assert prompt_tokens("off") > prompt_tokens("on")


# What of it the next question has in front


@pytest.mark.parametrize("name", ["switched", "opening", "keeping"])
def test_the_next_question_has_no_thoughts_in_front(thinkers: Thinkers, name: str) -> None:
    for most in ("40", "3" if name == "switched" else "1"):  # whole, and cut in its thought
        first = run(thinkers[name], "--max-tokens", most)
        assert first.code == 0, first.err
        prompt = next_prompt(thinkers[name])
        assert THOUGHT not in prompt and prompt.count(ANSWER) == (most == "40") and "And then?" in prompt


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_a_template_has_the_thoughts_of_earlier_answers_and_keeps_or_drops_them(tmp_path: Path, name: str) -> None:
    thought = "{% if m.NAME %}[{{ m.NAME }}]{% endif %}".replace("NAME", name)
    keeping = KEEPING.replace("{{ m.content }}", f"{thought}{{{{ m.content }}}}")
    for folder, template in (("kept", keeping), ("dropped", keeping.replace("%}[", "and loop.last %}["))):
        model = write_speaker(tmp_path / folder, THINKS, template)
        assert run(model).code == 0
        assert (f"<|assistant|>[{THOUGHT}]{ANSWER}" in next_prompt(model)) is (folder == "kept")


def test_a_plain_chat_tells_them_apart_and_changes_how_much_is_thought(thinkers: Thinkers) -> None:
    lines = "Hi.\n/think off\nHi.\n/think low\n/set think high\n/think maybe\n/think -\n/think\n"
    result = run_cli("chat", thinkers["switched"], "--plain", stdin=lines.encode())
    assert result.out.decode() == f"{ANSWER}\n{ANSWER}\n" and THOUGHT not in result.err
    refused = ("/think low is not possible", "/think high is not possible", "/think knows no 'maybe'")
    for told in (*(f"error: {each}" for each in refused), "fix:   /think on", "thinking: the model's default"):
        assert told in result.err
    assert "thinking: off" in result.err and "/set" not in result.err
    shown = run_cli("chat", thinkers["switched"], "--plain", "--show-thoughts", stdin=b"Hi.\n")
    assert THOUGHT in shown.err and shown.out.decode() == f"{ANSWER}\n"
    cut = run_cli("chat", thinkers["opening"], "--plain", "--max-tokens", "1", stdin=b"Hi.\n")
    assert cut.out == b"" and "the answer is empty" in cut.err
    assert run_cli("chat", thinkers["opening"], "--plain", "--think", "off", stdin=b"Hi.\n").code == 2


def test_a_chat_that_is_gone_on_with_shows_its_last_answer_alone(thinkers: Thinkers) -> None:
    run_cli("chat", thinkers["opening"], "--plain", stdin=b"Hi.\n")
    resumed = run_cli("chat", "--resume", "--plain", stdin=b"")
    assert ANSWER in resumed.err and THOUGHT not in resumed.err


# What is written of it


def talk(model: Path, *lines: str, flags: tuple[str, ...] = ()) -> None:
    result = run_cli("chat", model, "--plain", *flags, stdin="".join(f"{line}\n" for line in lines).encode())
    assert result.code == 0 and "error" not in result.err, result.err


def next_prompt(model: Path) -> str:
    """Of the chat that is kept last."""
    return run_cli("run", model, "-c", "-p", "And then?", "--show-prompt").out.decode()


@pytest.mark.parametrize("name", ["switched", "opening", "keeping"])
def test_a_saved_chat_has_the_answer_alone_and_goes_on_as_it_was(thinkers: Thinkers, tmp_path: Path, name: str) -> None:
    model, first, second = thinkers[name], tmp_path / "a.json", tmp_path / "b.json"
    talk(model, "Hi.", f"/save {first}", "And?")
    prompt = next_prompt(model)
    messages = json.loads(first.read_text())["messages"]
    assert messages == [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT},
    ]
    talk(model, f"/load {first}", f"/save {second}", "And?")
    assert next_prompt(model) == prompt and second.read_text() == first.read_text()
    first.write_text(json.dumps([*messages, {"role": "user", "content": "And then?"}]))
    asked = run_cli("run", model, "--messages", first, "--show-prompt").out.decode()
    talk(model, "Hi.")
    assert asked == next_prompt(model) and THOUGHT not in asked


@pytest.mark.parametrize(("name", "most"), [("switched", "3"), ("opening", "1")])
def test_an_answer_cut_in_its_thought_is_saved_as_that(
    thinkers: Thinkers, tmp_path: Path, name: str, most: str
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    talk(thinkers[name], "Hi.", f"/save {first}", flags=("--max-tokens", most))
    cut = json.loads(first.read_text())["messages"][-1]
    assert cut == {"role": "assistant", "content": "", "reasoning_content": THOUGHT}
    talk(thinkers[name], f"/load {first}", f"/save {second}")
    assert second.read_text() == first.read_text()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "\n\n </think> ends a thought."},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [{"id": "a"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "<think>a</think>b"}]},
        {"role": "assistant", "content": "b", "reasoning_content": "a </think> b [/THINK]"},
        {"role": "user", "content": "<think>a</think>b", "reasoning_content": "c"},
    ],
)
def test_a_message_is_saved_as_it_was_loaded(message: dict[str, Any], tmp_path: Path) -> None:
    dialogue = Dialogue(load_settings({}))
    dialogue.load([message])
    dialogue.save(tmp_path / "a.json", overwrite=False)
    assert json.loads((tmp_path / "a.json").read_text())["messages"] == [message]


@pytest.mark.parametrize("name", ["switched", "opening"])
def test_a_kept_chat_is_shown_with_the_answer_alone(thinkers: Thinkers, tmp_path: Path, name: str) -> None:
    talk(thinkers[name], "Hi.")
    shown = run_cli("sessions", "show", "last").out.decode()
    assert f"## Model\n\n> {THOUGHT}\n\n{ANSWER}\n" in shown and "think>" not in shown
    assert run_cli("sessions", "export", "last").out.decode() == shown
    told = run_cli("sessions", "show", "last", "--json").json["messages"]
    assert "reasoning_content" not in told[0]
    assert (told[1]["content"], told[1]["reasoning_content"]) == (ANSWER, THOUGHT)
    export_chat("last", tmp_path / "a.json")
    question, answer = json.loads((tmp_path / "a.json").read_text())["sessions"][0]["messages"]
    assert "reasoning_content" not in question
    assert (answer["content"], answer["reasoning_content"]) == (ANSWER, THOUGHT)


def test_an_imported_chat_goes_on_as_the_one_that_was_exported(
    thinkers: Thinkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("switched", "opening", "keeping"):
        file = tmp_path / f"{name}.json"
        monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / name))
        talk(thinkers[name], "Hi.")
        prompt = next_prompt(thinkers[name])
        assert run_cli("sessions", "export", "--all", "-o", file).code == 0
        monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / f"{name}-2"))
        assert run_cli("sessions", "import", file).code == 0
        assert next_prompt(thinkers[name]) == prompt
        assert run_cli("sessions", "export", "--all", "--format", "json").out == file.read_bytes()


# Harmony


@pytest.fixture
def harmony(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose answers are in the format of gpt-oss, and whatever form is asked for the same."""
    model = tmp_path / "harmony"
    shutil.copytree(TINY_DIRECTORY, model)
    (model / "chat_template.jinja").write_text(HARMONY)
    said = Grammar("lark", f"start: {json.dumps(HARMONY_SAID)}")
    monkeypatch.setattr(Thinking, "grammar", lambda _self, _form: said)
    return model


def test_harmony_is_told_apart(harmony: Path) -> None:
    result = run(harmony, "--show-thoughts")
    assert (result.code, result.out.decode()) == (0, f"{ANSWER}\n") and f"{THOUGHT}\n" in result.err
    told = run(harmony, "--json").json
    assert (told["text"], told["reasoning"]) == (ANSWER, THOUGHT)
    prompt = next_prompt(harmony)
    assert THOUGHT not in prompt and f"<|channel|>final<|message|>{ANSWER}<|end|>" in prompt
    cut = run(harmony, "--max-tokens", "12")
    assert cut.out == b"" and "the answer is empty" in cut.err


def test_harmony_thinks_as_much_as_is_asked_for(harmony: Path) -> None:
    assert "Reasoning: low" in prompt_of(harmony, "--think", "low")
    assert prompt_of(harmony, "--think", "off").endswith("<|start|>assistant<|channel|>final<|message|>")
    assert prompt_of(harmony, "--think", "on").endswith("<|start|>assistant")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        *((text, text) for text in ("assistant", "to=", "as")),
        *((text, "") for text in ("<|chan", "<|channel|>fin", " \n", "")),
    ],
)
def test_a_short_answer_without_a_header_is_said_and_a_header_that_was_cut_is_not(written: str, told: str) -> None:
    splitter = HarmonySplitter()
    parts = [part for letter in written for part in splitter.feed(letter)] + splitter.end()
    assert "".join(text for is_thought, text in parts if not is_thought) == told


# Real templates


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen-Qwen3-0.6B", {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}),
        ("HuggingFaceTB-SmolLM3-3B", {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}),
        ("openai-gpt-oss-120b", {"on": {}, "off": {}, "low": {"reasoning_effort": "low"}}),
        ("Qwen-Qwen2.5-7B-Instruct", {"off": {}}),
    ],
)
def test_real_templates_are_told_what_they_know(
    shared_data: Callable[[str], Path], name: str, known: dict[str, Any]
) -> None:
    template = ChatTemplate(shared_data(f"chat_templates/jinja/{name}.jinja").read_text(encoding="utf-8"))
    for effort in ("on", "off", "low"):
        if effort in known:
            assert effort_variables(template, effort) == known[effort]
        else:
            with pytest.raises(UsageError):
                effort_variables(template, effort)


@pytest.mark.parametrize(
    ("source", "effort", "told"),
    [
        ("{{ thinking }}", "off", {"thinking": False}),
        ("{{ messages[0].thinking }}<think>", "on", {}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{% if reasoning_effort == 'none' %}{% endif %}[THINK]", "off", {"reasoning_effort": "none"}),
        ("{% if reasoning_effort == 'no_think' %}{% endif %}<think>", "off", {"reasoning_effort": "no_think"}),
        ("{{ thinking_effort }}", "high", {"thinking_effort": "high"}),
        ("{{ thinking_mode }}<mm:think>", "off", {"thinking_mode": "disabled"}),
        ("{{ thinking_budget }}<seed:think>", "off", {"thinking_budget": 0}),
        ("{{ thinking_budget }}<seed:think>", "on", {}),
        ("{{ thinking_budget }}<seed:think>", "low", {"thinking_budget": 512}),
    ],
)
def test_a_template_is_told_by_the_name_that_it_has_for_it(source: str, effort: str, told: dict[str, Any]) -> None:
    assert effort_variables(ChatTemplate(source), effort) == told


def test_a_level_that_a_template_refuses_is_refused() -> None:
    template = ChatTemplate("{% if effort not in ('low', 'high') %}{{ raise_exception('low or high') }}{% endif %}"
                            .replace("effort", "(reasoning_effort or 'low')") + "{{ messages }}")  # fmt: skip
    assert effort_variables(template, "high") == {"reasoning_effort": "high"}
    with pytest.raises(UsageError) as caught:
        effort_variables(template, "medium")
    assert "low or high" in caught.value.why


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        *((f"{opened}\nHm.\n{close}\n\nYes, </b>.", "Hm.\n", "Yes, </b>.") for opened, close in THOUGHT_MARKS.items()),
        ("<think>Hm.</think>\n<response>\nYes.\n</response>\n", "Hm.", "Yes.\n"),
        ("<think>Hm.</think><response>A </response> is a mark.", "Hm.", "A </response> is a mark."),
        ("<response>Yes.</response>", "", "<response>Yes.</response>"),
        ("<think>Hm.</think><resp", "Hm.", "<resp"),
    ],
)
def test_marks_of_every_kind_separate_a_thought_in_whatever_pieces(text: str, thought: str, said: str) -> None:
    choose = random.Random(text)
    for most in (1, 2, 5, len(text)):
        splitter, found = Splitter(), []
        rest = text
        while rest:
            length = choose.randint(1, most)
            found += splitter.feed(rest[:length])
            rest = rest[length:]
        found += splitter.end()
        parts = ["".join(part for is_thought, part in found if is_thought is which) for which in (True, False)]
        assert parts == [thought, said]
