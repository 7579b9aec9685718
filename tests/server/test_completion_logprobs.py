"""How likely the tokens of a prompt are, as programs that score texts ask for it, beside transformers; and where tokens
begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from localllm import hub
from tests.server.support import Json, Running, running

PATH = "/v1/completions"
Score = Callable[[list[int]], list[float]]
SENTENCES = [
    "Once upon a time there was a fox who found a lantern.",
    "The owl in the barn was very old.",
    "A small boat went out to sea at night.",
    "She gave the bread to the hungry bird.",
    "There were seven stones on the hill.",
    "He said nothing, and the door was shut.",
    "Snow fell on the roof of the little house.",
    "In the garden grew a tree with golden leaves.",
    "The king had lost his ring in the river.",
    "A long, long way from here lived a bear: it was \u00fcberaus m\u00fcde \u2014 so tired!",
]


@pytest.fixture(scope="module")
def exact() -> Iterator[Running]:
    with running("tiny", dtype="fp32") as server:
        yield server


@pytest.fixture(scope="module")
def scores() -> Score:
    """Of each token but the first, by transformers."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(hub.locate("tiny").directory, dtype=torch.float32).eval()

    def of(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = peer(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]

    return of


def asked(server: Running, **more: Any) -> list[Json]:
    """The choices, by their numbers."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, **more}
    found: list[Json] = server.answer(PATH, body)["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize("as_ids", [False, True])
def test_ten_sentences_are_as_likely_as_transformers_finds_them(exact: Running, scores: Score, as_ids: bool) -> None:
    ids = [exact.engine.encode(text) for text in SENTENCES]
    choices = asked(exact, prompt=ids if as_ids else SENTENCES)
    for choice, own in zip(choices, ids, strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == len(own) + 1
        assert told["token_logprobs"][1 : len(own)] == pytest.approx(scores(own), abs=1e-3)
        for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert logprob in top.values() and 1 <= len(top) <= 2


def test_a_long_prompt_is_read_in_pieces_and_scored_whole(exact: Running, scores: Score) -> None:
    ids = exact.engine.encode(" ".join(SENTENCES * 3))
    assert len(ids) > 300
    for _ in range(2):  # the second time much of it is known, and has to be computed all the same
        (choice,) = asked(exact, prompt=ids, max_tokens=0)
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores(ids), abs=1e-3)


@pytest.mark.parametrize("ids", [[5], [5, 6]])
def test_the_shortest_prompts_are_scored(exact: Running, ids: list[int]) -> None:
    (choice,) = asked(exact, prompt=ids, max_tokens=0)
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) and choice["logprobs"]["token_logprobs"][0] is None


def test_nothing_is_said_where_no_token_is_wanted(server: Running) -> None:
    body = {"model": "tiny", "prompt": SENTENCES[:2], "max_tokens": 0, "n": 2, "best_of": 0, "temperature": 0}
    reply = server.post(PATH, body).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]] == [("", "length")] * 4
    assert reply["usage"]["completion_tokens"] == 0 and reply["usage"]["prompt_tokens"] > 10
    echoed = server.post(PATH, {**body, "echo": True, "best_of": 3}).json()["choices"]
    assert [choice["text"] for choice in echoed] == [text for text in SENTENCES[:2] for _ in range(2)]
    events = server.events(PATH, {**body, "stream": True, "echo": True, "logprobs": 0})
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == 0) == SENTENCES[0]


def test_the_token_that_ends_a_text_has_a_log_probability(server: Running) -> None:
    end = next(iter(server.engine.eos_ids))
    (choice,) = asked(server, prompt="Once", max_tokens=4, logit_bias={str(end): 100})
    assert choice["finish_reason"] == "stop" and choice["text"] == "Once"
    assert len(choice["logprobs"]["tokens"]) == len(server.engine.encode("Once")) + 1
    assert choice["logprobs"]["text_offset"][-1] == len("Once")


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon a time", "\u00fcber \U0001f989\u2014an owl", [5, 6, 7]])
def test_offsets_count_the_characters_of_the_text(server: Running, echo: bool, prompt: Any) -> None:
    (choice,) = asked(server, prompt=prompt, max_tokens=8, echo=echo)
    told, text = choice["logprobs"], choice["text"]
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][0] == 0 and told["text_offset"][-1] <= len(text)
    for begin, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert "\\x" in token or text[begin : begin + len(token)] in (token, token.lstrip()), (begin, token)


def test_a_stream_tells_what_the_whole_reply_does(server: Running) -> None:
    wanted = {"prompt": ["Once upon", "An owl"], "max_tokens": 5, "n": 1}
    whole = asked(server, **wanted)
    body = {"model": "tiny", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True, "stream": True, **wanted}
    events = server.events(PATH, body)
    for index, choice in enumerate(whole):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in own) == choice["text"]
        told = [each["logprobs"] for each in own if each["logprobs"] is not None]
        for name in ("tokens", "text_offset"):
            assert [value for each in told for value in each[name]] == choice["logprobs"][name]


def test_answers_beside_a_scored_prompt_are_what_they_are_alone(server: Running) -> None:
    plain = {"prompt": SENTENCES[0], "max_tokens": 6, "n": 2, "temperature": 1.0, "echo": False}
    alone = [choice["text"] for choice in asked(server, **plain)]
    beside = [choice["text"] for choice in asked(server, **{**plain, "echo": True})]
    assert beside == [SENTENCES[0] + text for text in alone]
    searched = {"prompt": SENTENCES[0], "max_tokens": 4, "n": 2, "beam_width": 2, "echo": True}
    lengths = {len(choice["logprobs"]["tokens"]) for choice in asked(server, **searched)}
    assert min(lengths) > len(server.engine.encode(SENTENCES[0]))


def test_too_many_log_probabilities_of_a_prompt_are_refused(server: Running) -> None:
    body = {"model": "tiny", "prompt": ["owl " * 900] * 16, "n": 16, "logprobs": 20, "echo": True, "max_tokens": 0}
    assert server.error(PATH, body)["param"] in ("logprobs", "n")
