"""Ollama's Modelfile as it is read, and a preset written as one."""

from __future__ import annotations

import pytest

from localllm.errors import UsageError
from localllm.runtime.modelfile import modelfile_of, parse_modelfile

# Of Ollama's own documentation.
MARIO = """FROM llama3.2
# sets the temperature to 1 [higher is more creative, lower is more coherent]
PARAMETER temperature 1
# sets the context window size to 4096
PARAMETER num_ctx 4096

# sets a custom system message to specify the behavior of the chat assistant
SYSTEM You are Mario from super mario bros, acting as an assistant.
"""


def test_the_example_of_ollamas_documentation_is_read() -> None:
    found = parse_modelfile(MARIO, "Modelfile")
    assert found.base == "llama3.2"
    system = "You are Mario from super mario bros, acting as an assistant."
    assert found.values == {"temperature": 1.0, "ctx": 4096, "system": system}


@pytest.mark.parametrize(
    ("line", "system"),
    [
        ("SYSTEM Be brief.", "Be brief."),
        ("system   Be brief.  ", "Be brief."),
        ('SyStEm "Be brief."', "Be brief."),
        ('SYSTEM """Be brief."""', "Be brief."),
        ('SYSTEM """\nBe brief.\n  Be kind.\n"""', "\nBe brief.\n  Be kind.\n"),
        ('SYSTEM """# no comment\n\nFROM nowhere"""', "# no comment\n\nFROM nowhere"),
        ('SYSTEM "one\ntwo"', "one\ntwo"),
        ('SYSTEM """one\r\ntwo"""\r', "one\ntwo"),
        ("  SYSTEM a # is no comment", "a # is no comment"),
        ('SYSTEM say "no" or yes', 'say "no" or yes'),
        ("MESSAGE system Be brief.", "Be brief."),
        ('message system """Be\nbrief."""', "Be\nbrief."),
        ("SYSTEM first\nSYSTEM second", "second"),
    ],
)
def test_texts_are_quoted_as_ollama_has_it(line: str, system: str) -> None:
    assert parse_modelfile(f"from tiny\n{line}\n", "it").values == {"system": system}


def test_each_stop_is_one_more_and_of_other_parameters_the_last_counts() -> None:
    lines = 'parameter stop "</s>"\nPARAMETER stop AI assistant:\nPARAMETER top_k 5\nPARAMETER top_k 7\n'
    assert parse_modelfile(f"FROM tiny\n{lines}", "it").values == {"stop": ("</s>", "AI assistant:"), "top_k": 7}


def test_a_length_without_end_and_a_random_seed_are_as_the_model_has_it() -> None:
    found = parse_modelfile("FROM tiny\nPARAMETER num_predict -1\nPARAMETER seed -1\n", "it")
    assert found.values == {"max_tokens": None, "seed": None}


def test_what_changes_no_answer_is_told() -> None:
    found = parse_modelfile('FROM tiny\nLICENSE """\nMIT\n"""\nREQUIRES 0.14.0\n', "it")
    assert found.idle == ["LICENSE", "REQUIRES"] and not found.values


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("SYSTEM a", "it has no FROM"),
        ("FROM tiny\nFROM other", "second FROM in it:2"),
        ("FROM", "FROM is empty in it:1"),
        ("FROM tiny\nPARAMETER temperature", "PARAMETER is empty in it:2"),
        ("FROM tiny\n\nFRUM other", "unknown instruction 'FRUM' in it:3"),
        ('FROM tiny\nSYSTEM """a\nb', "not closed"),
        ('FROM tiny\nTEMPLATE """{{ .Prompt }}"""', "TEMPLATE cannot be honoured in it:2"),
        ("FROM tiny\nADAPTER", "ADAPTER is empty in it:2"),
        ("FROM tiny\nMESSAGE user Hello", "MESSAGE user cannot be honoured in it:2"),
        ("FROM tiny\nPARAMETER num_thread 4", "num_thread has no effect, in it:2"),
        ("FROM tiny\nPARAMETER temprature 1", "unknown parameter 'temprature' in it:2"),
        ("FROM tiny\nPARAMETER temperature hot", "temperature is 'hot' in it:2"),
        ("FROM tiny\nPARAMETER top_p 1.5", "top_p is 1.5 in it:2"),
        ("FROM tiny\nPARAMETER num_ctx 0", "ctx is 0 in it:2"),
        ("FROM tiny\nPARAMETER num_ctx 4096.5", "ctx is '4096.5' in it:2"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_line(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_modelfile(text, "it")
    assert what in caught.value.what and caught.value.why and caught.value.fix


@pytest.mark.parametrize("line", ["PARAMETER attend top:4", "BUILD now"])
def test_no_word_is_named_as_the_nearest_of_one_that_is_like_none(line: str) -> None:
    with pytest.raises(UsageError, match="unknown") as caught:
        parse_modelfile(f"FROM tiny\n{line}", "it")
    assert "nearest" not in caught.value.why and caught.value.fix == "delete it there"


def test_a_preset_as_a_modelfile_is_read_as_the_same() -> None:
    values = {
        "system": ' Two lines,\n"quoted" ',
        "stop": ("END", "a\nb", ' "x"'),
        "temperature": 0.25,
        "top_k": 0,
        "ctx": 4096,
        "max_tokens": 9,
        "seed": 2**53 - 1,
        "repeat_last_n": -1,
    }
    written = modelfile_of("tiny", {"model": "tiny", **values, "think": "off"})
    found = parse_modelfile(written, "it")
    assert found.base == "tiny" and found.values == values and "# think = off\n" in written
