"""Adapters whose files are replaced or deleted while requests run, and what waits for their memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from localllm.engine.engine import Engine
from localllm.engine.request import AdapterRef, Request, SamplingParams
from localllm.engine.step_types import Limits
from localllm.errors import AdapterError, DoesNotFitError, NonFiniteError
from localllm.hub.names import TINY_DIRECTORY
from localllm.settings import EngineConfig
from tests.engine_support import Heard, answered, steps
from tests.server.test_adapters import write_adapter

CONFIG = EngineConfig(device="cpu", dtype="fp32")
SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = tuple(range(5, 155))


def opened() -> Engine:
    """Three chunks to a prompt: what follows it waits meanwhile."""
    return Engine.load(TINY_DIRECTORY, CONFIG, limits=Limits(chunk_tokens=64))


def ref(folder: Path) -> AdapterRef:
    return AdapterRef(str(folder), name=folder.name)


def said(engine: Engine, *requests: Request) -> list[list[int]]:
    return [heard.token_ids for heard in answered(engine, *requests)]


@pytest.mark.parametrize("is_replaced", [True, False])
def test_who_follows_a_leader_goes_on_with_its_adapter(tmp_path: Path, is_replaced: bool) -> None:
    """The pages are of that one, whatever the files are by now."""
    folder, other = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    request, renewed = (Request(PROMPT, SAMPLING, adapters=(ref(each),)) for each in (folder, other))
    (old,), (new,) = said(opened(), request), said(opened(), renewed)
    assert old != new
    engine = opened()
    heard = {engine.submit(request): Heard() for _ in range(2)}
    events = engine.step()  # the leader has begun, the other one waits
    shutil.rmtree(folder)
    if is_replaced:
        shutil.copytree(other, folder)
    for event in (*events, *steps(engine)):
        heard[event.request_id].take(event)
    assert [each.token_ids for each in heard.values()] == [old, old]
    if is_replaced:
        assert said(engine, request) == [new], "no page of the old one is taken for the new one's"


def test_an_adapter_that_is_gone_ends_its_own_request_alone(tmp_path: Path) -> None:
    folder, engine = write_adapter(tmp_path / "a", 1), opened()
    plain = Request(PROMPT, SAMPLING)
    gone = Request(tuple(range(200, 390)), SAMPLING, adapters=(ref(folder),))  # longer, so due behind those who wait
    (expected,) = said(opened(), plain)  # nothing of it is cached where the second one waits for the first
    heard = [Heard() for _ in range(3)]
    by_id = dict(zip([engine.submit(each) for each in (plain, plain, gone)], heard, strict=True))
    shutil.rmtree(folder)
    for event in steps(engine):
        by_id[event.request_id].take(event)
    assert [each.token_ids for each in heard] == [expected, expected, []]
    assert isinstance(heard[2].finished.error, AdapterError)


def test_who_waits_for_memory_reads_its_adapter_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.engine import adapters

    read, names = adapters.read_adapter, list[str]()
    monkeypatch.setattr(adapters, "read_adapter", lambda path, *rest: (names.append(path.name), read(path, *rest))[1])
    engine = opened()
    requests = [Request(PROMPT, SAMPLING, adapters=(ref(write_adapter(tmp_path / name, 1)),)) for name in "ab"]
    engine.check(requests[0])
    engine.adapters.limit(engine.adapters.used_bytes * 3 // 2)
    assert all(len(each) == SAMPLING.max_tokens for each in said(engine, *requests))
    assert sorted(names) == ["a", "a", "b", "b"], "once to be checked, once when there is room"


def test_one_that_never_fits_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.engine import adapters

    monkeypatch.delattr(adapters, "read_adapter")
    engine, folder = opened(), write_adapter(tmp_path / "a", 1)
    engine.adapters.limit((folder / "adapter_model.safetensors").stat().st_size // 5)
    with pytest.raises(DoesNotFitError) as refused:
        engine.check(Request(PROMPT, SAMPLING, adapters=(ref(folder),)))
    assert "at least" in refused.value.why


def test_an_adapter_without_a_name_is_called_by_its_folder(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fox", 1, r=8)
    with pytest.raises(AdapterError) as refused:
        opened().check(Request(PROMPT, SAMPLING, adapters=(AdapterRef(str(folder)),)))
    assert refused.value.what.startswith("in the adapter fox, ") and str(tmp_path) not in str(refused.value)


def test_files_that_vanish_while_one_is_loaded_are_an_adapters_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.engine import adapters

    folder, version = write_adapter(tmp_path / "fox", 1), adapters._version

    def vanishing(named: AdapterRef) -> tuple[str, str]:
        found = version(named)
        (folder / "adapter_model.safetensors").unlink()
        return found

    monkeypatch.setattr(adapters, "_version", vanishing)
    with pytest.raises(AdapterError, match="the adapter fox cannot be read"):
        opened().check(Request(PROMPT, SAMPLING, adapters=(ref(folder),)))


def test_one_that_was_given_up_is_in_memory_again_when_it_is_checked(tmp_path: Path) -> None:
    engine, request = opened(), Request(PROMPT, SAMPLING, adapters=(ref(write_adapter(tmp_path / "a", 1)),))
    engine.check(request)
    engine.adapters.unload()
    engine.check(request)
    assert engine.adapters.used_bytes > 0


def test_an_adapter_that_makes_numbers_infinite_is_named(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "huge", 1, lora_alpha=1e9)
    file = folder / "adapter_model.safetensors"
    save_file({name: values * 1e13 for name, values in load_file(file).items()}, file)
    (heard,) = answered(opened(), Request(PROMPT, SAMPLING, adapters=(AdapterRef(str(folder), 100.0, "huge"),)))
    assert isinstance(heard.finished.error, NonFiniteError) and heard.finished.error.what.endswith("with huge")
