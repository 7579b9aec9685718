"""Where adapters are, what they are called, and how they get there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import AdapterError, CheckpointError, DownloadError, LocalLLMError, ModelNotFoundError, UsageError
from localllm.hub import HubSettings, PullProgress, list_models, locate, pull
from localllm.hub.adapter_files import NamesAdapterError
from localllm.hub.adapters import is_for, list_adapters, locate_adapter, pull_adapter, split_scale
from localllm.hub.repo_cache import RepoCache
from localllm.registry import load_registry
from tests.adapter_support import BASE, peft_files, write_gguf_lora, write_peft
from tests.fake_hub import COMMIT, FakeHub, Fault, sha256
from tests.hub.support import PIECE, QUICK, leftovers, names_in, remove, single_model, use

REPO = "maker/Fox-LoRA"
WEIGHTS = "adapter_model.safetensors"
WANTED = {"adapter_config.json", WEIGHTS}


@pytest.fixture
def fake(fake: FakeHub) -> FakeHub:
    fake.reset({REPO: peft_files(size_bytes=3 * PIECE), "maker/model": single_model(1000)})
    return fake


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    return use(HubSettings(tmp_path / "cache", fake.endpoint, retry=QUICK), monkeypatch)


def refused(name: str, kind: type[LocalLLMError] = AdapterError) -> LocalLLMError:
    with pytest.raises(kind) as caught:
        locate_adapter(name)
    return caught.value


def names() -> list[str]:
    return [adapter.name for adapter in list_adapters()]


def models() -> list[str]:
    return [model.name for model in list_models() if model.name != "tiny"]


# A pull


def test_a_pull_fetches_the_two_files_of_an_adapter_and_nothing_else(fake, hub):
    found = pull_adapter(REPO)
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        name: data for name, data in fake.repositories[REPO].items() if name in WANTED
    }
    assert (found.name, found.repo, found.revision, found.base, found.rank) == ("fox-lora", REPO, COMMIT, BASE, 8)
    assert found.num_bytes == sum(path.stat().st_size for path in found.path.iterdir())
    assert {record.path.rpartition("/")[2] for record in fake.requests} == {"main", *WANTED}
    assert list_adapters() == [found] and models() == []


def test_an_adapter_is_found_by_its_repository_its_address_its_revision_and_its_short_name(fake, hub):
    found = pull_adapter(f"https://huggingface.co/{REPO}")
    for name in (REPO, "fox-lora", "Fox-LoRA", f"https://huggingface.co/{REPO}/tree/main", f"{REPO}@{COMMIT}"):
        assert locate_adapter(name) == found, name
    assert refused(f"{REPO}@v2").fix.endswith(f"localllm pull {REPO}@v2")


def test_a_pull_that_was_interrupted_goes_on_and_is_no_adapter_until_then(fake, hub):
    def interrupt(event: PullProgress) -> None:
        if event.file_done_bytes > 2 * PIECE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_adapter(REPO, progress=interrupt)
    blobs = RepoCache(hub.cache_dir, REPO).blobs
    held = (blobs / f"{sha256(fake.repositories[REPO][WEIGHTS])}.localllm.incomplete").stat().st_size
    assert (names(), models()) == ([], [REPO])  # a list tells what takes space
    assert f"localllm pull {REPO}" in refused(REPO).fix
    fake.requests.clear()
    assert pull_adapter(REPO).num_bytes > 3 * PIECE
    assert fake.file_requests(WEIGHTS)[0].range_start == held > 2 * PIECE
    assert (names(), models(), leftovers(hub)) == (["fox-lora"], [], [])


def test_a_second_pull_fetches_what_has_changed(fake, hub):
    pull_adapter(REPO)
    fake.commit = "f" * 40
    fake.repositories[REPO] |= {"adapter_config.json": json.dumps({"r": 2}).encode()}
    fake.requests.clear()
    found = pull_adapter(REPO)
    assert (found.rank, found.revision, found.base) == (2, "f" * 40, None)
    assert fake.file_requests(WEIGHTS) == []
    assert locate_adapter(f"{REPO}@{COMMIT}").rank == 8
    assert sorted(names()) == ["fox-lora", f"fox-lora@{COMMIT}"]


def test_damaged_weights_are_no_adapter(fake, hub):
    fake.always = Fault("flip", 17)
    with pytest.raises(DownloadError):
        pull_adapter(REPO)
    assert names() == []


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({WEIGHTS: None}, AdapterError, "pickle"),
        ({WEIGHTS: None, "adapter_model.bin": None}, AdapterError, "no weights of an adapter"),
        ({"adapter_config.json": b'{"peft_type": "IA3"}'}, AdapterError, "is no LoRA"),
        ({"adapter_config.json": b"[1]"}, CheckpointError, "not a JSON object"),
        ({"adapter_config.json": b"\xff\x00"}, CheckpointError, "not JSON"),
    ],
    ids=["pickle", "no weights", "no LoRA", "no object", "no JSON"],
)
def test_what_is_no_adapter_that_can_be_read_is_refused_before_its_weights_are_fetched(fake, hub, files, error, said):
    changed = fake.repositories[REPO] | files
    fake.repositories[REPO] = {name: data for name, data in changed.items() if data is not None}
    with pytest.raises(error, match=said):
        pull_adapter(REPO)
    asked = {record.path.rpartition("/")[2] for record in fake.requests}
    assert asked <= {"main", "adapter_config.json"} and names() == []


def test_a_model_is_no_adapter_and_says_how_it_is_run(fake, hub):
    with pytest.raises(AdapterError, match="maker/model has no adapter") as caught:
        pull_adapter("maker/model")
    assert caught.value.fix == "localllm run maker/model"
    pull("maker/model")
    for name in ("maker/model", "tiny", "qwen3-8b"):
        error = refused(name)
        assert "is a model, not an adapter" in error.what and error.fix == f"localllm run {name}"


def test_a_pull_of_a_model_that_is_an_adapter_fetches_nothing_and_names_the_model_to_run(fake, hub, monkeypatch):
    tags = {"tags": ["lora", f"base_model:adapter:{BASE}", 7]}
    monkeypatch.setattr(fake, "listing", lambda repo: {**FakeHub.listing(fake, repo), **tags})
    with pytest.raises(NamesAdapterError, match="is an adapter, not a model") as caught:
        pull(REPO)
    assert caught.value.why == f"it was made for {BASE}"
    pulled, adapted = caught.value.fixes
    assert (str(pulled), adapted.words) == (f"localllm pull {REPO}", (REPO, "qwen3-8b", REPO))
    assert len(fake.requests) == 1


def test_an_adapter_on_this_disk_is_no_model(fake, hub):
    pull_adapter(REPO)
    with pytest.raises(NamesAdapterError) as caught:
        locate(REPO)
    assert caught.value.fix == f"localllm run qwen3-8b --adapter {REPO}"


def test_offline_an_adapter_is_found_where_it_is_here_and_nothing_is_asked(fake, hub):
    with pytest.raises(AdapterError, match="is not on this disk") as caught:
        pull_adapter(REPO, offline=True)
    assert "offline" in caught.value.why and fake.requests == []
    found = pull_adapter(REPO)
    fake.requests.clear()
    assert pull_adapter(REPO, offline=True) == found and fake.requests == []


# GGUF files


@pytest.fixture
def loras(fake: FakeHub, tmp_path: Path) -> dict[str, bytes]:
    """A repository with an adapter in two types."""
    files = {f"fox-{quant}.gguf": tmp_path / f"fox-{quant}.gguf" for quant in ("F16", "Q8_0")}
    for rank, path in enumerate(files.values(), start=4):
        write_gguf_lora(path, rank)
    fake.repositories["maker/Fox-GGUF"] = {name: path.read_bytes() for name, path in files.items()}
    return fake.repositories["maker/Fox-GGUF"]


def test_of_a_repository_with_gguf_adapters_one_is_pulled_and_found(fake, hub, loras):
    with pytest.raises(ModelNotFoundError, match="has 2 GGUF models") as caught:
        pull_adapter("maker/Fox-GGUF")
    assert "localllm pull maker/Fox-GGUF:F16" in map(str, caught.value.fixes)
    found = pull_adapter("maker/Fox-GGUF:F16")
    assert found.path.read_bytes() == loras["fox-F16.gguf"]
    assert (found.name, found.base, found.rank, found.repo) == ("fox-gguf:f16", BASE, 4, "maker/Fox-GGUF")
    assert (names(), models()) == (["fox-gguf:f16"], [])
    for name in ("maker/Fox-GGUF", "maker/Fox-GGUF:f16", "fox-gguf:f16", "maker/Fox-GGUF/fox-F16.gguf"):
        assert locate_adapter(name) == found, name
    other = pull_adapter("maker/Fox-GGUF:Q8_0")
    assert other.rank == 5 and "has 2 adapters" in refused("maker/Fox-GGUF").what


def test_the_first_bytes_of_a_gguf_file_tell_an_adapter_from_a_model(fake, hub, loras):
    with pytest.raises(NamesAdapterError):
        pull("maker/Fox-GGUF:F16")
    assert fake.sent_bytes("fox-F16.gguf") <= 4096
    model = loras["fox-F16.gguf"].replace(b"adapter", b"another")
    fake.repositories["maker/model"] = {"model-F16.gguf": model}
    with pytest.raises(AdapterError, match="has no adapter"):
        pull_adapter("maker/model")
    assert names() == []


def test_a_gguf_adapter_on_this_disk_is_no_model(fake, hub, loras, tmp_path):
    pull_adapter("maker/Fox-GGUF:F16")
    for name in ("maker/Fox-GGUF", str(tmp_path / "fox-F16.gguf")):
        with pytest.raises(NamesAdapterError) as caught:
            locate(name)
        assert caught.value.fixes[0].words == (name, "qwen3-8b", name)


# Names


def test_two_adapters_of_one_name_are_called_by_their_repositories(fake, hub):
    fake.repositories["other/fox-lora"] = peft_files("/home/me/Qwen3-8B")
    fake.repositories["other/wolf"] = peft_files()
    for repo in (REPO, "other/fox-lora", "other/wolf"):
        pull_adapter(repo)
    assert names() == [REPO, "other/fox-lora", "wolf"]
    assert locate_adapter("other/fox-lora").base == "/home/me/Qwen3-8B"
    assert {str(fix.words[1]) for fix in refused("fox-lora").fixes if fix.kind == "word"} == {REPO, "other/fox-lora"}
    assert "wolf is here" in refused("wolff").why
    near = refused("fox-lor")
    assert [fix.words[1] for fix in near.fixes] == [REPO, "other/fox-lora"] and f"{REPO} and other" in near.why


def test_what_another_tool_has_fetched_is_an_adapter_unless_it_leads_out_of_the_cache(hub, tmp_path):
    folder = write_peft(tmp_path / "outside")
    snapshot = RepoCache(hub.cache_dir, REPO).snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    (snapshot / WEIGHTS).symlink_to(folder / WEIGHTS)
    assert names() == []
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).write_bytes(b"0")
    assert names() == ["fox-lora"]
    assert locate_adapter(f"{REPO}@{COMMIT}").path == snapshot


def test_a_pickle_that_another_tool_has_fetched_is_refused(hub):
    snapshot = RepoCache(hub.cache_dir, REPO).snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.bin"):
        (snapshot / name).write_text("{}")
    error = refused(f"{REPO}@{COMMIT}")
    assert "pickle" in error.what and "save_pretrained" in error.fix


def test_a_folder_and_a_file_of_the_users_are_adapters(hub, tmp_path, monkeypatch):
    folder, file = write_peft(tmp_path / "mine"), write_gguf_lora(tmp_path / "mine.gguf", base="Qwen3 8B")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "./mine", str(folder), f"../{tmp_path.name}/mine"):
        found = locate_adapter(name)
        assert (found.path, found.name, found.repo, found.revision) == (folder, "mine", None, None)
        assert (found.base, found.rank) == (BASE, 8)
    found = locate_adapter("mine.gguf")
    assert (found.path, found.name, found.base, found.rank) == (file, "mine", "Qwen3 8B", 4)
    assert pull_adapter("mine").path == folder
    assert names() == []


def test_what_peft_has_saved_is_an_adapter(hub, tmp_path):
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=3, base_model_name_or_path=BASE).save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / WEIGHTS).write_bytes(b"0")
    found = locate_adapter(str(tmp_path / "mine"))
    assert (found.base, found.rank) == (BASE, 3)


@pytest.mark.parametrize(
    ("config", "base", "rank"),
    [
        ({"base_model_name_or_path": "../../etc/passwd", "r": True}, "../../etc/passwd", None),
        ({"base_model_name_or_path": "a\x1b]52;c;x\x07", "r": "8"}, None, None),
        ({"base_model_name_or_path": ["a"], "r": 2**70}, None, None),
        ({"base_model_name_or_path": "x" * 301}, None, None),
        ([], None, None),
    ],
    ids=["path", "control", "list", "long", "no object"],
)
def test_what_a_config_says_is_shown_or_left_out_and_never_opened(hub, tmp_path, config: Any, base, rank):
    folder = write_peft(tmp_path / "mine")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = locate_adapter(str(folder))
    assert (found.base, found.rank) == (base, rank)
    with pytest.raises(NamesAdapterError) as caught:
        locate(str(folder))
    assert caught.value.fix == f"localllm run BASE --adapter {folder}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "0 characters"),
        ("mine\n", "control character"),
        ("org/../x", "no '..'"),
        ("org/x%2f..", "no percent"),
        ("org\\x", "no backslash"),
        ("x" * 5000, "5000 characters"),
    ],
    ids=["empty", "newline", "dots", "percent", "backslash", "long"],
)
def test_a_hostile_name_is_refused_at_the_door(fake, hub, name, said):
    for action in (locate_adapter, pull_adapter):
        with pytest.raises(AdapterError, match="is not the name of an adapter") as caught:
            action(name)
        assert said in caught.value.why and fake.requests == []


def test_a_path_at_which_there_is_no_adapter_is_told_for_what_it_is(hub, tmp_path):
    folder = write_peft(tmp_path / "mine")
    assert refused(str(folder / WEIGHTS)).fixes[0].words[1] == str(folder)
    (tmp_path / "notes.txt").write_text("x")
    assert "a folder with adapter_config.json" in refused(str(tmp_path / "notes.txt")).why
    assert "has no adapter_config.json" in refused(str(tmp_path)).why
    assert "nothing is there" in refused(str(tmp_path / "absent")).why
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "is a model, not an adapter" in refused(str(tmp_path / "model")).what
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "pickle" in refused(str(folder)).what


def test_a_folder_and_a_file_of_two_words_are_no_names_of_the_hub(fake, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("maker/Fox-LoRA").mkdir(parents=True)
    Path("maker/notes.gguf").write_text("a note")
    assert "has no adapter_config.json" in refused(REPO).why
    for action in (locate_adapter, pull_adapter):
        with pytest.raises(AdapterError, match="there is no adapter") as caught:
            action("maker/x.gguf")
        assert caught.value.fix == "localllm adapters" and fake.requests == []
    assert refused("maker/notes.gguf").fix == "localllm adapters"
    assert pull_adapter(REPO) == locate_adapter(REPO)


def test_a_glance_tells_what_cannot_be_used(hub, tmp_path):
    usable = {"mine": {}, "dora": {"use_dora": True}, "other": {"peft_type": "IA3"}}
    for name, config in usable.items():
        write_peft(tmp_path / name, **config)
    write_peft(tmp_path / "broken")
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    found = {name: locate_adapter(str(tmp_path / name)).is_usable for name in (*usable, "broken")}
    assert found == {"mine": True, "dora": False, "other": False, "broken": False}
    assert locate_adapter(str(write_gguf_lora(tmp_path / "mine.gguf"))).is_usable


def test_a_short_name_and_a_repository_remove_an_adapter(fake, hub, loras):
    first, second = pull_adapter(REPO), pull_adapter("maker/Fox-GGUF:F16")
    assert remove("fox-lora") >= first.num_bytes and names() == [second.name]
    assert remove("maker/Fox-GGUF:F16") >= second.num_bytes and names() == []
    assert names_in(hub.cache_dir) <= {".locks"}


@pytest.mark.parametrize(
    ("text", "name", "scale"),
    [
        ("fox", "fox", 1.0),
        ("fox:0.5", "fox", 0.5),
        ("maker/fox@main:-2", "maker/fox@main", -2.0),
        ("maker/fox:Q8_0", "maker/fox:Q8_0", 1.0),
        ("maker/fox:Q8_0:1e-1", "maker/fox:Q8_0", 0.1),
        ("https://huggingface.co/maker/fox", "https://huggingface.co/maker/fox", 1.0),
        ("C:\\adapters\\fox", "C:\\adapters\\fox", 1.0),
        ("fox:", "fox:", 1.0),
        ("7", "7", 1.0),
    ],
)
def test_a_scale_stands_behind_the_last_colon(text, name, scale):
    assert split_scale(text) == (name, scale)


def test_of_a_path_that_is_there_the_whole_text_is_the_name(tmp_path, monkeypatch):
    write_peft(tmp_path / "fox:0.5")
    monkeypatch.chdir(tmp_path)
    assert split_scale("./fox:0.5") == ("./fox:0.5", 1.0)
    assert split_scale("./fox:0.5:2") == ("./fox:0.5", 2.0)


@pytest.mark.parametrize("number", ["101", "-1e9", "nan", "inf", "1e999"])
def test_a_scale_that_is_none_is_refused(number):
    with pytest.raises(UsageError, match="the scale of the adapter 'fox'"):
        split_scale(f"fox:{number}")


@pytest.mark.parametrize(("written", "meant"), [("x", 1), ("", 1), ("1,5", 1.5), ("3:", 3), ("1_0", 1), ("Q8_0", 1)])
def test_behind_an_adapter_that_is_here_only_a_number_stands(fake, hub, tmp_path, monkeypatch, written, meant):
    pull_adapter(REPO)
    write_peft(tmp_path / "own")
    write_gguf_lora(tmp_path / "own.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("./own", "own", "own.gguf", "fox-lora", REPO, f"https://huggingface.co/{REPO}"):
        with pytest.raises(UsageError) as caught:
            split_scale(f"{name}:{written}")
        error = caught.value
        assert (error.what, error.why) == (
            f"the scale of the adapter {name!r} is no number from -100 to 100", f"it is {written!r}",
        )  # fmt: skip
        assert error.fixes[0].words == (f"{name}:{written}", f"{name}:{meant:g}")


def test_behind_a_repository_of_gguf_adapters_a_quantization_stands(fake, hub, loras):
    pull_adapter("maker/Fox-GGUF:F16")
    for name in ("maker/Fox-GGUF:F16", "maker/Fox-GGUF:Q8_0", "fox-gguf:f16"):
        assert split_scale(name) == (name, 1.0)
        assert split_scale(f"{name}:2") == (name, 2.0)
    with pytest.raises(UsageError, match="'fox-gguf:f16' is no number"):
        split_scale("fox-gguf:f16:x")


@pytest.mark.parametrize(
    ("said", "base", "wanted"),
    [
        (BASE, "qwen3-8b", True),
        (BASE, "qwen3", True),
        ("qwen/qwen3-8b", BASE, True),
        (BASE, f"{BASE}-GGUF:Q4_K_M", True),
        ("unsloth/qwen3-8b-unsloth-bnb-4bit", "qwen3-8b", True),
        ("/home/me/models/Qwen3-8B/", "qwen3-8b", True),
        ("Qwen3 8B", "maker/Qwen3-8B-Q4_K_M-GGUF", True),
        (BASE, "qwen3-4b", False),
        (BASE, "Qwen/Qwen3-8B-Base", False),
        (None, "qwen3-8b", False),
    ],
)
def test_an_adapter_is_for_the_model_that_it_names_in_any_format(hub, tmp_path, said, base, wanted):
    adapter = replace(locate_adapter(str(write_peft(tmp_path / "mine"))), base=said)
    assert is_for(adapter, base, load_registry()) == wanted
