"""list, show and rm."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from localllm.errors import DownloadError, LocalLLMError, UsageError
from localllm.hub import contents, describe, list_models, locate
from localllm.hub.locks import exclusive
from localllm.hub.repo_cache import RepoCache
from localllm.runtime.model_catalog import fact_lines
from tests.fake_hub import COMMIT, Fault
from tests.hub.support import PIECE, REPO, REPOSITORY, assert_whole, make_folder, other_tools_snapshot, remove

# list, show, rm


def test_a_list_shows_whole_models_and_unfinished_ones_with_their_bytes(fake, hub, fetch):
    fetch("maker/sharded")
    fake.faults.append(Fault("cut", PIECE))
    fake.always = Fault("reset")
    with pytest.raises(DownloadError):
        fetch()
    whole, part = (model for model in reversed(list_models()) if model.name != "tiny")
    assert (whole.name, whole.model_type, whole.partial_bytes) == ("maker/sharded", "llama", 0)
    assert whole.size_bytes > PIECE
    assert (part.name, part.directory, part.size_bytes) == (REPO, None, 0)
    assert part.partial_bytes >= 0.9 * PIECE


def test_a_list_leaves_out_what_does_not_run(hub):
    snapshot = other_tools_snapshot(hub, "config.json")
    (snapshot / "config.json").write_text('{"model_type": "bert"}')
    assert [model.name for model in list_models() if model.name != "tiny"] == []


def test_a_description_has_the_numbers_of_the_config(hub, fetch):
    fetch()
    described = describe(REPO)
    assert (described.model_type, described.layers, described.context) == ("llama", 2, 512)
    assert described.size_bytes > 3 * PIECE


def test_a_description_says_that_vision_is_left_out(tmp_path):
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
    sees = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    folders = [
        make_folder(tmp_path / name, config__json=json.dumps(config), model__safetensors="")
        for name, config in (("text", text), ("sees", sees))
    ]
    only_text, described = (describe(str(folder)) for folder in folders)
    assert (only_text.left_out, described.left_out, described.layers) == ((), ("vision",), 4)
    assert ("left out", "vision") in list(fact_lines(described))


def test_a_model_that_is_not_here_is_described_by_its_entry(hub):
    described = describe("gemma-2-9b")
    assert described.files is None and described.entry is not None
    assert (described.entry.gated, described.context) == (True, 8192)


def test_removing_one_revision_keeps_the_files_that_another_shares(fake, hub, fetch):
    fetch()
    fake.commit = "f" * 40
    fake.repositories[REPO]["config.json"] += b" "
    second = fetch()
    assert remove(f"{REPO}@{COMMIT}") < 2000
    assert_whole(second, fake.repositories[REPO])
    assert locate(REPO).directory == second


def test_removing_touches_no_target_of_a_link(hub, tmp_path):
    snapshot = other_tools_snapshot(hub)
    outside = make_folder(tmp_path / "outside", precious="x")
    (snapshot / "linked").symlink_to(outside)
    (snapshot / "linked-file").symlink_to(outside / "precious")
    remove("maker/sharded")
    assert (outside / "precious").read_text() == "x"


def test_removing_a_linked_repository_removes_the_link(hub, tmp_path):
    other_tools_snapshot(hub)
    folder = RepoCache(hub.cache_dir, "maker/sharded").folder
    moved = folder.rename(tmp_path / "moved")
    folder.symlink_to(moved)
    assert locate("maker/sharded").directory.is_dir()
    assert remove("maker/sharded") == 0 and not folder.is_symlink()
    assert (moved / "snapshots" / COMMIT / "config.json").is_file()


@pytest.mark.parametrize("name", ["tiny", "."])
def test_what_is_not_in_the_cache_is_not_removed(hub, name):
    with pytest.raises(UsageError, match="not removed"):
        remove(name)


def test_a_disk_that_refuses_a_removal_is_told(hub, monkeypatch):
    other_tools_snapshot(hub)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(LocalLLMError, match="could not be deleted") as caught:
        remove("maker/sharded")
    assert "Permission denied" in caught.value.why


def test_a_model_that_is_being_fetched_is_not_removed(hub):
    snapshot = other_tools_snapshot(hub)
    with (
        exclusive(RepoCache(hub.cache_dir, "maker/sharded").lock, lambda _: None),
        pytest.raises(LocalLLMError, match="being fetched"),
    ):
        remove("maker/sharded")
    assert snapshot.is_dir()


def test_the_hub_loads_no_torch_and_a_list_only_the_constants_of_huggingface_hub(tmp_path):
    code = (
        "import sys, localllm.hub; print({'huggingface_hub', 'httpx2', 'numpy', 'torch'} & {*sys.modules});"
        "localllm.hub.list_models(); print({'httpx2', 'torch'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HOME": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"set()\nset()\n"


def test_the_contents_of_a_folder_are_what_a_model_is_read_from(tmp_path):
    folder = tmp_path
    (folder / "config.json").write_text("{}")
    before = contents(folder)
    (folder / "log.txt").write_text("a step of a training")
    (folder / "trainer_state.json").write_text("{}")
    assert contents(folder) == before
    for name in ("config.json", "merges.txt", "chat_template.jinja", "model-00001-of-00001.safetensors"):
        (folder / name).write_text("{ }")
        assert contents(folder) != before
        before = contents(folder)
    (folder / "merges.txt").unlink()
    assert contents(folder) != before


def test_a_link_that_leads_nowhere_keeps_no_model_from_being_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = contents(tmp_path)
    (tmp_path / "added_tokens.json").symlink_to("nowhere")  # as an unfinished download leaves it
    assert contents(tmp_path) == before
