"""Where packed models rest, what is found of them, and what is left when they are deleted."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from localllm.errors import CheckpointError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub import ModelFiles, describe, list_models
from localllm.hub.locks import exclusive, reading
from localllm.hub.names import TINY_DIRECTORY
from localllm.hub.packed import packed_directory, packed_recipes, packed_root, source_id
from tests.fake_hub import COMMIT
from tests.hub.support import REPO, make_folder, names_in, other_tools_snapshot, remove

CONFIG = '{"model_type": "llama"}'
SHARDED = "maker/sharded"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "mine", config__json=CONFIG, model__safetensors="weights")


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, str(folder))


def of_the_hub(repo: str = REPO, commit: str = COMMIT) -> ModelFiles:
    return ModelFiles(Path("/nowhere"), repo, repo, commit)


def pack(files: ModelFiles, weights: str = "int4-g64", *, whole: bool = True, size_bytes: int = 1000) -> Path:
    directory = packed_directory(files, weights)
    directory.mkdir(parents=True)
    (directory / "embed.safetensors").write_bytes(bytes(size_bytes))
    if whole:
        (directory / "index.json").write_text("{}")
    return directory


def rows() -> dict[str, object]:
    listed = list_models()
    return {row.name: (row.state, [(packed.weights, packed.state) for packed in row.packed]) for row in listed}


# The key


def test_each_repository_commit_and_format_has_a_folder_of_its_own():
    cases = [(REPO, COMMIT), (REPO, "f" * 40), ("other/model", COMMIT), ("maker/model.1", COMMIT)]
    places = [packed_directory(of_the_hub(*case), weights) for case in cases for weights in ("int8", "int4-g64")]
    assert len(set(places)) == 8
    assert all(place.is_relative_to(packed_root() / "hub") for place in places)
    assert source_id(of_the_hub()) == f"{REPO}@{COMMIT}"


def test_where_a_model_would_be_packed_creates_nothing(folder, cache):
    packed_directory(files_of(folder), "int8")
    packed_recipes(files_of(folder))
    assert not cache.exists()


@pytest.mark.parametrize("change", ["config", "weights", "bytes alone", "time", "second file", "renamed", "index"])
def test_a_folder_that_has_changed_does_not_find_what_was_packed_of_it(folder, change):
    pack(files_of(folder))
    before = source_id(files_of(folder))
    assert packed_recipes(files_of(folder)) == ["int4-g64"]
    weights = folder / "model.safetensors"
    state = weights.stat()
    match change:
        case "config":
            (folder / "config.json").write_text(CONFIG + " ")
        case "weights":
            weights.write_text("WEIGHTS!")
            os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
        case "bytes alone":
            time.sleep(0.05)  # a file's times move in steps of up to 10 ms
            weights.write_text("WEIGHTS")
            os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
        case "time":
            os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        case "second file":
            (folder / "more.safetensors").touch()
        case "renamed":
            weights.rename(folder / "other.safetensors")
        case "index":
            (folder / "model.safetensors.index.json").write_text("{}")
    assert packed_recipes(files_of(folder)) == [] and source_id(files_of(folder)) != before


def test_a_folder_is_known_by_a_link_and_with_other_files_but_a_copy_is_another_one(folder, tmp_path):
    pack(files_of(folder))
    (tmp_path / "link").symlink_to(folder)
    (folder / "README.md").write_text("words")
    assert packed_recipes(files_of(tmp_path / "link")) == packed_recipes(files_of(folder)) == ["int4-g64"]
    assert source_id(files_of(shutil.copytree(folder, tmp_path / "copy"))) != source_id(files_of(folder))


def test_a_folder_within_a_folder_has_its_own(folder, hub):
    inner = make_folder(folder / "inner", config__json=CONFIG, model__safetensors="weights")
    for model in (folder, inner):
        pack(files_of(model), "int8")
    assert {name for name in rows() if name != "tiny"} == {str(folder), str(inner)}
    remove(str(folder), packed_only=True)
    assert packed_recipes(files_of(inner)) == ["int8"]


@pytest.mark.parametrize("name", ["../int4", "..", ".", "", "int4/x", "/int4", "INT4", "int4\n", "a" * 5000, "@x", "-"])
def test_a_format_that_is_no_name_is_refused(name):
    with pytest.raises(UsageError):
        packed_directory(of_the_hub(), name)


@pytest.mark.parametrize(
    ("repo", "commit"),
    [*((repo, COMMIT) for repo in ("../x", "a/../..", "a/b/c", "/etc")), *((REPO, key) for key in ("..", None, ""))],
)
def test_a_repository_or_commit_that_would_climb_out_is_refused(repo, commit):
    with pytest.raises(UsageError):
        packed_directory(of_the_hub(repo, commit), "int8")


def test_a_folder_without_a_config_is_an_error_that_names_it(tmp_path):
    folder = make_folder(tmp_path / "my model")
    with pytest.raises(CheckpointError, match="my model") as caught:
        packed_directory(files_of(folder), "int8")
    assert caught.value.fix == f"ls -l '{folder}'"


# What is listed


def test_a_list_has_what_is_packed_of_each_model(hub, folder):
    snapshot = other_tools_snapshot(hub)
    files = ModelFiles(snapshot, SHARDED, SHARDED, COMMIT)
    pack(files, "int8")
    pack(files, "nf4", whole=False)
    assert packed_recipes(files) == ["int8"]
    pack(files_of(folder))
    pack(ModelFiles(TINY_DIRECTORY, "tiny"), "int4-g32")
    assert rows() == {
        "tiny": ("installed", [("int4-g32", "whole")]),
        SHARDED: ("installed", [("int8", "whole"), ("nf4", "unfinished")]),
        str(folder): ("folder", [("int4-g64", "whole")]),
    }


def test_packed_weights_whose_checkpoint_is_gone_are_listed_as_orphans(hub, folder):
    pack(of_the_hub())
    pack(files_of(folder))
    shutil.rmtree(folder)
    orphan = ("orphan", [("int4-g64", "orphan")])
    assert rows() == {"tiny": ("installed", []), f"{REPO}@{COMMIT}": orphan, str(folder): orphan}


def test_what_was_packed_before_a_folder_changed_is_listed_with_it_as_an_orphan(hub, folder):
    pack(files_of(folder))
    (folder / "config.json").write_text(CONFIG + "\n")
    pack(files_of(folder), "int8")
    state, packed = rows()[str(folder)]
    assert state == "folder" and sorted(packed) == [("int4-g64", "orphan"), ("int8", "whole")]


def test_a_listed_size_counts_the_files_and_no_links(hub, folder, tmp_path):
    (tmp_path / "large").write_bytes(bytes(10_000))
    directory = pack(files_of(folder), size_bytes=300)
    (directory / "link").symlink_to(tmp_path / "large")
    (directory / "other name").hardlink_to(tmp_path / "large")  # what would not be freed
    (packed,) = describe(str(folder)).packed
    assert (packed.directory, packed.size_bytes) == (directory, 302)


def test_a_description_has_what_is_packed_of_every_revision(hub):
    other_tools_snapshot(hub)
    pack(of_the_hub(SHARDED))
    pack(of_the_hub(SHARDED, "f" * 40))
    states = [packed.state for packed in describe(SHARDED).packed]
    assert states == ["whole", "orphan"]


def test_packed_weights_that_may_not_be_looked_into_are_listed_as_unfinished(hub, folder, monkeypatch):
    directory = pack(files_of(folder))
    real = os.stat

    def stat(path: str | Path, **named: object) -> os.stat_result:
        if isinstance(path, str | Path) and directory in Path(path).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    assert rows()[str(folder)] == ("folder", [("int4-g64", "unfinished")])


def test_a_link_that_leads_to_itself_is_no_model(hub, folder):
    link = pack(files_of(folder)).with_name("int8")
    link.symlink_to(link)
    assert rows()[str(folder)] == ("folder", [("int4-g64", "whole")])


def test_strangers_in_the_cache_are_no_models(hub, cache):
    (cache / "packed" / "elsewhere" / f"@{COMMIT}" / "int8").mkdir(parents=True)
    for place in ("hub/a/b/@xyz/int8", "hub/@abcdef0/int8", f"hub/a/@{COMMIT}/int8", f"hub/a/b/@{COMMIT}/.x"):
        (cache / "packed" / place).mkdir(parents=True)
    (cache / "packed" / "hub" / "a" / "b" / f"@{COMMIT}" / "int8").write_text("a file")
    assert list(rows()) == ["tiny"]


# What is deleted


def test_removing_a_model_frees_what_was_packed_of_it(hub, cache):
    other_tools_snapshot(hub)
    pack(of_the_hub(SHARDED), size_bytes=5000)
    pack(of_the_hub(SHARDED, "f" * 40), size_bytes=7000)
    files = [path for root in (hub.cache_dir, cache) for path in root.rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files if not path.is_symlink())
    assert remove(SHARDED) == taken > 12_000
    assert [*cache.rglob("*"), *hub.cache_dir.glob("models--*")] == [cache / "packed"]
    with pytest.raises(ModelNotFoundError):
        remove(SHARDED)


def test_removing_one_revision_keeps_what_was_packed_of_another(hub):
    other_tools_snapshot(hub)
    other = pack(of_the_hub(SHARDED, "f" * 40))
    pack(of_the_hub(SHARDED))
    remove(f"{SHARDED}@{COMMIT}")
    assert packed_recipes(of_the_hub(SHARDED)) == [] and (other / "index.json").exists()


def test_only_what_is_packed_can_be_removed(hub):
    snapshot = other_tools_snapshot(hub)
    pack(of_the_hub(SHARDED), size_bytes=5000)
    assert remove(SHARDED, packed_only=True) == 5002
    assert (snapshot / "config.json").exists()
    with pytest.raises(ModelNotFoundError):
        remove(SHARDED, packed_only=True)


def test_the_files_of_a_folder_are_never_touched(hub, folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    pack(files_of(folder), size_bytes=5000)
    with pytest.raises(UsageError) as refused:
        remove(str(folder))
    assert "--packed" in refused.value.fix and packed_recipes(files_of(folder)) == ["int4-g64"]
    assert remove(str(folder), packed_only=True) == 5002
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("packed_only", [True, False])
@pytest.mark.parametrize("name", ["folder", "revision", "repository"])
def test_packed_weights_without_a_checkpoint_can_be_removed(hub, folder, cache, name, packed_only):
    pack(of_the_hub(), size_bytes=5000)
    pack(files_of(folder), size_bytes=5000)
    shutil.rmtree(folder)
    word = {"folder": str(folder), "revision": f"{REPO}@{COMMIT}", "repository": REPO}[name]
    assert remove(word, packed_only=packed_only) == 5002
    assert len(list(cache.rglob("index.json"))) == 1


def test_a_revision_that_is_not_known_removes_nothing(hub, cache):
    pack(of_the_hub())
    for word in (f"{REPO}@main", f"{REPO}@{'e' * 40}"):
        with pytest.raises(ModelNotFoundError):
            remove(word, packed_only=True)
    assert packed_recipes(of_the_hub()) == ["int4-g64"]


def test_a_link_in_the_place_of_packed_weights_is_deleted_and_not_followed(hub, tmp_path):
    outside = make_folder(tmp_path / "outside", index__json="{}", precious="x")
    link = packed_directory(of_the_hub(), "int8")
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    inside = pack(of_the_hub(), "nf4")
    (inside / "linked").symlink_to(outside)
    remove(REPO, packed_only=True)
    assert names_in(outside) == {"index.json", "precious"} and not link.is_symlink()
    assert not inside.exists()


@pytest.mark.parametrize(
    ("linked", "refusal"),
    [("hub", "is not deleted"), ("hub/maker", "nothing of"), (f"hub/{REPO}/@{COMMIT}", "is not deleted")],
)
def test_nothing_is_deleted_through_a_linked_folder(hub, cache, tmp_path, linked, refusal):
    directory = pack(of_the_hub())
    outside, link = tmp_path / "outside", cache / "packed" / linked
    link.rename(outside)
    link.symlink_to(outside)
    with pytest.raises(LocalLLMError, match=refusal):
        remove(REPO, packed_only=True)
    assert (directory / "index.json").exists()


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_whole(hub, monkeypatch):
    directory = pack(of_the_hub())
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            assert (directory / ".lock").exists(), "another process might begin to pack here"
            raise OSError(5, "Input/output error")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(LocalLLMError, match="could not be deleted"):
        remove(REPO, packed_only=True)
    assert names_in(directory) == {"embed.safetensors"}


def test_a_cache_that_is_itself_a_link_is_used_and_freed(hub, cache, tmp_path):
    (tmp_path / "disk").mkdir()
    cache.symlink_to(tmp_path / "disk")
    pack(of_the_hub())
    assert remove(REPO, packed_only=True) == 1002
    assert not list((tmp_path / "disk").rglob("*.safetensors"))


@pytest.mark.parametrize("whole", [True, False])
def test_what_another_process_packs_is_not_deleted_and_neither_is_the_rest(hub, whole):
    busy, idle = pack(of_the_hub(SHARDED), "int8", whole=whole), pack(of_the_hub(SHARDED), "nf4")
    snapshot = other_tools_snapshot(hub)
    with exclusive(busy, lambda _: None), pytest.raises(LocalLLMError) as refused:
        remove(SHARDED)
    assert str(os.getpid()) in refused.value.why and (busy / "index.json").exists() == whole
    assert (idle / "index.json").exists() and (snapshot / "config.json").exists()
    assert remove(SHARDED, packed_only=True) > 2000


def test_what_another_process_reads_is_not_deleted(hub):
    directory = pack(of_the_hub())
    index = directory / "index.json"
    with reading(index), reading(index):
        with pytest.raises(LocalLLMError, match="not deleted"):
            remove(REPO)
        assert names_in(directory) == {"index.json", "embed.safetensors"}
    remove(REPO)
    assert not directory.exists()


def test_a_lock_that_its_holder_left_behind_holds_nothing(hub):
    directory = pack(of_the_hub())
    (directory / ".lock").write_text("12345")
    remove(REPO)
    assert not directory.exists()
