"""Requests in, events out: what the engine promises a front end."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from localllm import Engine, EngineThread, FinishedEvent, PrefillEvent, Request, SamplingParams, TokenEvent
from localllm.engine import planner, sampler
from localllm.engine.events import Event
from localllm.engine.loader import LoadedModel
from localllm.engine.step_types import Chunk, Limits
from localllm.errors import (
    ContextOverflowError,
    DoesNotFitError,
    LocalLLMError,
    ModelNotFoundError,
    NonFiniteError,
    TemplateError,
    UsageError,
)
from localllm.layers.mlp import MLP
from localllm.offload.planner.machine import Memory
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.engine_support import steps
from tests.patience import PATIENCE_S
from tests.thinning import every_other

CTX = 128
Give = Callable[[int], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama")
    return path


def loaded(directory: Path, limits: Limits | None = None, ctx: int | None = None) -> Engine:
    return Engine.load(directory, EngineConfig(device="cpu", dtype="fp32", ctx=ctx), limits=limits)


@pytest.fixture
def engine(directory: Path) -> Engine:
    return loaded(directory, ctx=CTX)


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def run(engine: Engine, text: str = "once", params: SamplingParams | None = None, **wishes: object) -> list[Event]:
    return list(engine.generate(list(ids(text)), params or SamplingParams(**wishes)))  # type: ignore[arg-type]


def tokens(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent | FinishedEvent))


def last(events: list[Event]) -> FinishedEvent:
    assert isinstance(events[-1], FinishedEvent)
    return events[-1]


@pytest.mark.parametrize("length", every_other([48, 40, 47, 100, 49]))
def test_a_prompt_is_read_to_its_end_where_a_chunk_ends_at_the_change_of_rotation(tmp_path: Path, length: int) -> None:
    write_checkpoint(tmp_path, "phi3-longrope")  # which rotates otherwise from 48 tokens on
    said = []
    for chunk_tokens in (16, 512):
        engine = Engine.load(tmp_path, EngineConfig(dtype="fp32"), limits=Limits(chunk_tokens=chunk_tokens))
        request_id = engine.submit(Request(tuple(range(length)), SamplingParams(temperature=0, max_tokens=12)))
        steps = [engine.step() for _ in range(40)]
        said.append([event.token_id for events in steps for event in events if isinstance(event, TokenEvent)])
        assert not engine.has_work, f"request {request_id} goes round in circles"
    assert len(said[0]) == 12 and said[0] == said[1]


def drive(engine: Engine) -> dict[int, list[Event]]:
    """Step until nothing is left; the events of each request."""
    events: dict[int, list[Event]] = {}
    for event in steps(engine):
        events.setdefault(event.request_id, []).append(event)
    return events


def test_a_request_ends_with_its_usage_and_timings(engine: Engine) -> None:
    finished = last(run(engine, "once upon", max_tokens=5, temperature=0, ignore_eos=True))
    assert finished.finish_reason == "length"
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (9, 5)
    assert finished.timings.ttft_s and finished.timings.prefill_tok_s and finished.timings.decode_tok_s
    assert finished.timings.load_s > 0


def test_the_text_of_the_events_is_the_decoded_answer(engine: Engine) -> None:
    events = run(engine, max_tokens=60, seed=3, ignore_eos=True)
    assert text_of(events) == engine.tokenizer.decode(tokens(events))


def test_prefill_is_reported_until_the_prompt_is_read(directory: Path) -> None:
    engine = loaded(directory, Limits(chunk_tokens=16))
    events = list(engine.generate(list(range(40)), SamplingParams(max_tokens=1)))
    assert [(e.done, e.total) for e in events if isinstance(e, PrefillEvent)] == [(16, 40), (32, 40), (40, 40)]


def test_a_long_forward_tells_how_far_the_prompt_is_and_ends_with_what_is_true(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.engine.step._REPORT_S", 0.0)
    engine = loaded(directory, Limits(chunk_tokens=32))
    engine.submit(Request((1,) * 40, SamplingParams(max_tokens=2, ignore_eos=True)))
    told: list[Event] = []
    while engine.has_work:
        told += engine.step(told.append)
    prompts = [event for event in told if isinstance(event, PrefillEvent)]
    counts, blocks = [event.done for event in prompts], len(engine.model.blocks)
    assert counts[:blocks] == [32 * done // blocks for done in range(1, blocks + 1)]
    assert counts == sorted(counts) and (counts[-1], prompts[-1].total) == (40, 40)
    assert not any(isinstance(event, PrefillEvent) for event in told[told.index(prompts[-1]) + 1 :])


def test_a_service_passes_on_how_far_a_prompt_is_before_its_forward_has_ended(
    service: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.engine.step._REPORT_S", 0.0)
    first, *_ = service.submit(Request((1,) * 40, SamplingParams(max_tokens=1)))
    assert isinstance(first, PrefillEvent) and 0 < first.done < 40


def test_an_end_of_sequence_token_stops_and_is_no_part_of_the_answer(engine: Engine) -> None:
    first = tokens(run(engine, max_tokens=8, temperature=0, ignore_eos=True))
    engine.eos_ids = frozenset({first[3]})
    cut = first.index(first[3])
    events = run(engine, max_tokens=8, temperature=0)
    assert tokens(events) == first[:cut]
    assert (last(events).finish_reason, last(events).usage.completion_tokens) == ("stop", cut)


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    whole = text_of(run(engine, max_tokens=40, seed=5, ignore_eos=True))
    stop = whole[10:13]
    events = run(engine, max_tokens=40, seed=5, ignore_eos=True, stop=(stop,))
    assert text_of(events) == whole[: whole.index(stop)] and last(events).finish_reason == "stop"


@pytest.mark.parametrize(("length", "fix"), [(CTX, "--ctx"), (CTX + 1, "--ctx"), (10 * CTX, "shorten")])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(engine: Engine, length: int, fix: str) -> None:
    with pytest.raises(ContextOverflowError, match=f"{length} tokens, the context {CTX}") as caught:
        engine.submit(Request((1,) * length))
    assert fix in caught.value.fix
    assert not engine.has_work


def test_an_answer_that_reaches_the_end_of_the_context_says_length(engine: Engine) -> None:
    events = list(engine.generate([1] * (CTX - 3), SamplingParams(ignore_eos=True)))
    assert last(events).finish_reason == "length" and len(tokens(events)) == 3


@pytest.mark.parametrize(("prompt", "bias"), [((), {}), ((-1,), {}), ((272,), {}), ((1,), {9999: 1.0})])
def test_ids_that_the_model_does_not_have_are_refused(engine: Engine, prompt: tuple[int], bias: dict) -> None:
    with pytest.raises(UsageError):
        engine.submit(Request(prompt, SamplingParams(logit_bias=bias)))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_same_seed_gives_the_same_text_whatever_the_batch(engine: Engine, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=s, max_tokens=12, ignore_eos=True) for s in range(6)]
    asked = list(zip(("a", "bb" * 20, "ccc", "dddd", "ee" * 9, "f"), params, strict=True))
    alone = [tokens(run(engine, text, sampling)) for text, sampling in asked]
    requests = [engine.submit(Request(ids(text), sampling)) for text, sampling in asked]
    together = drive(engine)
    assert [tokens(together[r]) for r in requests] == alone


def test_the_same_seed_gives_the_same_text_whatever_the_chunking(engine: Engine) -> None:
    small = Engine(LoadedModel(engine.model, CTX), engine.tokenizer, limits=Limits(chunk_tokens=5))
    asked = ("a long prompt, in parts", SamplingParams(seed=9, max_tokens=12, temperature=1.0))
    assert tokens(run(small, *asked)) == tokens(run(engine, *asked))


def test_without_a_seed_two_answers_differ(engine: Engine) -> None:
    flat = {"temperature": 50.0, "max_tokens": 12, "ignore_eos": True}
    assert tokens(run(engine, **flat)) != tokens(run(engine, **flat))


def test_more_requests_than_fit_wait_their_turn(directory: Path) -> None:
    engine = loaded(directory, Limits(max_sequences=2))
    requests = [engine.submit(Request(ids("x" * n), SamplingParams(max_tokens=3, seed=n))) for n in range(1, 6)]
    assert engine.has_work and set(drive(engine)) == set(requests)


def test_an_aborted_request_keeps_what_it_has_and_others_go_on(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    expected = tokens(run(engine, "stays", params))
    stays, goes = engine.submit(Request(ids("stays"), params)), engine.submit(Request(ids("goes"), params))
    events = [event for _ in range(4) for event in engine.step()]
    engine.abort(goes)
    events += steps(engine)
    gone = [event for event in events if event.request_id == goes]
    assert last(gone).finish_reason == "cancelled"
    assert last(gone).usage.completion_tokens == len(tokens(gone)) > 0
    assert tokens([event for event in events if event.request_id == stays]) == expected


def test_an_abort_gives_the_running_forward_up_between_two_blocks(engine: Engine) -> None:
    request, seen = engine.submit(Request(ids("x" * 50), SamplingParams(max_tokens=5))), 0

    def body(x: torch.Tensor, batch: object) -> torch.Tensor:
        nonlocal seen
        seen += 1
        engine.abort(request)
        return x

    blocks = (*engine.model.blocks[:3], *(replace(block, body=body) for block in engine.model.blocks[3:]))
    object.__setattr__(engine.model, "blocks", blocks)
    events = engine.step()
    assert (last(events).finish_reason, seen, engine.has_work) == ("cancelled", 1, False)


def test_closing_the_iterator_stops_the_request(engine: Engine) -> None:
    stream = engine.generate(list(ids("once")), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.has_work


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_ends_the_answer_with_an_error_that_names_the_block(engine: Engine, value: float) -> None:
    body = engine.model.blocks[5].body
    assert isinstance(body, MLP)
    body.down_proj.tensors["weight"][3, 3] = value
    events = run(engine, max_tokens=4)
    error = last(events).error
    assert (tokens(events), last(events).finish_reason, engine.has_work) == ([], "error", False)
    assert isinstance(error, NonFiniteError) and "layers.2.mlp" in error.what


def test_a_nan_in_one_sequence_leaves_the_others_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = tokens(run(engine, "ok", params))
    engine.model.embed.matrix.tensors["weight"][200] = float("nan")
    bad, good = engine.submit(Request((200,), params)), engine.submit(Request(ids("ok"), params))
    if engine.model.config.tie_word_embeddings:
        pytest.skip("a tied head would spread the NaN to every sequence")
    events = drive(engine)
    assert last(events[bad]).finish_reason == "error"
    assert "the embedding" in str(last(events[bad]).error) and tokens(events[good]) == expected


def test_logprobs_are_those_of_the_models_own_distribution(engine: Engine) -> None:
    events = run(engine, "once", max_tokens=1, temperature=0, logprobs=4, repetition_penalty=1.5, ignore_eos=True)
    first = next(event for event in events if isinstance(event, TokenEvent))
    prompt = list(ids("once"))
    logits = engine.runner.forward([Chunk(prompt, engine.residency.new_kv(8), len(prompt))])[0]
    expected = logits.log_softmax(-1).topk(4)
    assert first.logprob is not None
    assert [entry.token_id for entry in first.logprob.top] == expected.indices.tolist()
    assert [entry.logprob for entry in first.logprob.top] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert first.logprob.logprob == pytest.approx(float(logits.log_softmax(-1)[first.token_id]), abs=1e-5)


def test_no_logprobs_without_being_asked(engine: Engine) -> None:
    assert all(event.logprob is None for event in run(engine, max_tokens=2) if isinstance(event, TokenEvent))


@pytest.fixture
def give_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def give(num_bytes: int) -> None:
        monkeypatch.setattr(planner, "process_memory", lambda *_, **__: Memory(num_bytes, 0, num_bytes))

    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    # What packing takes is a hundred times what such a model does.
    monkeypatch.setattr(planner, "as_stored", lambda _files, _name, config, _weights: (config, None))
    return give


def test_weights_that_do_not_fit_are_refused_before_they_are_read(directory: Path, give_memory: Give) -> None:
    give_memory(100_000)
    with pytest.raises(DoesNotFitError) as caught:
        loaded(directory)
    assert "KiB" in caught.value.why


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused(directory: Path, give_memory: Give) -> None:
    give_memory(400_000)  # two blocks and 128 tokens: 341 kB; 256 tokens: 472 kB
    with pytest.raises(DoesNotFitError, match="memory"):
        loaded(directory, ctx=256)


def test_a_context_that_nobody_asked_for_shrinks_to_what_fits(directory: Path, give_memory: Give) -> None:
    give_memory(440_000)
    assert 100 < loaded(directory).ctx < 256


@pytest.mark.parametrize(
    "options", [{"ctx": 100_000}, {"ctx": 0}, {"device": "tpu"}, {"dtype": "int3"}, {"threads": 0}]
)
def test_options_that_cannot_be_honoured_are_refused(directory: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Engine.load(directory, EngineConfig(**{"device": "cpu", **options}))  # type: ignore[arg-type]


def test_an_absent_model_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError):
        Engine.load("./there-is-no-such-folder")


@pytest.fixture
def service(directory: Path) -> Iterator[EngineThread]:
    service = EngineThread(lambda: loaded(directory, ctx=CTX))
    yield service
    service.close()


def test_the_service_answers_from_another_thread(service: EngineThread, engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, seed=4, ignore_eos=True)
    events = list(service.submit(Request(ids("hello"), params)))
    assert tokens(events) == tokens(run(engine, "hello", params))


def test_the_service_serves_many_threads_at_once(service: EngineThread, engine: Engine) -> None:
    params = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in range(12)]
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(lambda p=p: tokens(list(service.submit(Request(ids("hello"), p))))) for p in params]
        answers = [answer.result(PATIENCE_S) for answer in asked]
    assert answers == [tokens(run(engine, "hello", each)) for each in params]


def test_the_service_aborts_a_stream(service: EngineThread) -> None:
    stream = service.submit(Request(ids("hello"), SamplingParams(ignore_eos=True)))
    events = []
    for event in stream:
        events.append(event)
        stream.abort()
    assert last(events).finish_reason == "cancelled"


def test_a_closed_service_keeps_no_engine_and_the_next_one_not_the_service_before() -> None:
    before = EngineThread(partial(Engine.load, "tiny"))
    engine = weakref.ref(before.wait_loaded())

    def load(before: EngineThread) -> Engine:
        before.close()
        return Engine.load("tiny")

    after = EngineThread(partial(load, before))
    after.wait_loaded()
    with pytest.raises(LocalLLMError, match="closed"):
        before.submit(Request(ids("hello")))
    gc.collect()
    assert engine() is None
    service = weakref.ref(before)
    del before
    gc.collect()
    assert service() is None
    after.close()


def test_the_service_passes_on_what_stopped_the_load() -> None:
    service = EngineThread(lambda: Engine.load("./there-is-no-such-folder"))
    with pytest.raises(ModelNotFoundError):
        service.wait_loaded()


def test_the_service_refuses_an_overflowing_prompt_at_once(service: EngineThread) -> None:
    with pytest.raises(ContextOverflowError):
        service.submit(Request((1,) * CTX))


def test_perplexity_of_a_uniform_model_is_its_vocabulary(engine: Engine) -> None:
    engine.model.head.tensors["weight"].zero_()
    result = engine.perplexity(list(ids("any text at all")), ctx=8)
    assert result.perplexity == pytest.approx(272, rel=1e-4)
    assert (result.tokens, result.ctx) == (13, 8)


def test_perplexity_is_the_mean_surprise_of_the_tokens(engine: Engine, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = list(ids("the cat sat on the mat, and the dog looked on"))
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    windows = [torch.tensor([window]) for window in (text[:32], text[32:])]
    with torch.no_grad():
        nll = sum(float(peer(window, labels=window).loss) * (window.numel() - 1) for window in windows)
    assert engine.perplexity(text, ctx=32).nll == pytest.approx(nll / (len(text) - 2), rel=1e-4)


def test_perplexity_does_not_depend_on_the_chunking(engine: Engine) -> None:
    text = list(ids("the cat sat on the mat, and the dog looked on"))
    small = Engine(LoadedModel(engine.model, CTX), engine.tokenizer, limits=Limits(chunk_tokens=7))
    assert small.perplexity(text, ctx=40).nll == pytest.approx(engine.perplexity(text, ctx=40).nll, rel=1e-5)


ABSENT = "does not exist"


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [([1], "nothing to predict"), ([1, 272, 2], ABSENT), ([1, 2, 1 << 40], ABSENT), ([-1, 1, 2], ABSENT)],
    ids=str,
)
def test_perplexity_is_of_two_tokens_at_least_that_the_model_has(engine: Engine, token_ids: list, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine.perplexity(token_ids)


def test_chat_messages_go_through_the_models_template(engine: Engine) -> None:
    prompt = engine.encode([{"role": "user", "content": "hello"}])
    assert engine.tokenizer.decode(prompt) == "[user] hello\n[assistant] "
    assert engine.encode("hello") == list(b"hello") and engine.encode([1, 2, 3]) == [1, 2, 3]


def test_a_model_without_a_template_still_continues_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").unlink()
    engine = loaded(tmp_path)
    assert run(engine, max_tokens=2)
    with pytest.raises(TemplateError):
        engine.encode([{"role": "user", "content": "hello"}])


def test_two_iterators_read_in_turn_both_get_all_their_events(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone = [tokens(run(engine, text, params)) for text in ("one", "another")]
    first, second = (engine.generate(list(ids(text)), params) for text in ("one", "another"))
    events = [list(pair) for pair in zip(first, second, strict=True)]
    assert [tokens([pair[side] for pair in events]) for side in (0, 1)] == alone


def test_requests_that_come_and_go_change_no_token_of_another_in_bf16(directory: Path) -> None:
    engine = Engine.load(directory, EngineConfig(device="cpu", dtype="bf16"), limits=Limits(chunk_tokens=16))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=10 + seed, ignore_eos=True) for seed in range(6)]
    asked = [("prompt " * (1 + 2 * seed), sampling) for seed, sampling in enumerate(params)]
    alone = [tokens(run(engine, text, sampling)) for text, sampling in asked]
    events: dict[int, list[Event]] = {}
    for text, sampling in asked:
        events[engine.submit(Request(ids(text), sampling))] = []
        for _ in range(3):
            for event in engine.step():
                events[event.request_id].append(event)
    for request, more in drive(engine).items():
        events[request] += more
    assert [tokens(answer) for answer in events.values()] == alone


def test_a_long_prompt_does_not_starve_a_running_answer(directory: Path) -> None:
    engine = loaded(directory, Limits(chunk_tokens=8))
    answering = engine.submit(Request(ids("a"), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    engine.submit(Request(ids("x" * 80), SamplingParams(max_tokens=1)))
    during = [event for _ in range(10) for event in engine.step()]  # as many steps as the prompt has chunks
    assert len(tokens([event for event in during if event.request_id == answering])) == 5


def test_closing_one_iterator_delivers_what_ended_another(engine: Engine) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    first, second = (engine.generate(list(ids(text)), params) for text in ("a", "b"))
    next(first), next(second)
    engine.abort(next(second).request_id)
    first.close()  # type: ignore[attr-defined]
    assert last(list(second)).finish_reason == "cancelled"


def test_an_abort_of_another_request_does_not_throw_the_running_forward_away(engine: Engine) -> None:
    engine.submit(Request(ids("x" * 50), SamplingParams(max_tokens=1)))
    engine.abort(999)
    assert [type(event) for event in engine.step()] == [PrefillEvent, TokenEvent, FinishedEvent]


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize(("part", "act"), [("runner", "forward"), ("kv_allocator", "allocate")])
def test_memory_that_runs_out_ends_the_request_and_the_engine_goes_on(
    engine: Engine, error: Exception, part: str, act: str
) -> None:
    with mock.patch.object(getattr(engine, part), act, side_effect=error):
        finished = last(run(engine, max_tokens=2))
    assert (finished.finish_reason, type(finished.error)) == ("error", DoesNotFitError)
    assert last(run(engine, max_tokens=2, ignore_eos=True)).finish_reason == "length"


def test_a_failure_of_one_request_leaves_the_service_alive(service: EngineThread) -> None:
    service.wait_loaded()
    with mock.patch.object(sampler, "sample", side_effect=IndexError("a bug")):
        events = list(service.submit(Request(ids("hello"), SamplingParams(max_tokens=2))))
    assert isinstance(last(events).error, IndexError)
    assert tokens(list(service.submit(Request(ids("hello"), SamplingParams(max_tokens=2, ignore_eos=True)))))


def test_a_yarn_model_reaches_its_stretched_context(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama-yarn-scaled")
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loaded(tmp_path).ctx == 64 and loaded(tmp_path, ctx=256).ctx == 256
    with pytest.raises(UsageError, match="257"):
        loaded(tmp_path, ctx=257)


OPTIONAL = ("triton", "textual", "bitsandbytes", "starlette", "llvmlite", "transformers")


def test_the_engine_runs_without_what_it_does_not_need(directory: Path) -> None:
    code = (
        f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\n"
        "from localllm import Engine, EngineConfig, SamplingParams\n"
        f"engine = Engine.load({str(directory)!r}, EngineConfig(device='cpu'))\n"
        "print(len(list(engine.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr
