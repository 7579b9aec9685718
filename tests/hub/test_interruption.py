"""A pull that is interrupted, killed, or not alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import DownloadError, ModelNotFoundError
from localllm.hub import PullProgress, list_models, locate, pull
from localllm.hub.locks import exclusive
from localllm.hub.repo_cache import RepoCache
from tests.fake_hub import FakeHub
from tests.hub.support import (
    PIECE,
    REPO,
    assert_whole,
    leftovers,
    partial_path,
    sharded_model,
    single_model,
    start_pull,
)
from tests.patience import PATIENCE_S
from tests.thinning import one_in, thinned

# Interruption


def test_a_keyboard_interrupt_leaves_a_pull_that_goes_on(fake, hub, fetch):
    def interrupt(event: PullProgress) -> None:
        if event.file_done_bytes > 2 * PIECE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(REPO, progress=interrupt)
    held = partial_path(hub, fake).stat().st_size
    fake.requests.clear()
    assert_whole(fetch(), fake.repositories[REPO])
    assert fake.file_requests("model.safetensors")[0].range_start == held > 2 * PIECE


@pytest.mark.parametrize("damage", ["flip", "longer", "zeros"])
def test_a_damaged_start_of_a_file_does_not_poison_later_pulls(fake, hub, fetch, damage):
    path = partial_path(hub, fake)
    path.parent.mkdir(parents=True)
    data = bytearray(fake.repositories[REPO]["model.safetensors"])
    data[PIECE] ^= 1
    content = {"flip": data[: 2 * PIECE], "longer": data + b"x", "zeros": bytes(2 * PIECE)}[damage]
    path.write_bytes(content)
    assert_whole(fetch(), fake.repositories[REPO])
    assert leftovers(hub) == []


def test_a_link_in_the_place_of_a_partial_file_is_not_written_through(fake, hub, fetch, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    partial_path(hub, fake).parent.mkdir(parents=True)
    partial_path(hub, fake).symlink_to(target)
    with pytest.raises(DownloadError):
        fetch()
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "share", thinned([0.0, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1.0, 0.99], [0.5].__contains__)
)
def test_a_killed_pull_is_taken_up_where_it_was(fake, hub, fetch, monkeypatch, share):
    fake.repositories[REPO] = single_model(16 * PIECE)
    fake.seconds_per_chunk = 0.0005
    reached = threading.Event()
    fake.on_bytes = lambda total: reached.set() if total >= share * 16 * PIECE else None
    process = start_pull(hub)
    assert reached.wait(PATIENCE_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setattr("localllm.hub.fetch.TEMPORARY_LIFETIME_S", 0)
    path = partial_path(hub, fake)
    held = path.stat().st_size if path.exists() else 0
    sent = fake.sent_bytes("model.safetensors")
    fake.on_bytes, fake.seconds_per_chunk = None, 0
    fake.requests.clear()
    assert_whole(fetch(), fake.repositories[REPO])
    assert leftovers(hub) == []
    if sent < 16 * PIECE:
        assert {record.range_start for record in fake.file_requests("model.safetensors")} == {held}
        assert held >= 0.9 * sent - 2 * PIECE  # what was in the sockets' buffers is not lost but was never received


SYSTEM_CALLS = ("write", "fsync", "replace", "symlink", "unlink", "mkdir", "open")


def dies_at(call: int, repo: str) -> bool:
    """Pulls in a child process that is killed at its `call`-th change of the disk; False where it ended before."""
    from huggingface_hub import close_session

    close_session()  # a connection must not be shared with the child
    child = os.fork()
    if child == 0:
        count = [0]

        def dying(function: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object, **named: object) -> object:
                count[0] += 1
                if count[0] == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return counted

        try:
            for name in SYSTEM_CALLS:
                setattr(os, name, dying(getattr(os, name)))
            pull(repo)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def survives_death_at(call: int, fake: FakeHub) -> bool:
    died = dies_at(call, "maker/sharded")
    for model in list_models():
        if died and model.directory is not None and model.name != "tiny":
            assert locate(model.name)
    try:
        found = locate("maker/sharded").directory
    except ModelNotFoundError:
        assert died
    else:
        assert_whole(found, fake.repositories["maker/sharded"])
    assert_whole(pull("maker/sharded").directory, fake.repositories["maker/sharded"])
    return died


@pytest.mark.parametrize("call", one_in(15, range(1, 106)))
def test_death_at_any_change_of_the_disk_leaves_nothing_to_trip_over(fake, hub, call):
    fake.repositories["maker/sharded"] = sharded_model(100_000)
    assert survives_death_at(call, fake) or call > 80


# Two at once


def test_two_pulls_at_once_end_with_equal_bytes_where_no_lock_works(fake, hub, monkeypatch):
    monkeypatch.setattr("localllm.hub.locks._lock", lambda _, **__: True)
    fake.seconds_per_chunk = 0.002
    found: list[Path | BaseException] = []

    def work() -> None:
        try:
            found.append(pull(REPO).directory)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and isinstance(found[0], Path)
    assert_whole(found[0], fake.repositories[REPO])


def test_two_processes_share_one_download(fake, hub):
    fake.seconds_per_chunk = 0.002
    processes = [start_pull(hub) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and outputs[0] == outputs[1]
    assert_whole(Path(outputs[0].decode().strip()), fake.repositories[REPO])
    assert fake.sent_bytes("model.safetensors") == 3 * PIECE


def test_a_pull_that_waits_names_the_process_that_it_waits_for(fake, hub):
    notes: list[str] = []
    waited = threading.Event()

    def progress(event: PullProgress) -> None:
        if event.phase == "waiting":
            notes.append(event.note)
            waited.set()

    thread = threading.Thread(target=lambda: pull(REPO, progress=progress))
    with exclusive(RepoCache(hub.cache_dir, REPO).lock, lambda _: None):
        thread.start()
        assert waited.wait(PATIENCE_S)
    thread.join()
    assert notes[0] == f"process {os.getpid()} is fetching it"
