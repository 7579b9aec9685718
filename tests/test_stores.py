"""Models that Ollama, LM Studio, llama.cpp and the hub's cache keep: each store is laid out as its program does it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm import hub
from localllm.errors import CheckpointError, LocalLLMError, ModelNotFoundError, UnsupportedModelError, UsageError
from localllm.hub.names import TINY_DIRECTORY
from localllm.hub.repo_cache import RepoCache
from tests.cli_support import Result, run_cli
from tests.fake_hub import COMMIT, FakeHub, Fault
from tests.gguf_support import all_of, tokenizer_metadata, write_gguf
from tests.hub.support import QUICK, use
from tests.server.support import running

REPO = "maker/Tiny-GGUF"
STUB = b"GGUF" + bytes(60)  # what a look at the first bytes takes for a model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    write_gguf(TINY_DIRECTORY, path, all_of("Q8_0"))
    return path


@pytest.fixture(autouse=True)
def home(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has none of these programs yet."""
    for variable in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("localllm.hub.stores._OLLAMA_SERVICES", ())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def in_ollama(home: Path, name: str, content: bytes, *others: str, root: str = ".ollama/models") -> Path:
    """Have Ollama keep a model; name: host, namespace, name and tag. others: kinds of its other layers."""
    digest = hashlib.sha256(content).hexdigest()
    blob = home / root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    kinds = {"model": digest, **dict.fromkeys(others, "0" * 64)}
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{each}", "size": 1}
        for kind, each in kinds.items()
    ]
    manifest = home / root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {"digest": "sha256:1"}, "layers": layers}))
    return blob


def keep(path: Path, content: bytes = STUB) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def in_hub(home: Path, files: dict[str, bytes], repo: str = REPO, *, commit: str = COMMIT, ref: str = "main") -> Path:
    """Have another tool fetch files of a repository; returns the snapshot."""
    cache = RepoCache(home / "hub", repo)
    cache.blobs.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (cache.blobs / digest).write_bytes(content)
        link = cache.snapshot(commit) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(cache.blobs / digest, link.parent))
    (cache.folder / "refs").mkdir(exist_ok=True)
    (cache.folder / "refs" / ref).write_text(commit)
    return cache.snapshot(commit)


def listed() -> dict[str, Any]:
    rows: list[dict[str, Any]] = run_cli("list", "--json").json["models"]
    return {row["name"]: row for row in rows if row["name"] != "tiny"}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def runs(name: str) -> Result:
    result = run_cli("run", name, "-p", "Once", "--max-tokens", "4", "--json")
    assert result.code == 0, result.err
    assert result.json["usage"]["completion_tokens"] == 4
    return result


def refused(action: Callable[[str], object], name: str, error: type[LocalLLMError] = ModelNotFoundError) -> Any:
    with pytest.raises(error) as caught:
        action(name)
    return caught.value


# Each store


def test_a_model_of_ollama_is_listed_run_and_never_written(home: Path, tiny: Path) -> None:
    blob = in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", tiny.read_bytes(), "template", "params")
    before = contents(home / ".ollama")
    row = listed()["ollama:llama3.2"]
    assert (row["state"], row["size_bytes"], row["file"]) == ("installed", tiny.stat().st_size, str(blob))
    assert (row["store"], row["directory"], row["packed"]) == ("Ollama", None, [])
    runs("ollama:llama3.2")
    row = listed()["ollama:llama3.2"]
    packed = sum(each["size_bytes"] for each in row["packed"])
    assert packed and row["total_bytes"] == row["size_bytes"] + packed and row["model_type"] == "llama"
    shown = run_cli("list").out.decode()
    assert "Ollama" in shown and "TOTAL" in shown
    kept = refused(hub.removal, "ollama:llama3.2", UsageError)
    assert "Ollama keeps" in kept.what and kept.fix == "localllm rm ollama:llama3.2 --packed"
    freed = run_cli("rm", "ollama:llama3.2", "--packed", "--yes", "--json").json["freed_bytes"]
    assert freed == packed and listed()["ollama:llama3.2"]["packed"] == []
    assert contents(home / ".ollama") == before


def test_a_model_of_ollama_without_a_template_in_its_file_is_told_where_that_is(home: Path, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(TINY_DIRECTORY) | {"tokenizer.chat_template": None}
    write_gguf(TINY_DIRECTORY, tmp_path / "bare.gguf", all_of("Q8_0"), metadata)
    in_ollama(home, "registry.ollama.ai/library/bare/latest", (tmp_path / "bare.gguf").read_bytes(), "template")
    result = run_cli("run", "ollama:bare", "-p", "Once")
    assert result.code == 1
    for said in ("has no chat template", "Ollama does not take it from the file", "ollama:bare -p Once --raw"):
        assert said in " ".join(result.err.split())
    assert run_cli("run", "ollama:bare", "--raw", "-p", "Once", "--max-tokens", "4").code == 0


def test_ollamas_names_are_those_that_it_shows(home: Path) -> None:
    in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", STUB)
    in_ollama(home, "registry.ollama.ai/library/llama3.2/1b", STUB)
    in_ollama(home, "registry.ollama.ai/someone/tuned/latest", STUB)
    in_ollama(home, "hf.co/maker/Tiny-GGUF/Q4_K_M", STUB)
    names = ["hf.co/maker/Tiny-GGUF:Q4_K_M", "llama3.2:1b", "llama3.2", "someone/tuned"]
    assert sorted(listed()) == sorted(f"ollama:{name}" for name in names)
    for name in [
        *names,
        "llama3.2:latest",
        "LLAMA3.2:1B",
        "someone/tuned:latest",
        "library/llama3.2",
        "hf.co/MAKER/tiny-gguf:q4_k_m",
    ]:
        assert isinstance(refused(hub.locate, f"ollama:{name}", CheckpointError), CheckpointError)  # a stub, but found
    for name in ("llama3.2:3b", "tuned", "a/b/c/d", "", "registry.ollama.ai/library/llama3.2/latest"):
        assert "Ollama has no model" in refused(hub.locate, f"ollama:{name}").what


@pytest.mark.parametrize("root", ["models of mine", "service"])
def test_ollamas_folder_may_be_another(home: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", STUB, root=root)
    assert listed() == {}
    if root == "service":
        monkeypatch.setattr("localllm.hub.stores._OLLAMA_SERVICES", (str(home / root),))
    else:
        monkeypatch.setenv("OLLAMA_MODELS", str(home / root))
    assert [*listed()] == ["ollama:llama3.2"]


@pytest.mark.parametrize(("typed", "meant"), [("llama3.2", "ollama:llama3.2"), ("other", "ollama:other:3b")])
def test_a_name_of_ollamas_is_told_with_the_line_that_runs_it(home: Path, typed: str, meant: str) -> None:
    in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", STUB)
    in_ollama(home, "registry.ollama.ai/library/other/3b", STUB + b"3b")
    result = run_cli("run", typed, "-p", "hello")
    assert result.code == 3 and f"localllm run {meant} -p hello" in result.err


def test_a_modelfile_may_have_a_name_of_ollamas(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(home / "own"))
    in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", STUB)
    assert run_cli("create", "mario", "-f", "-", stdin=b"FROM llama3.2:latest\nSYSTEM You are Mario.\n").code == 0
    assert run_cli("preset", "show", "mario", "--json").json["model"] == "ollama:llama3.2"


def test_what_of_ollama_cannot_run_is_refused_by_name_and_not_listed(home: Path) -> None:
    library = "registry.ollama.ai/library"
    in_ollama(home, f"{library}/tuned/latest", STUB, "adapter")
    in_ollama(home, f"{library}/gone/latest", b"GGUF gone").unlink()
    in_ollama(home, f"{library}/other/latest", b"PK")
    manifests = home / ".ollama" / "models" / "manifests" / library
    keep(manifests / "broken" / "latest", b"{")
    keep(manifests / "cloud" / "latest", b'{"layers": []}')
    keep(manifests / "list" / "latest", b"[1]")
    for tag, digest in enumerate(("../../../etc/passwd", "sha256:../x", "sha256:" + "a" * 63)):
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
        keep(manifests / "hostile" / str(tag), json.dumps({"layers": [layer, 3, {"digest": {}}]}).encode())
        refused(hub.locate, f"ollama:hostile:{tag}", CheckpointError)
    assert listed() == {}
    assert "adapter" in refused(hub.locate, "ollama:tuned", UnsupportedModelError).why
    assert refused(hub.locate, "ollama:gone", CheckpointError).fix == "ollama pull gone"
    refused(hub.locate, "ollama:cloud", UnsupportedModelError)
    refused(hub.locate, "ollama:broken", CheckpointError)


def test_a_model_of_lm_studio_is_listed_and_run(home: Path, tiny: Path) -> None:
    keep(home / ".lmstudio/models" / REPO / "tiny-Q8_0.gguf", tiny.read_bytes())
    keep(home / ".lmstudio/models" / REPO / "mmproj-tiny-F16.gguf")
    assert {name: row["store"] for name, row in listed().items()} == {f"lmstudio:{REPO}:Q8_0": "LM Studio"}
    assert runs("lmstudio:tiny-gguf").json["model"] == f"lmstudio:{REPO}:Q8_0"


def test_lm_studios_names_may_be_short_where_they_mean_one_model(home: Path) -> None:
    models = home / ".lmstudio/models"
    for name in (
        f"{REPO}/tiny-Q8_0.gguf",
        f"{REPO}/tiny-Q4_K_M.gguf",
        "other/Tiny-GGUF/tiny-IQ4_XS.gguf",
        "loose.gguf",
    ):
        keep(models / name)
    for part in (1, 2):
        keep(models / f"other/Big-GGUF/BF16/big-BF16-0000{part}-of-00002.gguf")
        keep(models / f"other/Half-GGUF/half-BF16-0000{part}-of-00003.gguf")
    names = [f"{REPO}:Q8_0", f"{REPO}:Q4_K_M", "other/Tiny-GGUF:IQ4_XS", "other/Big-GGUF:BF16", "loose.gguf"]
    assert sorted(listed()) == sorted(f"lmstudio:{name}" for name in names)
    short = ["Tiny-GGUF:iq4_xs", "other/tiny-gguf", "tiny-Q8_0.gguf", f"{REPO}/tiny-Q8_0.gguf", "Big-GGUF"]
    for name in [*names, *short, "Tiny-GGUF/tiny-Q4_K_M.gguf"]:
        refused(hub.locate, f"lmstudio:{name}", CheckpointError)  # a stub, but found
    for name, count in ((REPO, 2), ("Tiny-GGUF", 3)):
        error = refused(hub.locate, f"lmstudio:{name}")
        assert f"may be {count} models" in error.what and error.fixes[0].words[-1] == f"lmstudio:{REPO}:Q4_K_M"
        assert len(error.fixes) == count
    for name in ("absent", f"{REPO}:Q2_K", "other/Half-GGUF", f"{REPO}/../loose.gguf", ""):
        refused(hub.locate, f"lmstudio:{name}")


def test_a_folder_of_safetensors_in_lm_studio_is_a_model(home: Path) -> None:
    place = home / ".lmstudio/models/mlx-community/tiny"
    shutil.copytree(TINY_DIRECTORY, place)
    keep(home / ".lmstudio/models/mlx-community/bert/config.json", b'{"model_type": "bert"}')
    keep(home / ".lmstudio/models/mlx-community/bert/model.safetensors")
    assert {name: row["directory"] for name, row in listed().items()} == {"lmstudio:mlx-community/tiny": str(place)}
    runs("lmstudio:tiny")


@pytest.mark.parametrize("how", ["pointer", "settings", "older"])
def test_lm_studios_folder_may_be_another(home: Path, how: str) -> None:
    other = home / "elsewhere"
    folder = {"pointer": other / "models", "settings": other, "older": home / ".cache/lm-studio/models"}[how]
    keep(folder / REPO / "tiny-Q8_0.gguf")
    if how == "pointer":
        keep(home / ".lmstudio-home-pointer", f"{other}\n".encode())
    elif how == "settings":
        keep(home / ".lmstudio/settings.json", json.dumps({"downloadsFolder": str(other)}).encode())
    assert [*listed()] == [f"lmstudio:{REPO}:Q8_0"]


def test_a_model_of_llama_cpp_is_listed_and_run(home: Path, tiny: Path) -> None:
    cache = home / ".cache/llama.cpp"
    keep(cache / "maker_Tiny-GGUF_tiny-Q8_0.gguf", tiny.read_bytes())
    keep(cache / "manifest=maker=Tiny-GGUF=latest.json", b"{")
    keep(cache / "maker_Tiny-GGUF_tiny-Q4_0.gguf.downloadInProgress")
    keep(cache / "someone_model-Q4_0.gguf")
    assert sorted(listed()) == [f"llamacpp:{REPO}:Q8_0", "llamacpp:someone_model-Q4_0.gguf"]
    assert runs(f"llamacpp:{REPO}").json["model"] == f"llamacpp:{REPO}:Q8_0"
    refused(hub.locate, "llamacpp:someone_model-Q4_0.gguf", CheckpointError)  # a stub, but found


def test_a_newer_llama_cpp_lays_its_folder_out_as_the_hubs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / "hub"))
    in_hub(home, {"tiny-Q8_0.gguf": STUB})
    assert [*listed()] == [f"{REPO}:Q8_0"]  # once, where both are one folder
    (home / "hub").rename(home / "llama")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "llama"))
    assert [*listed()] == [f"llamacpp:{REPO}:Q8_0"]


def test_what_is_odd_in_a_store_keeps_nothing_from_being_listed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ollama(home, "registry.ollama.ai/library/whole/latest", STUB)
    models = home / ".lmstudio/models"
    keep(models / REPO / "tiny-Q8_0.gguf")
    keep(models / REPO / "empty-Q4_0.gguf", b"")
    keep(models / REPO / "\x1b[31m-Q4_0.gguf")
    (models / REPO / "nowhere-Q4_0.gguf").symlink_to("nowhere")
    (models / REPO / "itself-Q4_0.gguf").symlink_to("itself-Q4_0.gguf")
    (models / REPO / "above").symlink_to("..")
    (models / REPO / "folder-Q4_0.gguf").mkdir()
    os.mkfifo(models / REPO / "pipe-Q4_0.gguf")
    keep(home / ".lmstudio-home-pointer", b"\xff\xfe")
    keep(home / ".lmstudio/settings.json", b'{"downloadsFolder": 3}')
    keep(home / ".cache/llama.cpp")
    assert {f"lmstudio:{REPO}:Q8_0", "ollama:whole"} <= set(listed()) and run_cli("list").code == 0
    monkeypatch.setattr("localllm.hub.stores._MOST_ENTRIES", 3)
    assert run_cli("list").code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_closed_folder_holds_nothing(home: Path) -> None:
    in_ollama(home, "registry.ollama.ai/library/whole/latest", STUB)
    keep(home / ".lmstudio/models" / REPO / "tiny-Q8_0.gguf").chmod(0)
    (home / ".ollama/models/manifests").chmod(0)
    assert listed() == {}
    (home / ".ollama/models/manifests").chmod(0o700)


# The hub's cache


def test_a_gguf_file_in_the_hubs_cache_is_listed_and_run(home: Path, tiny: Path) -> None:
    in_hub(home, {"tiny-Q8_0.gguf": tiny.read_bytes(), "README.md": b"", "mmproj-F16.gguf": STUB})
    row = listed()[f"{REPO}:Q8_0"]
    assert (row["state"], row["repo"], row["size_bytes"]) == ("installed", REPO, tiny.stat().st_size)
    assert runs(REPO).json["model"] == f"{REPO}:Q8_0"
    assert listed()[f"{REPO}:Q8_0"]["packed"]
    found = hub.locate(f"https://huggingface.co/{REPO}/blob/main/tiny-Q8_0.gguf")
    for name in (f"hf.co/{REPO}:q8_0", f"{REPO}/tiny-Q8_0.gguf", f"huggingface.co/{REPO}", f"{REPO}:Q8_0@main"):
        assert hub.locate(name) == found
    assert found.name == f"{REPO}:Q8_0" and hub.current(found) == found
    assert hub.removal(REPO).packed_bytes == hub.removal(f"{REPO}:Q8_0").packed_bytes > 0
    assert run_cli("rm", f"{REPO}:Q8_0", "--yes").code == 0
    assert listed() == {} and not (found.gguf and found.gguf.exists()) and not found.directory.exists()


def test_a_repository_of_several_is_a_list_with_the_command_for_each(home: Path) -> None:
    sizes = {"x-Q4_K_M.gguf": 5000, "x-UD-Q4_K_XL.gguf": 6000, "x-Q8_0.gguf": 9000, "y-Q8_0.gguf": 9500}
    split = {f"BF16/x-BF16-0000{part}-of-00002.gguf": 7000 for part in (1, 2)}
    in_hub(home, {name: STUB.ljust(size) + name.encode() for name, size in {**sizes, **split}.items()})
    names = [f"{REPO}:Q4_K_M", f"{REPO}:UD-Q4_K_XL", f"{REPO}/x-Q8_0.gguf", f"{REPO}/y-Q8_0.gguf", f"{REPO}:BF16"]
    assert [*listed()] == names
    error = refused(hub.locate, REPO)
    assert [str(fix) for fix in error.fixes] == [f"localllm run {name}" for name in names]
    assert "Q4_K_M 4.9 KiB" in error.why and "has 5 GGUF models" in error.what and error.exit_code == 3
    assert [fix.words[-1] for fix in refused(hub.locate, f"{REPO}:q8_0").fixes] == names[2:4]
    for name in (
        f"{REPO}:Q4_K_XL",
        f"{REPO}/x-BF16-00002-of-00002.gguf",
        f"https://hf.co/{REPO}/tree/main/BF16",
        *names,
    ):
        refused(hub.locate, name, CheckpointError)  # a stub, but found
    absent = refused(hub.locate, f"{REPO}:Q2_K")
    assert absent.fix == f"localllm pull {REPO}:Q2_K" and f"{REPO}:Q4_K_M" in absent.why


def test_removing_one_quantization_keeps_the_others(home: Path) -> None:
    other = "f" * 40
    split = {f"BF16/x-BF16-0000{part}-of-00002.gguf": STUB + b"%d" % part for part in (1, 2)}
    snapshot = in_hub(home, {"x-Q8_0.gguf": STUB, "x-Q4_0.gguf": STUB + b"4", **split})
    in_hub(home, {"x-Q4_0.gguf": STUB + b"4"}, commit=other, ref="v1")
    assert [*listed()] == [f"{REPO}:Q8_0", f"{REPO}:Q4_0", f"{REPO}:BF16", f"{REPO}:Q4_0@v1"]
    assert run_cli("rm", f"{REPO}:BF16", "--yes", "--json").json["freed_bytes"] == 130
    assert not (snapshot / "BF16").exists()
    assert run_cli("rm", f"{REPO}:Q4_0", "--yes", "--json").json["freed_bytes"] == 0  # another revision shares it
    assert [*listed()] == [f"{REPO}:Q8_0", f"{REPO}:Q4_0@v1"]
    assert "not on this disk" in refused(hub.removal, f"{REPO}:Q4_0").what
    assert run_cli("rm", f"{REPO}:Q4_0@v1", "--yes", "--json").json["freed_bytes"] == 65
    assert [*listed()] == [f"{REPO}:Q8_0"]


def test_a_page_of_a_revision_means_that_one(home: Path) -> None:
    in_hub(home, {"x-Q8_0.gguf": STUB})
    in_hub(home, {"x-Q4_0.gguf": STUB + b"4"}, commit="f" * 40, ref="v1")
    assert run_cli("rm", f"https://huggingface.co/{REPO}/tree/v1", "--yes").code == 0
    assert [*listed()] == [f"{REPO}:Q8_0"]


def test_a_link_out_of_the_cache_is_no_model_of_the_hub(home: Path) -> None:
    snapshot = in_hub(home, {"x-Q8_0.gguf": STUB})
    (snapshot / "secret-Q4_0.gguf").symlink_to(keep(home / "secret.gguf"))
    assert [*listed()] == [f"{REPO}:Q8_0"]


def test_a_file_of_ones_own_is_called_so(home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = keep(home / "mine.gguf", tiny.read_bytes())
    monkeypatch.chdir(home)
    result = runs("./mine.gguf")
    assert result.json["model"] == str(file) and "to int4" not in result.err
    row = next(row for row in run_cli("list", "--json").json["models"] if row["name"] == str(file))
    assert (row["state"], row["file"]) == ("file", str(file))
    assert "a file of yours" in run_cli("list").out.decode()
    assert "a file of yours, is not removed" in refused(hub.removal, "mine.gguf", UsageError).what
    file.unlink()
    assert run_cli("rm", str(file), "--packed", "--yes").code == 0


def test_a_folder_of_several_files_is_a_list(home: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        keep(home / "mine" / name)
    error = refused(hub.locate, str(home / "mine"))
    assert [fix.words[-1] for fix in error.fixes] == [
        str(home / "mine" / f"a-{quant}.gguf") for quant in ("Q4_0", "Q8_0")
    ]
    typed = run_cli("chat", str(home / "mine"), "--ctx", "512")
    assert f"localllm chat {home / 'mine' / 'a-Q8_0.gguf'} --ctx 512" in typed.err  # what was typed is kept


@pytest.mark.parametrize("name", ["absent.gguf", "folder/absent.gguf"])
def test_a_file_that_is_not_there_is_no_model_of_the_hub(name: str) -> None:
    error = refused(hub.locate, name)
    assert error.what == f"there is no file {name!r}" and str(Path(name).absolute()) in error.why


def test_a_file_is_described_by_the_types_of_its_weights(tiny: Path) -> None:
    run_cli("tokenize", str(tiny), "hello")
    assert run_cli("show", str(tiny), "--json").json["dtype"] == "Q8_0 100%"


def test_a_server_lists_what_is_kept_and_answers_by_its_names(home: Path, tiny: Path) -> None:
    in_ollama(home, "registry.ollama.ai/library/llama3.2/latest", tiny.read_bytes())
    in_hub(home, {"x-Q8_0.gguf": tiny.read_bytes(), "x-Q4_0.gguf": STUB})
    names = {"ollama:llama3.2", f"{REPO}:Q8_0", f"{REPO}:Q4_0"}
    with running() as server:
        models = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
        assert names < set(models) and models[f"{REPO}:Q8_0"]["owned_by"] == "maker"
        tags = {each["name"]: each for each in server.get("/api/tags").json()["models"]}
        assert names < set(tags) and tags["ollama:llama3.2"]["size"] == tiny.stat().st_size
        assert tags[f"{REPO}:Q8_0"]["details"]["quantization_level"] == "Q8_0"
        asked = {"model": f"hf.co/{REPO}:q8_0", "prompt": "Once", "max_tokens": 2}
        assert server.post("/v1/completions", asked).json()["usage"]["completion_tokens"] == 2
        stub = server.post("/v1/completions", {**asked, "model": f"{REPO}:Q4_0"}).json()
        assert "is not a GGUF file that can be read" in stub["error"]["message"]
        assert {each["id"] for each in server.get("/v1/models").json()["data"]} == set(models)
        shown = server.post("/api/show", {"model": "ollama:llama3.2:latest"}).json()
        assert shown["details"]["family"] == "llama" and shown["model_info"]["general.parameter_count"] > 1e6
        assert server.post("/api/pull", {"model": f"{REPO}:Q8_0", "stream": False}).json() == {"status": "success"}
        for name in ("ollama:llama3.2", f"{REPO}:Q8_0"):  # another program's, and one in use
            with server.client.stream("DELETE", "/api/delete", json={"model": name}) as reply:
                assert reply.status_code == 400, name
        with server.client.stream("DELETE", "/api/delete", json={"model": f"{REPO}:Q4_0"}) as reply:
            assert reply.status_code == 200
        assert f"{REPO}:Q4_0" not in {each["name"] for each in server.get("/api/tags").json()["models"]}


# Fetching


@pytest.fixture
def offered(fake: FakeHub, home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub with a GGUF repository of several quantizations, one of them split."""
    data = tiny.read_bytes()
    files = {
        "x-Q8_0.gguf": data,
        "x-Q4_K_M.gguf": data + b" ",
        "mmproj-F16.gguf": STUB,
        "README.md": b"# X",
        "config.json": b"{}",
    }
    split = {f"BF16/x-BF16-0000{part}-of-00002.gguf": STUB + b"%d" % part for part in (1, 2)}
    mixed = {path.name: path.read_bytes() for path in TINY_DIRECTORY.iterdir() if path.is_file()}
    foreign = {
        "x-Q8_0.gguf": data.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0bloom",
            1,
        )
    }
    fake.reset({REPO: {**files, **split}, "maker/mixed": {**mixed, "x-Q8_0.gguf": data}, "maker/one": foreign})
    use(hub.HubSettings(home / "hub", fake.endpoint, retry=QUICK), monkeypatch)
    return fake


def fetched(fake: FakeHub) -> list[str]:
    """The names of files that were sent as a whole."""
    asked = [record for record in fake.requests if record.method == "GET" and record.server == "storage"]
    return [record.path.rpartition("/")[2] for record in asked if record.headers.get("range") != "bytes=0-4095"]


def test_a_pull_of_one_quantization_brings_its_files_and_no_others(offered: FakeHub, home: Path) -> None:
    pulled = run_cli("pull", f"hf.co/{REPO}:q8_0", "--json")
    assert pulled.code == 0, pulled.err
    assert pulled.json["model"] == f"{REPO}:Q8_0" and fetched(offered) == ["x-Q8_0.gguf"]
    snapshot = RepoCache(home / "hub", REPO).snapshot(COMMIT)
    assert pulled.json["file"] == str(snapshot / "x-Q8_0.gguf") and [path.name for path in snapshot.iterdir()] == [
        "x-Q8_0.gguf"
    ]
    assert [*listed()] == [f"{REPO}:Q8_0"]
    runs(f"{REPO}:Q8_0")
    assert run_cli("pull", f"https://huggingface.co/{REPO}/resolve/main/x-Q4_K_M.gguf?download=true").code == 0
    assert fetched(offered) == ["x-Q8_0.gguf", "x-Q4_K_M.gguf"]
    assert [*listed()] == [f"{REPO}:Q8_0", f"{REPO}:Q4_K_M"]
    assert run_cli("pull", f"{REPO}:Q4_K_M").code == 0 and len(fetched(offered)) == 2
    assert run_cli("rm", f"{REPO}:Q8_0", "--yes").code == 0 and [*listed()] == [f"{REPO}:Q4_K_M"]
    assert hub.locate(f"{REPO}:Q4_K_M", offline=True).name == f"{REPO}:Q4_K_M"


def test_a_pull_of_a_split_model_brings_all_its_files(offered: FakeHub, home: Path) -> None:
    refused(hub.pull, f"{REPO}:BF16", CheckpointError)  # two stubs
    assert sorted(fetched(offered)) == ["x-BF16-00001-of-00002.gguf", "x-BF16-00002-of-00002.gguf"]
    assert [*listed()] == [f"{REPO}:BF16"]


def test_a_pull_that_may_mean_several_is_a_list_with_their_sizes(offered: FakeHub) -> None:
    error = refused(hub.pull, REPO)
    assert [str(fix) for fix in error.fixes] == [
        f"localllm pull {REPO}:{quant}" for quant in ("BF16", "Q8_0", "Q4_K_M")
    ]
    assert "BF16 130 B, Q8_0 7.2 MiB" in error.why and fetched(offered) == []
    absent = refused(hub.pull, f"{REPO}:Q2_K")
    assert "no GGUF model 'Q2_K'" in absent.what and len(absent.fixes) == 3
    assert "no GGUF model" in refused(hub.pull, f"{REPO}/absent.gguf").what
    del offered.repositories[REPO]["x-Q4_K_M.gguf"]
    offered.repositories[REPO] = {"x-Q8_0.gguf": offered.repositories[REPO]["x-Q8_0.gguf"], "README.md": b""}
    assert hub.pull(REPO).name == f"{REPO}:Q8_0"


def test_a_repository_of_both_kinds_is_pulled_as_before_without_a_quantization(offered: FakeHub) -> None:
    assert hub.pull("maker/mixed").gguf is None and "x-Q8_0.gguf" not in fetched(offered)
    assert hub.pull("maker/mixed:Q8_0").gguf is not None and hub.locate("maker/mixed").gguf is None
    assert sorted(listed()) == ["maker/mixed", "maker/mixed:Q8_0"]
    assert refused(hub.pull, "maker/mixed:Q2_K").fixes[0].words[-1] == "maker/mixed:Q8_0"
    offered.repositories["maker/plain"] = {"config.json": b"{}", "model.safetensors": b""}
    assert "no GGUF files" in refused(hub.pull, "maker/plain:Q8_0").what


def test_an_architecture_that_does_not_run_is_told_before_it_is_fetched(offered: FakeHub) -> None:
    error = refused(hub.pull, "maker/one", UnsupportedModelError)
    assert "'bloom'" in error.what and fetched(offered) == []


def test_an_interrupted_pull_is_listed_kept_and_gone_on_with(offered: FakeHub, home: Path) -> None:
    offered.faults.extend([Fault("none"), Fault("cut", 100_000), *[Fault("status", 404)] * 8])
    assert run_cli("pull", f"{REPO}:Q8_0").code == 6
    row = listed()[f"{REPO}:Q8_0"]
    assert row["state"] == "partial" and 50_000 < row["partial_bytes"] <= 100_000
    offered.faults.clear()
    assert run_cli("pull", f"{REPO}:Q4_K_M").code == 0  # another one leaves it alone
    assert {name: row["state"] for name, row in listed().items()} == {
        f"{REPO}:Q4_K_M": "installed",
        f"{REPO}:Q8_0": "partial",
    }
    shutil.copytree(home / "hub", home / "copy", symlinks=True)
    assert run_cli("rm", f"{REPO}:Q8_0", "--yes", "--json").json["freed_bytes"] >= row["partial_bytes"]
    assert [*listed()] == [f"{REPO}:Q4_K_M"]
    shutil.rmtree(home / "hub")
    (home / "copy").rename(home / "hub")
    assert run_cli("pull", f"{REPO}:Q8_0").code == 0
    assert offered.requests[-1].range_start > 0
    assert {row["state"] for row in listed().values()} == {"installed"}


def test_a_later_commit_keeps_the_files_that_have_not_changed(offered: FakeHub) -> None:
    hub.pull(f"{REPO}:Q8_0")
    offered.commit = "e" * 40
    hub.pull(f"{REPO}:Q4_K_M")
    assert fetched(offered) == ["x-Q8_0.gguf", "x-Q4_K_M.gguf"]
    assert hub.locate(f"{REPO}:Q8_0").revision == "e" * 40
    assert sorted(listed()) == sorted([f"{REPO}:Q8_0", f"{REPO}:Q4_K_M", f"{REPO}:Q8_0@{COMMIT}"])


def test_sizes_and_checksums_may_come_from_the_headers(offered: FakeHub) -> None:
    offered.bare_listing = True
    assert hub.pull(f"{REPO}:Q8_0").name == f"{REPO}:Q8_0"
