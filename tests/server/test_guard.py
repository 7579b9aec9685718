"""Who is let in: hosts, origins, keys, and what every reply says to browsers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hmac
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localllm.errors import LocalLLMError, UsageError
from localllm.server import guard
from localllm.server.app import ENDPOINTS
from localllm.server.endpoint import OPENAPI_PATH
from localllm.server.errors import RequestError
from localllm.server.guard import Admission, given_key, kept_key
from localllm.server.replies import JsonReply
from localllm.server.web_page import WebPage
from tests.server.conftest import Connect
from tests.server.support import Patch, Running, each_once, running, wait_for

KEY = "correct-horse-battery"
_PATHS = {(each.method, re.sub(r"\{.*?\}", "tiny", each.path)) for each in ENDPOINTS}
Route = tuple[str, str]
ROUTES = sorted(_PATHS | {("GET", OPENAPI_PATH)})


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(key=KEY) as server:
        yield server


def ask(server: Running, method: str, path: str, **headers: str) -> httpx2.Response:
    fields = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return server.client.request(method, path, headers=fields, content=b"{}" if method != "GET" else None)


OF_FORMS = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded")
ODD_METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "FROBNICATE")
ODD_PATHS = ("/v1/models", "/v1/chat/completions", "/api/delete", "/no", "/", "//", "/v1/models/")
PAGES = ("Origin: http://localhost", "Sec-Fetch-Site: none", "Cookie: a=b", "Sec-Fetch-Mode: cors")
HOSTS = ("evil.test", "127.0.0.1.nip.io", "", "localhost:1", "localhost", "[::1")
ORIGINS = (
    "https://evil.test", "null", "http://localhost.evil.test", "http://evillocalhost", "http://evil.test#localhost",
    "http://localhost@evil.test", "file://", "ftp://localhost", "http://[::1",
)  # fmt: skip


@pytest.mark.parametrize(("route", "host"), each_once(ROUTES, HOSTS))
def test_a_host_that_is_not_this_server_is_refused(server: Running, route: Route, host: str) -> None:
    host = f"{host}:{server.port}" if host.count(".") else host
    reply = ask(server, *route, host=host)
    assert reply.status_code == 403 and "Host" in reply.text


@pytest.mark.parametrize(("route", "origin"), each_once(ROUTES, ORIGINS))
def test_a_page_from_elsewhere_is_refused(server: Running, route: Route, origin: str) -> None:
    reply = ask(server, *route, origin=origin)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "https://localhost", "http://[::1]:5"])
def test_a_page_of_this_machine_is_let_in_without_credentials(server: Running, origin: str) -> None:
    reply = ask(server, "GET", "/v1/models", origin=origin)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "access-control-allow-credentials" not in reply.headers and "Origin" in reply.headers["vary"]
    told = set(reply.headers["access-control-expose-headers"].split(", "))
    assert told == {"x-request-id", "retry-after", "x-should-retry", "x-localllm-evicted-turns", "x-ignored-fields"}


def test_a_preflight_is_answered_for_pages_of_this_machine_alone(server: Running) -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    ours = ask(server, "OPTIONS", "/v1/chat/completions", origin="http://localhost:3000", **asked)
    assert ours.status_code == 200 and ours.headers["access-control-allow-headers"] == "authorization"
    theirs = ask(server, "OPTIONS", "/v1/chat/completions", origin="https://evil.test", **asked)
    nobodys = ask(server, "OPTIONS", "/v1/chat/completions", **asked)
    assert (theirs.status_code, nobodys.status_code) == (403, 200)
    assert not any(name.startswith("access-control") for name in (*theirs.headers, *nobodys.headers))


@pytest.mark.parametrize(("route", "kind"), each_once([route for route in ROUTES if route[0] != "GET"], OF_FORMS))
def test_what_a_page_could_send_without_a_preflight_is_no_request(server: Running, route: Route, kind: str) -> None:
    reply = ask(server, *route, content_type=kind, referer="http://x")
    assert reply.status_code == 415 and "application/json" in reply.text


def test_a_body_that_is_compressed_is_refused_by_its_coding(server: Running) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(b'{"content": "a"}')
    reply = server.client.post("/tokenize", content=body, headers=headers)
    assert reply.status_code == 415 and "'gzip'" in reply.text
    as_it_is = {**headers, "Content-Encoding": "identity"}
    assert server.client.post("/tokenize", content=b'{"content": "a"}', headers=as_it_is).status_code == 200


@pytest.mark.parametrize("kind", ["", "Content-Type: application/x-www-form-urlencoded\r\n"], ids=["none", "curl's"])
@pytest.mark.parametrize("told", ["", *(f"{page}\r\n" for page in PAGES)])
def test_a_body_of_no_type_or_of_curls_is_taken_from_programs_alone(
    connect: Connect, server: Running, told: str, kind: str
) -> None:
    raw = connect(server)
    head = f"Host: 127.0.0.1:{server.port}\r\n{kind}{told}Content-Length: 15\r\n\r\n"
    raw.send(f'POST /tokenize HTTP/1.1\r\n{head}{{"content":"a"}}'.encode())
    assert raw.status() == (415 if told else 200)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_key_no_route_is_reached(locked: Running, method: str, path: str) -> None:
    wrong = {}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"x_api_key": KEY[:-1]}
    assert [ask(locked, method, path, **headers).status_code for headers in wrong] == [401] * 4


@pytest.mark.parametrize(("method", "path"), each_once(ODD_METHODS, ODD_PATHS))
def test_without_the_key_no_method_and_no_other_address_is_reached(locked: Running, method: str, path: str) -> None:
    assert ask(locked, method, path).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x_api_key": KEY},
        {"x_api_key": "of-another-service", "authorization": f"Bearer {KEY}"},
    ],
    ids=str,
)
def test_the_key_opens(locked: Running, headers: dict[str, str]) -> None:
    assert ask(locked, "GET", "/v1/models", **headers).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: Patch) -> None:
    compared, plain = list[tuple[bytes, bytes]](), hmac.compare_digest

    def noting(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return plain(one, other)

    monkeypatch.setattr(guard.hmac, "compare_digest", noting)
    admission = Admission((1,), key_digest=guard.key_digest(KEY))
    for key in ("", "x", KEY):
        headers = guard.Headers({"x-api-key": key, "authorization": "Bearer another"})
        with contextlib.nullcontext() if key == KEY else pytest.raises(RequestError):
            admission.require_key(headers)
    assert len(compared) == 6 and {len(part) for pair in compared for part in pair} == {32}


UNSEEN = {
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin", "referrer-policy": "no-referrer",
}  # fmt: skip


def test_every_reply_tells_browsers_to_make_nothing_of_it(server: Running) -> None:
    replies = [ask(server, "GET", "/v1/models"), ask(server, "GET", "/no"), ask(server, "GET", "/", host="evil.test")]
    for reply in replies:
        assert UNSEEN.items() <= dict(reply.headers).items() and "server" not in reply.headers
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("admission", "known", "unknown"),
    [
        (
            Admission((8420,), is_local=False, hosts=("box.local", "front:80")),
            "192.168.1.7:8420 [fe80::1]:8420 BOX.local:8420 box.local box.local:443 front:80 localhost:8420 "
            "host.docker.internal:8420",
            "192.168.1.7 192.168.1.7:8421 evil.test:8420 front front:8420 1.2.3.4.evil.test:8420",
        ),
        (Admission((80,), is_local=False), "192.168.1.7 localhost [::1]", ""),
        (Admission((8420,), hosts=("localhost:9000",)), "localhost:9000", "localhost:9001"),
        (Admission((8420,)), "localhost:8420", "192.168.1.7:8420 host.docker.internal:8420"),
    ],
    ids=["of others, too", "by http's port, of which nobody says it", "of a tunnel", "of this machine"],
)
def test_a_server_is_called_by_its_own_names_and_ports(admission: Admission, known: str, unknown: str) -> None:
    for host in known.split():
        admission.require_host(host)
    for host in unknown.split():
        with pytest.raises(RequestError, match="refused") as refused:
            admission.require_host(host)
        assert f"--allow-host {host}" in refused.value.fix


def test_a_page_that_was_allowed_is_let_in() -> None:
    admission = Admission((1,), origins=("app://obsidian.md",))
    assert admission.allows_origin("app://obsidian.md") and not admission.allows_origin("app://other")


def test_two_hosts_are_none(connect: Connect, server: Running) -> None:
    raw, own = connect(server), f"Host: 127.0.0.1:{server.port}\r\n"
    raw.send(f"GET /v1/models HTTP/1.1\r\n{own}{own}\r\n".encode())
    assert raw.status() in (400, 403)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:{port}/v1/models", "proxy.test", 200),
        ("HTTP://localhost:{port}/health?x=1", "127.0.0.1:{port}", 200),
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}", 200),
        ("http://evil.test/v1/models", "127.0.0.1:{port}", 403),
        ("http://127.0.0.1:{port}@evil.test/v1/models", "127.0.0.1:{port}", 403),
        ("http://evil.test@127.0.0.1:{port}/v1/models", "127.0.0.1:{port}", 403),
        ("http:///v1/models", "127.0.0.1:{port}", 403),
        ("ftp://127.0.0.1:{port}/v1/models", "127.0.0.1:{port}", 404),
    ],
)
def test_a_request_in_absolute_form_is_for_the_address_that_it_names(
    connect: Connect, server: Running, target: str, host: str, status: int
) -> None:
    raw = connect(server)
    head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    raw.send(head.replace("{port}", str(server.port)).encode())
    assert int(raw.read_all().split()[1]) == status


def test_a_body_of_two_lengths_is_refused_and_the_connection_ends(connect: Connect, server: Running) -> None:
    raw = connect(server)
    own = f"host: 127.0.0.1:{server.port}\r\n"
    head = f"POST /tokenize HTTP/1.1\r\n{own}content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.send(f"{head}0\r\n\r\nGET /health HTTP/1.1\r\n{own}\r\n".encode())
    said = raw.read_all()
    assert said.count(b"HTTP/1.1") == 1 and said.split()[1] == b"400" and b"two lengths" in said


def test_two_hosts_are_none_for_the_guard_either() -> None:
    own = (b"host", b"127.0.0.1:1")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [own, own]}
    statuses: list[int] = []

    async def app(*_: Any) -> None:
        statuses.append(200)

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    asyncio.run(guard.Guard(app, Admission((1,)), WebPage())(scope, app, send))  # type: ignore[arg-type]
    assert statuses == [403]


LAN = Admission((8420,), is_local=False, hosts=("box.local",))
HERE, BOX = "192.168.1.7:8420", "box.local"


@pytest.mark.parametrize(
    ("host", "origin", "site", "status"),
    [
        (HERE, f"http://{HERE}", None, 200),
        (BOX, f"https://{BOX}", "same-origin", 200),  # behind a proxy with TLS
        (BOX, f"http://{BOX}", "cross-site", 403),  # where another has made a page without TLS of that name
        (HERE, "http://192.168.1.7:3000", None, 403),
        (HERE, "http://192.168.1.7", None, 403),
        (HERE, "http://192.168.1.8:8420", None, 403),
        (HERE, f"ftp://{HERE}", None, 403),
        (HERE, "null", None, 403),
        ("evil.test:8420", "http://evil.test:8420", "same-origin", 403),  # DNS rebinding
        ("evil.test", "https://evil.test", "same-origin", 403),
    ],
)
def test_the_server_s_own_page_is_let_in_by_whatever_name_it_was_opened(
    host: str, origin: str, site: str | None, status: int
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await JsonReply({})(scope, receive, send)

    async def posted() -> int:
        transport = httpx2.ASGITransport(guard.Guard(app, LAN, WebPage()))
        headers = {"host": host, "origin": origin, **({} if site is None else {"sec-fetch-site": site})}
        async with httpx2.AsyncClient(transport=transport, base_url="http://any") as client:
            return (await client.post("/v1/chat/completions", headers=headers)).status_code

    assert asyncio.run(posted()) == status


def test_a_made_key_is_shown_once_and_kept_as_its_digest(tmp_path: Any) -> None:
    file = tmp_path / "data" / "server-key"
    first, second = kept_key(file, is_new=False), kept_key(file, is_new=False)
    assert first.made is not None and second.made is None
    assert first.digest == second.digest == guard.key_digest(first.made)
    assert first.made not in file.read_text() and file.stat().st_mode & 0o077 == 0
    assert kept_key(file, is_new=True).made not in (None, first.made)
    file.write_text("abcd")
    assert kept_key(file, is_new=False).made is not None  # it was half written


def test_a_key_that_cannot_be_kept_replaces_none(tmp_path: Any, monkeypatch: Patch) -> None:
    file = tmp_path / "server-key"
    first = kept_key(file, is_new=False)

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(LocalLLMError, match="cannot be kept") as caught:
        kept_key(file, is_new=True)
    assert (caught.value.why, caught.value.fix) == ("No space left on device", "localllm serve --api-key-file FILE")
    assert list(tmp_path.iterdir()) == [file]
    assert kept_key(file, is_new=False).digest == first.digest


def test_a_key_file_may_be_in_the_home_of_its_user(tmp_path: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key.txt").write_text(KEY)
    found = given_key(Path("~/key.txt"), {})
    assert found is not None and found.digest == guard.key_digest(KEY)


def test_the_document_tells_whether_a_key_is_needed(locked: Running, server: Running) -> None:
    told = ask(locked, "GET", OPENAPI_PATH, x_api_key=KEY).json(), ask(server, "GET", OPENAPI_PATH).json()
    assert [each.get("security") for each in told] == [[{"key": []}], None]


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "not a key"), (b"short", "not a key"), (b"with blanks in the middle", "not a key"),
     (b"\xff" * 32, "cannot be read"),
     ("schl\u00fcssel-mit-umlaut".encode(), "not a key"), (None, "cannot be read")],
)  # fmt: skip
def test_what_is_no_key_is_refused(tmp_path: Any, data: bytes | None, why: str) -> None:
    """None: a folder in its place."""
    file = tmp_path / "key.txt"
    file.mkdir() if data is None else file.write_bytes(data)
    with pytest.raises(UsageError, match=why):
        given_key(file, {})
    with pytest.raises(UsageError, match="cannot be read"):
        given_key(tmp_path / "absent", {})


def test_a_key_comes_from_the_file_before_the_variable(tmp_path: Any) -> None:
    file = tmp_path / "key.txt"
    file.write_text(f"{KEY}\n")
    variable = {"LOCALLLM_API_KEY": "another-key-of-mine"}
    found = given_key(file, variable), given_key(None, variable), given_key(None, {})
    wanted = [guard.key_digest(KEY), guard.key_digest("another-key-of-mine"), None]
    assert [each and each.digest for each in found] == wanted


def test_the_log_names_the_address_also_of_who_is_not_let_in(locked: Running) -> None:
    locked.log.clear()
    ask(locked, "GET", "/v1/models/tiny", host="evil.test")
    ask(locked, "POST", "/api/chat")
    ask(locked, "GET", "/no/such")
    wait_for(lambda: len(locked.log) == 3)
    assert [line.rsplit(maxsplit=3)[0] for line in locked.log] == [
        "GET /v1/models/{model:path} 403 host_not_allowed",
        "POST /api/chat 401 invalid_api_key",
        "GET (no such address) 401 invalid_api_key",
    ]
