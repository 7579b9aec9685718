"""Locks of folders: what they hold, and what they do not."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from localllm.hub import locks
from localllm.hub.locks import LOCK, exclusive


def test_the_lock_of_a_deleted_folder_is_no_lock(tmp_path):
    folder = tmp_path / "p"
    with exclusive(folder, lambda _: None):
        shutil.rmtree(folder)
        with exclusive(folder, lambda _: pytest.fail("the old holder holds nothing that is there")):
            pass


def test_who_leaves_a_deleted_folder_leaves_the_lock_of_the_next_holder_there(tmp_path):
    folder = tmp_path / "p"
    with ExitStack() as first:
        first.enter_context(exclusive(folder, lambda _: None))
        shutil.rmtree(folder)
        with exclusive(folder, lambda _: None):
            first.close()
            assert (folder / LOCK).exists()


def test_a_lock_that_lost_its_name_before_it_was_taken_is_not_held(tmp_path, monkeypatch):
    real = locks._lock
    tries: list[bool] = []

    def lock(descriptor: int, *, alone: bool) -> bool:
        if not tries:
            (tmp_path / LOCK).unlink()  # whoever held it left between our opening and our locking it
        tries.append(alone)
        return real(descriptor, alone=alone)

    monkeypatch.setattr(locks, "_lock", lock)
    with exclusive(tmp_path, lambda _: None):
        assert (tmp_path / LOCK).exists()
    assert len(tries) == 2


def test_a_folder_in_which_nothing_was_put_does_not_stay(tmp_path):
    with exclusive(tmp_path / "p", lambda _: None):
        pass
    assert not (tmp_path / "p").exists()


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "p"
    folder.mkdir()
    real = os.mkdir

    def mkdir(path: Path, mode: int = 0o777) -> None:
        try:
            real(path, mode)
        except FileExistsError:
            folder.rmdir()  # its last holder leaves between the two looks that pathlib takes
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    with exclusive(folder, lambda _: None):
        assert (folder / LOCK).exists()


def test_a_folder_that_cannot_be_made_is_not_tried_for_ever(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "not" / "there")
    with pytest.raises(FileExistsError), exclusive(tmp_path / "link" / "p", lambda _: None):
        pass


def test_a_lock_that_is_a_link_to_nowhere_is_refused(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "not" / "there")
    with pytest.raises(OSError, match="symbolic links"), exclusive(tmp_path, lambda _: None):
        pass
