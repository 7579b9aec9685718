"""Which names mean a model, and which are refused at the door."""

from __future__ import annotations

import json
import sys
import threading
from itertools import cycle
from pathlib import Path

import pytest

from localllm.config import user_directories
from localllm.errors import LocalLLMError, ModelNotFoundError
from localllm.hub import HubSettings, describe, list_models, locate, pull
from localllm.registry import shipped_registry
from tests.fake_hub import COMMIT
from tests.forks import in_child
from tests.hub.support import SHARDS, make_folder, other_tools_snapshot, remove, single_model, use
from tests.thinning import thinned

# Names and places

HOSTILE = [
    "", "..", "../../etc/passwd", "org/../../../etc", "org/..", "..%2f..%2fetc%2fpasswd", "org%2fmodel", "org\\model",
    "..\\..\\windows", "org/model\x00", "org/model\nInjected: x", "\x1b]52;c;x\x07/model", "org/model@../../x",
    "org/model@refs/../../../x", "org/model@/etc/passwd", "org//model", "org/model/extra", "models--org--model",
    "-rf", "org/-model", "org/model.", "a--b/c", "/etc", "/etc/passwd", "~root/x", "~no-such-user/x", "./absent",
    "x" * 5000, "org/" + "x" * 300, "\udcff/model", "org/model@",
    "o\u202eg/model", "https://huggingface.co/org", "https://elsewhere.example/org/model", "hf.co/../model",
    "https://huggingface.co/org/model/blob/../x.gguf", "org/model:", "org/model:..", "org/model:../../x", "hf.co//etc",
    "org/model/../x.gguf", "org/model//x.gguf", "org/model/.x.gguf", "org/model/x.gguf:Q4", "org/model:Q4@../x",
    "org/model:a/b", "ollama:", "ollama:../../../etc/passwd", "ollama:/etc/passwd", "ollama:a/../b", "ollama:a%2fb",
]  # fmt: skip


# Each name by the way that uses the network, and by another one.
ATTACKS = [(pull, name) for name in HOSTILE] + list(zip(cycle((locate, describe, remove)), HOSTILE, strict=False))


# By the other ways a name is refused at the same door, and each attack is a process.
OFTEN = ATTACKS[: len(HOSTILE) + 3]


@pytest.mark.parametrize(
    ("action", "name"), thinned(ATTACKS, OFTEN.__contains__), ids=lambda value: getattr(value, "__name__", ascii(value))
)
def test_a_hostile_name_is_refused_before_anything_outside_the_cache_is_opened(fake, hub, action, name):
    # Whose imports open files of ours, not of a model.
    import localllm.hub.adapters
    import localllm.hub.fetch  # noqa: F401

    # Where LM Studio keeps its models: a name that is unknown may be one of them.
    lm_studio = {str(Path.home() / ".lmstudio-home-pointer"), str(Path.home() / ".lmstudio" / "settings.json")}
    expected = {str(shipped_registry()), str(user_directories().config / "models.toml"), *lm_studio}

    def attack() -> None:
        """In a process of its own: an audit hook stays for the life of a process, and is called at every event."""
        opened: list[str] = []
        watched, is_watching = threading.get_ident(), True

        def audit(event: str, arguments: tuple[object, ...]) -> None:
            if not is_watching or threading.get_ident() != watched:
                return
            if event in ("open", "os.rename", "os.remove", "shutil.rmtree"):
                opened.append(str(arguments[0]))

        sys.addaudithook(audit)
        with pytest.raises(LocalLLMError) as caught:
            action(name)
        is_watching = False
        known = (path for path in opened if not path.startswith(str(hub.cache_dir)))
        assert [path for path in known if path not in expected] == []
        assert caught.value.exit_code in (2, 3) and "\x1b" not in caught.value.what + caught.value.why

    assert in_child(attack) == 0
    assert fake.requests == []


@pytest.mark.parametrize("name", ["mine/../mine", "mine\\x", "mine%20", "mine\x1b", "mine\n"], ids=ascii)
def test_a_name_with_the_signs_of_an_attack_is_refused_even_where_a_folder_has_it(hub, tmp_path, monkeypatch, name):
    make_folder(tmp_path / "mine", config__json="{}")
    if "/" not in name:
        make_folder(tmp_path / name, config__json="{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="is not a model name"):
        locate(name)


def test_a_folder_of_the_users_is_a_model(hub, tmp_path, monkeypatch):
    make_folder(tmp_path / "mine", config__json="{}")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "mine"), "./mine", "mine", "mine/", "../" + tmp_path.name + "/mine"):
        found = locate(name)
        assert (found.directory.resolve(), found.repo) == (tmp_path / "mine", None)


def test_a_folder_without_config_is_no_model_but_may_hold_a_tokenizer(hub, tmp_path):
    folder = str(make_folder(tmp_path / "words", tokenizer__json="{}"))
    with pytest.raises(ModelNotFoundError, match="not a model"):
        locate(folder)
    assert locate(folder, needs_config=False).directory == Path(folder)


def test_a_registry_name_beats_a_folder_that_is_no_model(fake, hub, tmp_path, monkeypatch):
    make_folder(tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        locate("qwen3-8b")
    assert caught.value.fix == "localllm pull qwen3-8b" and "no config.json" in caught.value.why


def test_a_short_name_leads_to_its_repository(fake, hub):
    fake.repositories["Qwen/Qwen3-8B"] = single_model(1000)
    found = pull("QWEN3")
    assert (found.name, found.repo, found.revision) == ("qwen3-8b", "Qwen/Qwen3-8B", COMMIT)
    assert locate("Qwen/Qwen3-8B").directory == found.directory
    assert [model.name for model in list_models() if model.name != "tiny"] == ["qwen3-8b"]


def test_a_misspelled_name_is_answered_with_the_nearest(hub):
    with pytest.raises(ModelNotFoundError) as caught:
        locate("mistrall-7b")
    assert "mistral-7b" in caught.value.why and caught.value.exit_code == 3
    assert "localllm list --all" in caught.value.why


def test_the_built_in_model_needs_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("localllm.hub.names.TINY_DIRECTORY", make_folder(tmp_path / "tiny", config__json="{}"))
    use(HubSettings(tmp_path / "absent", "http://127.0.0.1:9"), monkeypatch)
    found = locate("Tiny")
    assert (found.name, found.directory, found.entry and found.entry.name) == ("tiny", tmp_path / "tiny", "tiny")
    assert pull("tiny") == found


@pytest.mark.parametrize("absent", ["", "config.json", "tokenizer.json", *SHARDS])
def test_a_snapshot_of_another_tool_is_used_where_it_is_whole(hub, absent):
    snapshot = other_tools_snapshot(hub, absent)
    if not absent:
        assert locate("maker/sharded").directory == snapshot
        return
    with pytest.raises(ModelNotFoundError, match="not on this disk") as caught:
        locate("maker/sharded")
    assert absent in caught.value.why


@pytest.mark.parametrize(
    "name", ["../sibling.safetensors", "../../../../secret", "/etc/passwd", "a/b.safetensors", "model.bin", 3]
)
def test_an_index_that_leads_elsewhere_makes_no_whole_snapshot(hub, name):
    snapshot = other_tools_snapshot(hub)
    (snapshot.parent / "sibling.safetensors").write_bytes(b"inside the cache, but not of this snapshot")
    index = snapshot / "model.safetensors.index.json"
    index.unlink()
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelNotFoundError):
        locate("maker/sharded")


def test_a_link_out_of_the_cache_is_not_part_of_a_snapshot(hub, tmp_path):
    snapshot = other_tools_snapshot(hub, SHARDS[0])
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (snapshot / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelNotFoundError):
        locate("maker/sharded")


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "TINY"])
def test_the_built_in_model_is_found_by_every_name_of_it(name: str) -> None:
    assert locate(name) == locate("tiny")
