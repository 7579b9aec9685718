"""What is fetched, from a hub that misbehaves: never a wrong byte, never the token elsewhere."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from localllm.errors import (
    AccessError,
    CheckpointError,
    DoesNotFitError,
    DownloadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from localllm.hub import PullProgress, locate, pull
from localllm.hub.repo_cache import RepoCache
from tests.fake_hub import COMMIT, Fault, sha256
from tests.hub.support import (
    LEAST,
    PIECE,
    QUICK,
    REPO,
    REPOSITORY,
    SHARDS,
    UNWANTED,
    assert_whole,
    leftovers,
    names_in,
    single_model,
    use,
)
from tests.thinning import every_other, thinned

# What is fetched


@pytest.mark.parametrize("repo", [REPO, "maker/sharded"])
def test_a_pull_brings_the_wanted_files_and_nothing_else(fake, hub, fetch, repo):
    directory = fetch(repo)
    assert_whole(directory, fake.repositories[repo])
    assert directory == locate(repo).directory
    assert directory.name == COMMIT and leftovers(hub) == []


def test_a_pull_brings_the_additional_chat_templates(fake, hub, fetch):
    wanted = {"additional_chat_templates/tool_use.jinja": b"tools", "additional_chat_templates/rag.jinja": b"rag"}
    unwanted = ("additional_chat_templates/x/y.jinja", "additional_chat_templates/../up.jinja", "others/z.jinja")
    fake.repositories[REPO] |= wanted | dict.fromkeys([*unwanted, "additional_chat_templates/code.py"], b"no")
    directory = fetch()
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*.jinja")}
    assert {name: path.read_bytes() for name, path in found.items()} == wanted
    assert locate(REPO).directory == directory
    found["additional_chat_templates/tool_use.jinja"].unlink()
    assert "additional_chat_templates/tool_use.jinja" in RepoCache(hub.cache_dir, REPO).missing(directory.name)


@pytest.mark.parametrize("name", ["rwkv_vocab_v20230424.txt", "tiktoken.model"])
def test_a_vocabulary_in_its_makers_form_is_a_tokenizer(fake, hub, fetch, name):
    files = fake.repositories[REPO]
    files[name] = files.pop("tokenizer.json")
    directory = fetch()
    assert (directory / name).read_bytes() == files[name]
    assert RepoCache(hub.cache_dir, REPO).missing(COMMIT) == []
    (directory / name).unlink()
    assert RepoCache(hub.cache_dir, REPO).missing(COMMIT) == [name]


def test_a_second_pull_fetches_no_file_again(fake, fetch):
    fetch()
    fake.requests.clear()
    fetch()
    assert [record.path for record in fake.requests] == [f"/api/models/{REPO}/revision/main"]


def test_the_cache_is_one_that_huggingface_hub_reads(hub, fetch):
    from huggingface_hub import scan_cache_dir, snapshot_download

    directory = fetch()
    assert snapshot_download(REPO, cache_dir=hub.cache_dir, local_files_only=True) == str(directory)
    assert {repo.repo_id for repo in scan_cache_dir(hub.cache_dir).repos} == {REPO}


def test_sizes_and_checksums_come_from_the_files_headers_where_the_listing_has_none(fake, fetch):
    fake.bare_listing = True
    assert_whole(fetch(), fake.repositories[REPO])


def test_progress_counts_verified_bytes_up_to_the_total(fake, hub):
    seen: list[PullProgress] = []
    pull(REPO, progress=seen.append)
    wanted = sum(len(data) for name, data in fake.repositories[REPO].items() if name not in UNWANTED)
    counts = [event.done_bytes for event in seen if event.phase == "downloading"]
    assert counts == sorted(counts) and (counts[-1], seen[-1].total_bytes) == (wanted, wanted)


def test_links_fall_back_to_copies(fake, fetch, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    directory = fetch()
    assert_whole(directory, fake.repositories[REPO])
    assert not (directory / "config.json").is_symlink()


def test_a_new_commit_replaces_the_old_one_only_when_it_is_whole(fake, hub, fetch):
    first = fetch()
    fake.commit = "f" * 40
    fake.repositories[REPO]["model.safetensors"] = random.Random(8).randbytes(PIECE)
    fake.always = Fault("status", 500)
    with pytest.raises(DownloadError):
        fetch()
    assert locate(REPO).directory == first
    fake.always = None
    assert_whole(fetch(), fake.repositories[REPO])
    assert locate(REPO).revision == "f" * 40
    assert locate(f"{REPO}@{COMMIT}").directory == first


def test_a_damaged_small_file_in_the_cache_is_mended_by_a_pull(fake, fetch):
    blob = (fetch() / "config.json").resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    assert_whole(fetch(), fake.repositories[REPO])


# A network that fails: never a wrong byte, never the token elsewhere

MENDABLE = {
    "cut every piece": [Fault("cut", PIECE)] * 8,
    "cut gently": [Fault("cut gently", PIECE)] * 8,
    "closed before the first byte": [Fault("reset")] * 2,
    "announces less": [Fault("length", -5)],
    "announces more": [Fault("length", 5)],
    "announces more when going on": [Fault("cut", PIECE), *[Fault("length", 5)] * 8],
    "sends more": [Fault("longer", 70_000)],
    "429": [Fault("status", 429)],
    "429 with a time to wait": [Fault("status", 429, "0")],
    "429 with a date to wait for": [Fault("status", 429, "Wed, 21 Oct 2015 07:28:00 GMT")],
    "429 with nonsense to wait for": [Fault("status", 429, "soon")],
    "compressed ranges": [Fault("cut", PIECE), Fault("gzip"), Fault("gzip")],
    "503": [Fault("status", 503), Fault("status", 502)],
    "403 from the storage host": [Fault("status", 403)],
    "a login page": [Fault("html", text="text/html; charset=utf-8")],
    "a login page that hides": [Fault("html", text="application/octet-stream")],
    "a flipped byte": [Fault("flip", 2 * PIECE)],
    "a flipped byte before a cut": [Fault("flip", 5), Fault("cut", PIECE)],
    "another content of the same length": [Fault("cut", PIECE), Fault("other content")],
    "another range": [Fault("cut", PIECE), *[Fault("wrong range", 7)] * 3],
    "a stall": [Fault("stall", 1)],
}
THRIFTY = {
    "without ranges": ([Fault("cut", PIECE), Fault("ignore range")], 2),
    "that sends another range": ([Fault("cut", PIECE), Fault("wrong range", 7)], 3),
    "that refuses to go on": ([Fault("cut", PIECE), Fault("status", 416)], 3),
    "that compresses": ([Fault("gzip")], 1),
    "that compresses a range": ([Fault("cut", PIECE), Fault("gzip")], 3),
}
SERVERS = {**{name: (faults, None) for name, faults in MENDABLE.items()}, **THRIFTY}


@pytest.mark.parametrize("name", thinned(SERVERS, [*[*MENDABLE][::2], *THRIFTY].__contains__))
def test_a_pull_outlives_a_server_and_throws_no_byte_away_for_its_ranges(fake, hub, fetch, name):
    faults, requests = SERVERS[name]
    fake.faults.extend(faults)
    assert_whole(fetch(), fake.repositories[REPO])
    assert leftovers(hub) == []
    if requests:
        starts = [record.range_start for record in fake.file_requests("model.safetensors")]
        assert len(starts) == requests and all(start > 0 for start in starts[1:2])
        assert not any(starts[2:])


HOPELESS = {
    "always announces less": Fault("length", -5),
    "always answers 416": Fault("status", 416),
    "always answers 429": Fault("status", 429, "0"),
    "always answers 500": Fault("status", 500),
    "always shows a login page": Fault("html", text="text/html"),
    "always shows a login page that hides": Fault("html", text="application/octet-stream"),
    "always flips a byte": Fault("flip", 2 * PIECE),
    "always sends another content": Fault("other content"),
    "never sends a byte": Fault("reset"),
    "asks to wait for an hour": Fault("status", 429, "3600"),
}


@pytest.mark.parametrize("name", every_other(HOPELESS))
def test_a_pull_gives_up_without_a_file_where_the_server(fake, hub, fetch, name):
    fake.faults.append(Fault("cut", PIECE))
    fake.always = HOPELESS[name]
    with pytest.raises(DownloadError) as caught:
        fetch()
    assert (caught.value.exit_code, caught.value.fix) == (6, f"localllm pull {REPO}")
    assert "login page" in caught.value.why or HOPELESS[name].text != "text/html"
    assert sha256(fake.repositories[REPO]["model.safetensors"]) not in names_in(RepoCache(hub.cache_dir, REPO).blobs)
    with pytest.raises(ModelNotFoundError):
        locate(REPO)
    fake.always = None
    assert_whole(fetch(), fake.repositories[REPO])


def test_a_connection_cut_every_mib_costs_hardly_a_byte(fake, fetch):
    fake.repositories[REPO] = single_model(5 << 20)
    fake.always = Fault("cut", 1 << 20)
    fetch()
    size = len(fake.repositories[REPO]["model.safetensors"])
    assert fake.sent_bytes("model.safetensors") <= 1.1 * size


def test_the_time_that_a_server_asks_to_wait_is_waited(fake, fetch):
    fake.faults.append(Fault("status", 429, "1"))
    start = time.monotonic()
    fetch()
    assert time.monotonic() - start >= 1


def test_the_token_goes_to_the_hub_and_to_no_other_host(fake, fetch):
    fake.requires_token = "hf_secret"
    fake.always = Fault("cut", PIECE)
    fetch()
    elsewhere = [record for record in fake.requests if record.server == "storage"]
    assert len(elsewhere) >= 3
    assert all("authorization" not in record.headers and "hf_secret" not in str(record) for record in elsewhere)
    assert all("authorization" in record.headers for record in fake.requests if record.server == "hub")


def test_a_redirected_listing_does_not_carry_the_token(fake, fetch):
    fake.listing_faults.append(Fault("redirect", text=f"{fake.storage}/api/models/{REPO}/revision/main"))
    fetch()
    assert [r.headers.get("authorization") for r in fake.requests if r.server == "storage"] == [None, None]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "javascript:1"])
def test_a_redirect_to_anything_but_http_is_not_followed(fake, fetch, target):
    fake.redirect_to = lambda _: target
    with pytest.raises(DownloadError, match="redirect"):
        fetch()


def test_a_redirect_from_https_to_http_is_refused(hub, monkeypatch):
    import httpx2

    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        return httpx2.Response(302, headers={"Location": "/y" if len(asked) == 1 else "http://hub.example/x"})

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: client)
    use(replace(hub, endpoint="https://hub.example"), monkeypatch)
    with pytest.raises(DownloadError, match="redirect"):
        pull(REPO)
    assert asked == [f"https://hub.example/api/models/{REPO}/revision/main?blobs=true", "https://hub.example/y"]


def test_endless_redirects_end(fake, hub, fetch):
    fake.redirect_to = lambda location: location.replace(fake.storage, fake.endpoint)
    with pytest.raises(DownloadError, match="could not be fetched") as caught:
        fetch()
    assert "redirects" in caught.value.why


# What the hub says about a repository


def test_a_repository_that_is_not_there_is_not_found(fetch):
    with pytest.raises(ModelNotFoundError) as caught:
        fetch("maker/modle")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("is_sent", "state"), [(True, "a token was sent"), (False, "HF_TOKEN is not set")])
def test_a_gated_repository_names_its_page_and_the_state_of_the_token(fake, hub, monkeypatch, is_sent, state):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", not is_sent)
    fake.requires_token = "another"
    with pytest.raises(AccessError, match="refuses") as caught:
        pull(REPO)
    assert caught.value.exit_code == 6 and f"{fake.endpoint}/{REPO}" in caught.value.fix
    assert state in caught.value.why


@pytest.mark.parametrize(
    "fault", [Fault("html"), Fault("status", 503), Fault("raw", text="[]"), Fault("raw", text="{")]
)
def test_a_listing_is_asked_for_again(fake, fetch, fault):
    fake.listing_faults.append(fault)
    assert_whole(fetch(), fake.repositories[REPO])


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"sha": "../../x", "siblings": []}',
        json.dumps({"sha": COMMIT, "siblings": 3}),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name, "size": -1, "blobId": COMMIT} for name in LEAST]}),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name, "size": 1, "blobId": "../x"} for name in LEAST]}),
    ],
    ids=range(5),
)
def test_a_listing_that_makes_no_sense_is_an_error(fake, fetch, text):
    fake.listing_faults.append(Fault("raw", text=text))
    with pytest.raises(DownloadError):
        fetch()


REFUSED = {
    "no safetensors": ({"model.safetensors": None}, r"no model\.safetensors", (".bin", ".gguf")),
    "no tokenizer": ({"tokenizer.json": None}, "no tokenizer", ("tokenizer.model",)),
    "quantized": ({"config.json": b'{"quantization_config": {"quant_method": "exl2"}}'}, "quantized by 'exl2'", ()),
    "unknown": ({"config.json": b'{"model_type": "bloom"}'}, "bloom", ()),
}


@pytest.mark.parametrize(("changes", "refusal", "reasons"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_run_is_refused_before_its_weights_are_fetched(fake, fetch, changes, refusal, reasons):
    files = {**fake.repositories[REPO], **changes}
    fake.repositories[REPO] = {name: data for name, data in files.items() if data is not None}
    with pytest.raises(UnsupportedModelError, match=refusal) as caught:
        fetch()
    assert all(reason in caught.value.why for reason in reasons)
    assert fake.file_requests("model.safetensors") == []


def test_an_index_that_names_an_absent_shard_is_an_error(fake, fetch, hub):
    del fake.repositories["maker/sharded"][SHARDS[1]]
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        fetch("maker/sharded")
    with pytest.raises(ModelNotFoundError):
        locate("maker/sharded")


def test_without_a_network_the_error_has_the_command_that_goes_on(hub, monkeypatch):
    use(replace(hub, endpoint="http://127.0.0.1:9", retry=replace(QUICK, listing_attempts=2)), monkeypatch)
    with pytest.raises(DownloadError) as caught:
        pull(REPO)
    assert (caught.value.exit_code, caught.value.fix) == (6, f"localllm pull {REPO}")


def test_offline_nothing_is_asked_of_the_network(fake, hub, fetch):
    with pytest.raises(ModelNotFoundError, match="not on this disk"):
        pull(REPO, offline=True)
    assert fake.requests == []
    directory = fetch()
    fake.requests.clear()
    assert pull(REPO, offline=True).directory == directory and fake.requests == []


def test_the_environment_of_huggingface_hub_is_honoured(fake, tmp_path):
    fake.requires_token = "hf_environment"
    of_the_hub = {"HF_ENDPOINT": fake.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_environment"}
    environment = {"PYTHONPATH": str(REPOSITORY), **of_the_hub, "LOCALLLM_HOME": str(tmp_path), "NO_PROXY": "*"}
    code = f"from localllm.hub import locate, pull; assert pull({REPO!r}) == locate({REPO!r})"
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
    snapshot = tmp_path / "home" / "hub" / "models--maker--model" / "snapshots" / COMMIT
    assert_whole(snapshot, fake.repositories[REPO])
    assert all(record.path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")) for record in fake.requests)


# Space


def test_space_is_checked_before_a_byte_is_fetched(fake, fetch, monkeypatch):
    monkeypatch.setattr("localllm.hub.repo_cache.shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 * PIECE}))
    with pytest.raises(DoesNotFitError) as caught:
        fetch()
    assert caught.value.exit_code == 4 and "768.1 KiB" in caught.value.why
    assert "512.0 KiB" in caught.value.why and len(fake.requests) == 1


def test_a_disk_that_fills_up_on_the_way_keeps_what_was_fetched(fake, fetch, hub, monkeypatch):
    write = os.write
    count = [0]

    def limited(descriptor: int, data: bytes) -> int:
        count[0] += len(data)
        if count[0] > PIECE:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError):
        patch.setattr(os, "write", limited)
        fetch()
    fake.requests.clear()
    assert_whole(fetch(), fake.repositories[REPO])
    assert fake.file_requests("model.safetensors")[0].range_start >= PIECE // 2
