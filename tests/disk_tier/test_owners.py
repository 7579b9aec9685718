"""Whose files pages are: others neither read them nor have theirs taken for them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm.cache.page_folder import kept_pages, name_of, remove_pages, root_folders
from tests.disk_tier.support import ABOUT, FILE_BYTES, ROOT, chain, opened, path_of, put, read, stored


@contextmanager
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_files_and_folders_are_their_owners_alone(directory):
    with no_umask(), opened(directory) as tier:
        put(tier, chain(3))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) == 2 + 3 + 1


def test_a_folder_that_others_may_look_into_is_closed(directory):
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    with opened(directory) as tier:
        assert ROOT not in tier
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_neither_read_nor_written(directory, monkeypatch):
    stored(directory, chain(2))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with opened(directory, says=("it belongs to user", "user 12345")) as tier:
        assert read(tier, chain(2)) == 0
        assert put(tier, chain(3)) == [False] * 3


@pytest.mark.parametrize("is_there", [True, False])
def test_a_disk_without_permissions_is_not_trusted(directory, monkeypatch, is_there):
    if is_there:
        with opened(directory) as tier:
            put(tier, chain(2))
        directory.chmod(0o777)
    plain = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, mode=0o777, **rest: plain(path, 0o777, **rest))
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with no_umask(), opened(directory, says=("other users may write there",)) as tier:
        put(tier, chain(2))
        assert read(tier, chain(2)) == 0


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_page_that_others_may_write_is_not_believed(directory, mode):
    with opened(directory) as tier:
        put(tier, chain(2))
        path_of(directory, chain(2)[1]).chmod(mode)
        assert read(tier, chain(2)) == 1
        assert tier.num_quarantined == 1


def test_a_link_in_a_pages_place_is_neither_followed_nor_deleted(directory, tmp_path):
    keys = stored(directory, chain(3))
    elsewhere, link = tmp_path / "elsewhere", path_of(directory, keys[1])
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    with opened(directory, limit_bytes=FILE_BYTES) as tier:
        assert read(tier, keys) == 1
        put(tier, keys[1:])
        assert keys[1].digest not in tier
    assert link.is_symlink() and elsewhere.stat().st_size == FILE_BYTES


def test_a_link_in_the_place_of_a_models_folder_is_not_followed(directory, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory.mkdir(parents=True)
    (directory / name_of(ROOT)).symlink_to(elsewhere)
    with opened(directory, says=("is a link",)) as tier:
        put(tier, chain(2))
    assert not list(elsewhere.iterdir())


def test_the_folder_of_all_pages_may_lead_to_another_disk(directory, tmp_path):
    (tmp_path / "large").mkdir()
    directory.parent.mkdir()
    directory.symlink_to(tmp_path / "large")
    with opened(directory) as tier:
        put(tier, chain(2))
        assert read(tier, chain(2)) == 2


def test_what_is_not_ours_stays(directory):
    stored(directory, chain(3))
    foreign = [directory / "notes.txt", directory / name_of(ROOT) / "more.page", directory / "quarantine" / "mine"]
    foreign += [directory / ("f" * 32) / ".part.tmp"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with opened(directory, limit_bytes=FILE_BYTES) as tier:
        put(tier, chain(3, seed=2))
    remove_pages(directory, root_folders(directory))
    assert all(path.read_text() == "mine" for path in foreign)


def test_what_pages_are_of_stands_beside_them(directory):
    stored(directory, chain(3))
    (kept,) = kept_pages(directory)
    assert (kept.about, kept.num_pages, kept.num_tokens, kept.num_bytes) == (ABOUT, 3, 192, 3 * FILE_BYTES)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"model": 3}', b"\xff", b"[" * 70_000, b'{"a": "b"'])
def test_a_broken_description_is_none(directory, text):
    stored(directory, chain(1))
    (directory / name_of(ROOT) / "about.json").write_bytes(text)
    assert kept_pages(directory)[0].about == {}
    stored(directory, chain(2))
    assert kept_pages(directory)[0].about == ABOUT
