"""`localllm cache`: what is kept of conversations, and how to be rid of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localllm.cache import disk, page_folder
from localllm.cache.disk import DiskTier
from localllm.cache.page_folder import name_of
from localllm.cache.snapshots import snapshot_key
from tests.cli_support import run_cli
from tests.disk_tier.support import ABOUT, FILE_BYTES, PATIENCE_S, ROOT, chain, opened, path_of, put, read, refusing


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOCALLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.setattr(disk, "KEPT_FREE_BYTES", 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kv"


OTHER = bytes(32)


@pytest.fixture
def kept(directory: Path) -> Path:
    """Three pages of one model, two of another."""
    with opened(directory) as tier:
        put(tier, chain(3))
    tier = DiskTier(directory, OTHER, {"model": "tiny", "kv": "int8"}, 1 << 30, [].append)
    put(tier, chain(2, root=OTHER))
    assert tier.close(PATIENCE_S)
    os.utime(path_of(directory, chain(3)[2]), (4_000_000_000, 4_000_000_000))
    return directory


@pytest.mark.parametrize("line", [["cache"], ["cache", "info"]])
def test_it_says_where_how_much_of_which_model_and_how_much_there_may_be(kept: Path, line: list[str]) -> None:
    result = run_cli(*line)
    lines = result.out.decode().splitlines()
    assert result.code == 0 and str(kept) in lines[0] and "34.6 KiB" in lines[0] and "at most" in lines[0]
    assert [row.split()[0] for row in lines[1:]] == ["MODEL", "org/model", "tiny"]
    assert "weights int4-g64" in lines[2] and "192" in lines[2].split()
    assert "kv int8" in lines[3] and "128" in lines[3].split()


@pytest.mark.parametrize("line", [["cache", "--json"], ["cache", "info", "--json"], ["cache", "--json", "info"]])
def test_a_program_is_told_the_same(kept: Path, line: list[str]) -> None:
    told = run_cli(*line).json
    assert told["directory"] == str(kept)
    assert (told["pages"], told["tokens"], told["size_bytes"]) == (5, 320, 5 * FILE_BYTES)
    assert told["free_bytes"] > 0 and 0 < told["limit_bytes"] <= 8 << 30
    assert told["quarantined"] == told["quarantined_bytes"] == 0
    first, second = told["models"]
    assert first == {
        "model": "org/model",
        "about": ABOUT,
        "pages": 3,
        "tokens": 192,
        "snapshots": 0,
        "size_bytes": 3 * FILE_BYTES,
        "last_used": "2096-10-02T07:06:40+00:00",
    }
    assert second["model"] == "tiny"


@pytest.mark.parametrize(
    ("value", "limit_bytes", "words"), [("3GiB", 3 << 30, "at most 3.0 GiB"), ("off", 0, "cache_disk is off")]
)
def test_the_limit_is_the_settings(monkeypatch: pytest.MonkeyPatch, value: str, limit_bytes: int, words: str) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_DISK", value)
    assert run_cli("cache", "--json").json["limit_bytes"] == limit_bytes
    assert words in run_cli("cache").out.decode()


def test_damaged_files_that_were_set_aside_are_counted(kept: Path) -> None:
    os.truncate(path_of(kept, chain(1)[0]), 100)
    with opened(kept) as tier:
        assert read(tier, chain(1)) == 0
    result = run_cli("cache")
    assert "1 damaged file (100 B) is set aside there" in result.err
    told = run_cli("cache", "--json").json
    assert (told["quarantined"], told["quarantined_bytes"]) == (1, 100)
    assert run_cli("cache", "clear", "--yes").code == 0
    assert not kept.exists()


def test_nothing_is_kept_where_nothing_was_computed(directory: Path) -> None:
    result = run_cli("cache")
    assert (result.code, result.err) == (0, "")
    assert result.out.decode().startswith(f"0 B in {directory}, at most")
    result = run_cli("cache", "clear")
    assert (result.code, result.err) == (0, f"nothing is kept in {directory}\n")
    assert not directory.exists()


def test_clearing_asks_and_without_a_terminal_deletes_nothing(kept: Path) -> None:
    result = run_cli("cache", "clear")
    assert result.code == 2 and result.error_lines[2] == "fix:   localllm cache clear --yes"
    result = run_cli("cache", "clear", "--model", "org/model")
    assert result.error_lines[2] == "fix:   localllm cache clear --model org/model --yes"
    assert run_cli("cache", "--json").json["pages"] == 5


def test_clearing_deletes_all_and_says_what_became_free(kept: Path) -> None:
    result = run_cli("cache", "clear", "--yes")
    assert result.out == b"removed what is kept of conversations: 34.6 KiB freed\n"
    assert not kept.exists()


@pytest.mark.parametrize("line", [["cache", "clear", "--json"], ["cache", "--json", "clear"]])
def test_a_program_that_clears_is_told_the_bytes(kept: Path, line: list[str]) -> None:
    result = run_cli(*line, "--yes")
    assert result.json == {"schema_version": 1, "model": None, "freed_bytes": 5 * FILE_BYTES}


def test_one_model_can_be_cleared_alone(kept: Path) -> None:
    assert run_cli("cache", "clear", "--model", "tiny", "--yes", "--json").json["freed_bytes"] == 2 * FILE_BYTES
    assert [each["model"] for each in run_cli("cache", "--json").json["models"]] == ["org/model"]
    assert not (kept / name_of(OTHER)).exists()
    with opened(kept) as tier:
        assert read(tier, chain(3)) == 3


def test_a_model_of_which_nothing_is_kept_is_named_beside_those_of_which_something_is(kept: Path) -> None:
    result = run_cli("cache", "clear", "--model", "mistral", "--yes")
    assert result.code == 3
    assert "mistral" in result.error_lines[0] and "org/model, tiny" in result.error_lines[1]
    assert result.error_lines[2] == "fix:   localllm cache info"


def test_clearing_leaves_what_is_not_ours_and_follows_no_link(kept: Path, tmp_path: Path) -> None:
    note = kept / name_of(ROOT) / "note.txt"
    note.write_text("mine")
    outside = tmp_path / "outside"
    (kept / name_of(OTHER)).rename(outside)
    (kept / name_of(OTHER)).symlink_to(outside)
    assert run_cli("cache", "clear", "--yes").code == 0
    assert note.read_text() == "mine" and len(list(outside.iterdir())) == 3
    assert (kept / name_of(OTHER)).is_symlink()


def test_a_cache_that_cannot_be_cleared_is_an_error_with_its_place(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "unlink", refusing(30))
    result = run_cli("cache", "clear", "--yes")
    assert result.code == 1 and len(result.error_lines) == 4
    assert "Read-only file system" in result.error_lines[1] and str(kept) in result.error_lines[2]


def test_control_characters_of_a_name_do_not_reach_the_terminal(directory: Path) -> None:
    tier = DiskTier(directory, ROOT, {"model": "evil\x1b[31m\nname"}, 1 << 30, [].append)
    put(tier, chain(1))
    assert tier.close(PATIENCE_S)
    out = run_cli("cache").out
    assert b"\x1b" not in out and len(out.splitlines()) == 3


def test_a_snapshot_of_states_is_no_page_of_tokens(directory: Path) -> None:
    keys = chain(3)
    with opened(directory) as tier:
        put(tier, [*keys, snapshot_key(keys[2])])
    told = run_cli("cache", "--json").json
    assert (told["pages"], told["tokens"], told["snapshots"]) == (3, 192, 1)
    assert told["size_bytes"] == 4 * FILE_BYTES and told["models"][0]["snapshots"] == 1


@pytest.mark.parametrize("used_ns", [-(10**18), 0, 10**18, 10**21, 2**63 * 10**9])
def test_a_time_that_no_clock_shows_is_shown_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, used_ns: int
) -> None:
    pages = page_folder.KeptPages("0" * 32, ABOUT, 1, 0, FILE_BYTES, used_ns)
    monkeypatch.setattr(page_folder, "kept_pages", lambda _directory: [pages])
    assert run_cli("cache").code == run_cli("cache", "--json").code == 0


def test_a_setting_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_DISK", "much")
    result = run_cli("cache")
    assert result.code == 2 and "much" in result.error_lines[0]


def test_the_default_limit_counts_what_is_held_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_folder, "free_bytes", lambda _directory: 30 << 30)
    assert page_folder.default_limit_bytes(tmp_path, 10 << 30) == 4 << 30
