"""The page for browsers as it is served: to whom, with what headers, and that it asks nobody but this server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest

import localllm.server
from tests.server.conftest import Connect
from tests.server.support import Running, running

KEY = "correct-horse-battery"
OF_BROWSERS = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
FILES = sorted((Path(localllm.server.__path__[0]) / "page").iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
START = next(file for file in FILES if file.name == "index.html").read_text()


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(key=KEY) as server:
        yield server


def opened(server: Running, path: str = "/", method: str = "GET", **headers: str) -> httpx2.Response:
    return server.client.request(method, path, headers={"accept": OF_BROWSERS, **headers})


def test_a_browser_gets_the_page_and_a_program_the_word_that_it_knows(server: Running) -> None:
    page = opened(server)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == START
    for accept in ("*/*", "application/json", "application/json, text/plain, */*", ""):
        assert server.get("/", accept=accept).text == "Ollama is running"


def test_a_head_request_has_the_page_s_headers_and_no_body(server: Running) -> None:
    head, page = opened(server, method="HEAD"), opened(server)
    assert head.content == b"" and head.headers["content-length"] == str(len(page.content))
    assert head.headers["content-type"] == page.headers["content-type"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_file_of_the_page_is_served_as_it_is_and_runs_nothing_else(server: Running, file: Path) -> None:
    reply = server.get(f"/page/{file.name}")
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert reply.content == file.read_bytes() and reply.headers["content-type"].startswith(kinds[file.suffix])
    policy = dict(each.split(" ", 1) for each in reply.headers["content-security-policy"].split("; "))
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
        **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
        "require-trusted-types-for": "'script'",
    }
    told = {name: reply.headers[name] for name in ("x-content-type-options", "referrer-policy", "cache-control")}
    assert told == {
        "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store",
    }  # fmt: skip
    assert reply.headers["x-frame-options"] == "DENY" and len(reply.headers.get_list("content-security-policy")) == 1


@pytest.mark.parametrize(
    "path", ["/page/", "/page", "/page/no.js", "/page/../web_page.py", "/page/%2e%2e/guard.py", "/page/chat.js/", "//"]
)
def test_below_the_page_there_is_nothing_else(connect: Connect, server: Running, path: str) -> None:
    raw = connect(server)
    raw.get(path)
    assert raw.status() == 404


@pytest.mark.parametrize("path", ["/", "/page/chat.js"])
def test_the_page_takes_nothing(server: Running, path: str) -> None:
    assert opened(server, path, "POST").status_code == (405 if path == "/" else 404)


def test_the_page_opens_without_the_key_and_says_nothing_that_needs_it(locked: Running) -> None:
    assert opened(locked).text == START
    assert all(locked.get(f"/page/{file.name}").status_code == 200 for file in FILES)
    others = ["/v1/models", "/page/no.js", "/no"]
    assert [opened(locked, path).status_code for path in others] == [401] * len(others)
    assert locked.get("/").status_code == opened(locked, method="POST").status_code == 401


@pytest.mark.parametrize("path", ["/", "/page/chat.js"])
@pytest.mark.parametrize(
    "headers", [{"host": "evil.test"}, {"origin": "https://evil.test"}, {"origin": "null"}], ids=str
)
def test_the_page_is_behind_the_checks_of_host_and_origin(server: Running, path: str, headers: dict[str, str]) -> None:
    assert opened(server, path, **headers).status_code == 403


def test_the_log_names_the_page(server: Running) -> None:
    server.log.clear()
    opened(server, "/page/chat.js")
    assert server.line_with("/page/{file} 200 ").startswith("GET ")  # another test's refusal may still be written


def test_no_file_of_the_page_names_another_host() -> None:
    namespace = 'xmlns="http://www.w3.org/2000/svg"'  # which nothing fetches
    for file in FILES:
        text = file.read_text().replace(namespace, "")
        assert re.findall(r"(?:https?:|wss?:|[\"'(=])//[\w.-]+|url\(|@import", text) == [], file.name


def test_no_script_and_no_style_stands_in_the_page_itself() -> None:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            found.extend(name for name in named if name.startswith("on") or name == "style")
            found.extend(
                [tag] if tag in ("style", "base", "iframe") or (tag == "script" and "src" not in named) else []
            )

    Reader().feed(START)
    assert found == []


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_text_becomes_html_or_a_program(file: Path) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|Function\(|import\("
    assert re.findall(ways, file.read_text()) == []


def test_whatever_the_page_refers_to_is_there() -> None:
    names = {file.name for file in FILES}
    assert set(re.findall(r'(?:href|src)="/page/([^"]+)"', START)) < names
    assert {name for file in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', file.read_text())} < names
