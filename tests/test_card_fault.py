"""A GPU that ends in a fault: one error, no traceback, and another process that computes without our kernels.

A CPU stands in for it: from the fault on, every call of its driver fails.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm import Engine, EngineConfig, SamplingParams
from localllm.config import load_settings
from localllm.engine import card, runner
from localllm.engine.request import Request
from localllm.engine.residency import Residency
from localllm.engine.runner import ModelRunner
from localllm.engine.step import StepLoop
from localllm.errors import CardFaultError, EngineGoneError, LocalLLMError
from localllm.models.offloaded_model import OffloadedModel
from localllm.runtime import engine_process
from localllm.runtime.engine_client import EngineClient
from localllm.runtime.engine_handle import EngineHandle, EnginePeer
from localllm.runtime.engine_loader import Opening
from localllm.runtime.engine_process import _serve
from localllm.runtime.engine_server import EngineServer
from localllm.runtime.engine_thread import EngineThread
from localllm.runtime.model_pool import ModelPool
from localllm.runtime.renewed_client import RenewedClient
from localllm.runtime.selection import Selection, selected
from tests.cli_support import run_cli
from tests.engine_support import generated, token_ids
from tests.patience import PATIENCE_S

ILLEGAL = "CUDA error: an illegal memory access was encountered"
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Card:
    """forwards: so many go well, then the card has faulted; None: all."""

    def __init__(self) -> None:
        self.forwards: int | None = None
        self.has_faulted = False
        self.verdicts: list[str] = []

    def require(self) -> None:
        if self.has_faulted:
            raise RuntimeError(f"{ILLEGAL}\nCUDA kernel errors might be asynchronously reported at some other call")

    def compute(self) -> None:
        if self.forwards is not None:
            self.has_faulted |= self.forwards == 0
            self.forwards -= 1
        self.require()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Card:
    gpu, forward = Card(), ModelRunner.forward

    def computed(runner: ModelRunner, *arguments: Any, **named: Any) -> torch.Tensor:
        gpu.compute()
        return forward(runner, *arguments, **named)

    monkeypatch.setattr(ModelRunner, "forward", computed)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda _device=None: gpu.require())
    # Engines in threads of one process would listen at one address, and one would be a client of the one before.
    monkeypatch.setattr(engine_process, "listening", lambda _path: _raise(LocalLLMError("nobody listens")))
    monkeypatch.setattr(card, "why_not", lambda _device: "")
    monkeypatch.setattr(card, "keep_fault", lambda _device, reason: gpu.verdicts.append(reason))
    return gpu


def tiny() -> Engine:
    return Engine.load("tiny", EngineConfig(device="cpu"))


def test_a_fault_ends_the_engine_and_is_kept_with_the_models_name(gpu: Card) -> None:
    engine = tiny()
    expected = generated(engine, (5, 6, 7), 4)
    assert len(expected) == 4 and not gpu.verdicts
    gpu.forwards = 2
    said: list[int] = []
    with pytest.raises(CardFaultError) as caught:
        said += token_ids(engine.generate((5, 6, 7), SHORT))
    assert "tiny" in caught.value.what and caught.value.why == ILLEGAL
    assert gpu.verdicts == [f"with tiny they ended in a fault of the GPU ({ILLEGAL})"]
    assert "torch's operators compute then" in str(caught.value.fixes[0])
    engine.close()


def test_kernels_are_not_given_up_for_this_process_where_the_card_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators would do no better, and the verdict is for other processes."""
    given_up: list[object] = []
    monkeypatch.setattr(runner, "give_up", lambda *arguments: given_up.append(arguments))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: _raise(RuntimeError(ILLEGAL)))
    of_a_card = ModelRunner.__new__(ModelRunner)
    of_a_card.model = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        of_a_card._give_up_kernels(RuntimeError("a launch failed"))
    assert given_up == []


def test_where_operators_computed_nothing_is_kept(gpu: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "why_not", lambda _device: "triton is not installed")
    engine, gpu.forwards = tiny(), 0
    with pytest.raises(CardFaultError) as caught:
        list(engine.generate((5, 6, 7), SHORT))
    assert not gpu.verdicts and str(caught.value.fixes[0]) == "run it again"
    engine.close()


def test_an_error_that_is_none_of_the_card_ends_one_request(gpu: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", lambda *_, **__: _raise(RuntimeError("something else")))
        *_, finished = engine.generate((5, 6, 7), SHORT)
    assert str(finished.error) == "something else" and not gpu.verdicts  # type: ignore[union-attr]
    assert generated(engine, (5, 6, 7), 4)
    engine.close()


def test_a_fault_that_shows_while_a_token_is_taken_ends_the_engine(gpu: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(*_: Any) -> Any:
        gpu.has_faulted = True
        gpu.require()

    engine = tiny()
    monkeypatch.setattr(StepLoop, "_sampled", sampled)
    with pytest.raises(CardFaultError):
        list(engine.generate((5, 6, 7), SHORT))
    assert len(gpu.verdicts) == 1
    engine.close()


def _raise(error: Exception) -> Any:
    raise error


def test_a_fault_while_a_model_is_prepared_is_told_as_well(gpu: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is closed then meets a driver that answers nothing."""

    def warm_up(_residency: Residency, _measuring: object) -> None:
        gpu.has_faulted = True
        gpu.require()

    monkeypatch.setattr(Residency, "warm_up", warm_up)
    monkeypatch.setattr(OffloadedModel, "close", lambda _placed: gpu.require())
    with pytest.raises(CardFaultError):
        Engine.load("tiny", EngineConfig(device="cpu", weights="int8"))
    assert len(gpu.verdicts) == 1


# Front ends


def selection() -> Selection:
    resolved = load_settings({}, environ={})
    return selected(resolved, "tiny")


def served() -> EngineClient:
    """By a thread that does what an engine's process does."""
    own, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            _serve(theirs, selection(), Opening())

    threading.Thread(target=serve, daemon=True).start()
    return EngineClient(selection().files.directory, EnginePeer(lambda: own))


def asked(service: EngineHandle) -> list[int]:
    engine = service.wait_loaded(PATIENCE_S)
    assert engine is not None
    return token_ids(list(service.submit(Request((5, 6, 7), SHORT))))


@pytest.fixture
def service() -> Iterator[RenewedClient]:
    service = RenewedClient(served(), served)
    yield service
    service.close()


def test_a_servers_engine_goes_on_in_another_process(gpu: Card, service: RenewedClient) -> None:
    """Every client hears why the one before has ended; nobody has to ask twice after that."""
    expected = asked(service)
    gpu.forwards = 2
    stream = service.submit(Request((5, 6, 7), SHORT))
    with pytest.raises(EngineGoneError) as caught:
        list(stream)
    assert ILLEGAL in caught.value.why and "tiny" in caught.value.why
    failure = service.client.wait_ended()
    assert isinstance(failure, EngineGoneError) and failure.why == caught.value.why
    gpu.forwards, gpu.has_faulted = None, False  # as the card is for another process
    assert token_ids(list(service.submit(Request((5, 6, 7), SHORT)))) == expected and len(gpu.verdicts) == 1


def test_a_server_loads_the_model_again_for_the_next_request(gpu: Card) -> None:
    async def answers() -> None:
        resolved = load_settings({}, environ={})
        pool = ModelPool(selection(), resolved, lambda *_: served(), on_demand=False)
        await pool.ready(pool.first)
        expected = await asyncio.to_thread(asked, pool.first.loaded_handle())
        gpu.forwards = 1
        with pytest.raises(EngineGoneError):
            await asyncio.to_thread(asked, pool.first.loaded_handle())
        await asyncio.to_thread(pool.first.loaded_handle().wait_ended)
        gpu.forwards, gpu.has_faulted = None, False
        await pool.ready(pool.first)
        assert await asyncio.to_thread(asked, pool.first.loaded_handle()) == expected
        await asyncio.to_thread(pool.close)

    asyncio.run(answers())


def test_a_load_that_ends_in_a_fault_is_an_engine_that_is_gone(gpu: Card) -> None:
    gpu.has_faulted = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "warm_up", lambda *_: gpu.require())
        client = served()
        with pytest.raises(EngineGoneError, match="gone"):
            client.wait_loaded(PATIENCE_S)
        assert isinstance(client.wait_ended(), EngineGoneError)
    client.close()


def test_who_asks_after_a_fault_and_before_the_end_of_the_process_hears_that_the_engine_is_gone(
    gpu: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()

    def watch(engine: EngineThread, _server: EngineServer) -> None:
        """Leave the process there."""
        engine.wait_ended()
        has_ended.set()

    monkeypatch.setattr(engine_process, "_watch", watch)
    client = served()
    engine = client.wait_loaded(PATIENCE_S)
    assert engine is not None
    gpu.forwards = 0
    client.submit(Request((5, 6, 7), SHORT))
    assert has_ended.wait(PATIENCE_S)
    for ask in (lambda: list(client.submit(Request((5, 6, 7), SHORT))), engine.status):
        with pytest.raises(EngineGoneError) as caught:
            ask()
        assert ILLEGAL in caught.value.why and "tiny" in caught.value.why
    client.close()


def test_run_ends_in_one_error(gpu: Card) -> None:
    gpu.forwards = 2
    result = run_cli("run", "tiny", "-p", "Once", "--seed", "1", "--no-attach")
    assert result.code == 1 and "the GPU ended in a fault with tiny" in result.err and ILLEGAL in result.err
    assert "Traceback" not in result.err and result.err.count("the GPU ended in a fault") == 1


def test_a_chat_ends_in_one_error_and_says_how_it_goes_on(gpu: Card) -> None:
    gpu.forwards = 40
    result = run_cli("chat", "tiny", "--plain", "--no-attach", "--max-tokens", "30", stdin=b"one\ntwo\nthree\nfour\n")
    assert result.code == 1 and result.err.count("the GPU ended in a fault") == 1
    assert "Traceback" not in result.err
