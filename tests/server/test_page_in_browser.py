"""The chat page in a headless Chromium: what its user sees and does, and that it asks nobody but its server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from localllm.engine.engine import Engine
from tests.cli_support import write_checkpoint
from tests.patience import PATIENCE_S, wait_for
from tests.server import browser
from tests.server.browser import CONTROL, ENTER, ESCAPE, SHIFT, Browser
from tests.server.support import Patch, Running, Says, num_cancelled, running

pytestmark = pytest.mark.skipif(
    browser.CHROMIUM is None or browser.DRIVER is None, reason="there is no Chromium with its chromedriver here"
)
KEY = "correct-horse-battery"
QUESTION = "A tale about an owl, please."
ANSWER = ".assistant > .body"
LAST_NOTE = "#messages > :last-child footer"
HOSTILE = """\
<script>document.title = "run"</script><img src="http://evil.test/a.png" onerror="document.title = 'run'">

![picture](http://evil.test/b.png) [a](javascript:document.title='run') [b](//evil.test/c) <b>bold</b> &lt;

| <i>cell</i> | <svg onload=alert(1)> |
|---|---|
| 1 | 2 |

```html
<script>document.title = "run"</script>
```"""
MARKDOWN = """\
# Owls

They **see** *well* at `night`; [more](https://owl.test/a_(b) "title") at https://owl.test/c.

1. First
   - nested
2. Second

- [x] done
- [ ] open

| bird | weight |
|:-----|-------:|
| a \\| b | 2 |

> quoted

```python
def fly():
    return "**up**"
```
Text with 3 * 4 * 5 and snake_case_name."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(window: Browser, server: Running) -> Iterator[Browser]:
    with visited(window, server) as opened:
        yield opened


@contextmanager
def visited(window: Browser, server: Running) -> Iterator[Browser]:
    """The server's page, as it is opened for the first time, which asks nobody but the server."""
    window.requests()
    window.open(f"{server.url}/")
    window.script("localStorage.clear(); sessionStorage.clear()")
    window.open(f"{server.url}/")
    yield window
    window.open("about:blank")  # which stops what still runs
    hosts = {urlsplit(url).netloc for url in window.requests()}
    assert hosts == {f"127.0.0.1:{server.port}"}


def ask(page: Browser, question: str = QUESTION) -> None:
    page.type("#question", question + ENTER)


def ask_for_long(page: Browser) -> None:
    """Ask for an answer as long as the context, and wait for its beginning."""
    page.script("""const plain = window.fetch, bias = {0: -100, 2: -100}; // against what would end it
        window.fetch = (path, options) => {
            const body = options.body && JSON.stringify({...JSON.parse(options.body), logit_bias: bias});
            return plain(path, {...options, body});
        };""")
    ask(page)
    page.wait_for_text(ANSWER, " ")


def answered(page: Browser, question: str = QUESTION) -> str:
    """The whole answer to a question."""
    ask(page, question)
    page.wait_for_text(LAST_NOTE, "Regenerate")
    return page.text("#messages > :last-child > .body")


def kept(page: Browser) -> list[dict[str, Any]]:
    """The messages of the one chat that the browser keeps."""
    [chat] = page.script("return Object.entries(localStorage).filter(([key]) => key.includes('chat')).map((e) => e[1])")
    return list(json.loads(chat)["messages"])


def test_a_question_is_answered_and_tells_its_cost(page: Browser, says: Says) -> None:
    says("Once upon a time.")
    wait_for(lambda: page.script("return document.querySelectorAll('#model option').length"))  # with their contexts
    assert answered(page) == "Once upon a time."
    assert page.text(".user > .body") == QUESTION and page.script("return document.title") == QUESTION
    note = page.text(LAST_NOTE)
    assert "tokens" in note and "tok/s" in note and "% full" in note
    assert page.text("#said") == "Once upon a time."  # for screen readers
    assert page.script("return document.activeElement.id") == "question"


def test_an_answer_comes_token_by_token_until_escape_stops_it_in_the_server(page: Browser, server: Running) -> None:
    before = num_cancelled(server)
    ask_for_long(page)
    assert page.text("#send") == "Stop"
    length = len(page.text(ANSWER))
    wait_for(lambda: len(page.text(ANSWER)) > length)
    page.press(ESCAPE)
    page.wait_for_text(LAST_NOTE, "stopped")
    wait_for(lambda: num_cancelled(server) == before + 1)
    assert page.text("#send") == "Send" and page.text(ANSWER).startswith(kept(page)[1]["content"][:20])


def test_the_button_stops_an_answer_and_it_can_be_generated_anew(page: Browser, server: Running, says: Says) -> None:
    before = num_cancelled(server)
    ask_for_long(page)
    page.click("#send")
    wait_for(lambda: num_cancelled(server) == before + 1)
    page.wait_for_text(LAST_NOTE, "Regenerate")
    says("Another.")
    page.script("[...document.querySelectorAll('footer button')].find((each) => /Reg/.test(each.innerText)).click()")
    page.wait_for_text(ANSWER, "Another.")
    page.wait_for_text(LAST_NOTE, "Regenerate")
    assert [each["role"] for each in kept(page)] == ["user", "assistant"] and page.count("article") == 2


def test_shift_and_enter_is_a_new_line_and_an_empty_question_is_none(page: Browser) -> None:
    page.type("#question", f"  {ENTER}")
    page.type("#question", "one")
    page.press(SHIFT, ENTER)
    page.type("#question", "two")
    assert page.script("return document.querySelector('#question').value.trim()") == "one\ntwo"
    assert page.count("article") == 0


def test_a_chat_outlives_a_reload_and_another_is_begun_by_a_key(page: Browser, says: Says) -> None:
    says("It was night.")
    answered(page)
    page.command("POST", "/refresh")
    page.wait_for_text(LAST_NOTE, "Regenerate")
    assert (page.text(".user > .body"), page.text(ANSWER)) == (QUESTION, "It was night.")
    page.press(CONTROL, SHIFT, "o")
    wait_for(lambda: page.count("article") == 0)
    page.click("[popovertarget=chats]")
    page.wait_for_text("#chats", QUESTION)
    page.click("#chats a")
    page.wait_for_text(ANSWER, "It was night.")
    page.click("[popovertarget=chats]")
    page.click("#chats li button")
    page.command("POST", "/alert/accept")
    page.wait_for_text("#chats", "None yet")
    assert page.count("article") == 0
    assert not page.script("return Object.keys(localStorage).some((key) => key.includes('chat'))")


def test_a_chat_that_another_tab_deleted_stays_deleted(page: Browser, says: Says) -> None:
    says("It was night.")
    answered(page)
    page.script("localStorage.clear()")
    page.command("POST", "/refresh")
    wait_for(lambda: page.count("article") == 0)
    assert not page.script("return Object.keys(localStorage).some((key) => key.includes('chat'))")


def test_a_reload_during_an_answer_keeps_its_beginning_and_ends_it_in_the_server(
    page: Browser, server: Running
) -> None:
    before = num_cancelled(server)
    ask_for_long(page)
    page.command("POST", "/refresh")
    page.wait_for_text(LAST_NOTE, "Regenerate")
    assert page.text(ANSWER)
    wait_for(lambda: num_cancelled(server) == before + 1)


def test_what_a_model_says_is_text_and_never_a_part_of_the_page(page: Browser, says: Says) -> None:
    says(HOSTILE)
    shown = answered(page)
    for part in ('<script>document.title = "run"</script><img', "<b>bold</b> &lt;", "[a](javascript:", "<i>cell</i>"):
        assert part in shown
    assert page.count(f"{ANSWER} :is(script, img, b, i, svg, iframe)") == 0
    links = "return [...document.querySelectorAll(arguments[0])].map((each) => [each.href, each.rel, each.target])"
    found = [[f"http://evil.test/{name}.png", "noopener noreferrer", "_blank"] for name in "ab"]
    assert page.script(links, f"{ANSWER} a") == found
    assert page.script("return document.title") == QUESTION
    assert page.text(f"{ANSWER} pre") == '<script>document.title = "run"</script>'
    assert not [said for said in page.complaints() if "Content Security Policy" in said]


def test_html_that_gets_past_the_page_is_stopped_by_its_headers(page: Browser) -> None:
    tried = "try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch (error) { return error.name }"
    assert page.script(tried) == "TypeError"
    assert page.script("return fetch('http://127.0.0.2:1/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert any("connect-src" in said for said in page.complaints())


def test_markdown_becomes_elements(page: Browser, says: Says) -> None:
    says(MARKDOWN)
    answered(page)
    found = {
        "h2": "Owls", "strong": "see", "em": "well", "p > code": "night", "ol > li > ul > li": "nested",
        "ol > li:nth-child(2)": "Second", "li.task:has(:checked)": "done", "li.task:not(:has(:checked))": "open",
        "th": "bird\nweight", "td": "a | b\n2", "blockquote": "quoted", "figcaption": "python\nCopy",
        "pre": 'def fly():\n    return "**up**"', ":scope > :last-child": "Text with 3 * 4 * 5 and snake_case_name.",
    }  # fmt: skip
    script = """const body = document.querySelector(arguments[0]);
        const textOf = (each) => each.innerText.trim();
        const text = (selector) => [...body.querySelectorAll(selector)].map(textOf).join("\\n");
        return Object.fromEntries(arguments[1].map((selector) => [selector, text(selector)]))"""
    assert page.script(script, ANSWER, list(found)) == found
    links = page.script("return [...document.querySelectorAll(arguments[0])].map((each) => each.href)", f"{ANSWER} a")
    assert links == ["https://owl.test/a_(b)", "https://owl.test/c"]


def test_a_block_of_code_is_copied_as_it_is(page: Browser, says: Says) -> None:
    page.command("POST", "/permissions", {"descriptor": {"name": "clipboard-read"}, "state": "granted"})
    says("```python\nfly( )\n```")
    answered(page)
    page.click("figure button")
    page.wait_for_text("figure button", "Copied")
    assert page.script("return navigator.clipboard.readText()") == "fly( )"


USUAL = "An **owl** flew over `the wood`, *at night*.\n\n" * 1_000
ODD = (
    "*a " * 20_000, "_a " * 9_000 + "b* " * 9_000, "`" * 500 + "` `` ``` " * 3_000, "[" * 30_000, "[a](" * 10_000,
    "> " * 9_000, "- " * 9_000, "\n" * 30_000 + "- a\n\n" * 5_000, "|" * 9_000 + "\n" + "|-" * 9_000, "#" * 50_000,
    "https://" + "." * 50_000, "```" + "a" * 40_000 + "`", "\\" * 50_000, "* " * 20_000 + "x",
    " " * 50_000 + "|\n|-|", "1. a\n" * 9_000, "a\n\n" * 20_000, "***a" * 9_000 + "*b**" * 9_000,
)  # fmt: skip


def test_no_text_takes_the_page_much_longer_than_another(page: Browser) -> None:
    timed = """return import("/page/markdown.js").then(({MarkdownView}) => arguments[0].map((text) => {
        const began = performance.now();
        new MarkdownView(document.createElement("div")).show(text);
        return performance.now() - began;
    }))"""
    _, usual_ms, *odd_ms = page.script(timed, [USUAL, USUAL, *ODD])
    assert max(odd_ms) < 30 * usual_ms


def test_thoughts_are_folded(page: Browser, server: Running, speaks: Says, says: Says) -> None:
    speaks(server.engine.template.sources["default"] + "{% if add_generation_prompt %}<think>\n{% endif %}")
    says("An owl, then.</think>Once upon a time.")
    answered(page)
    assert page.text(ANSWER) == "Once upon a time." and page.text(".assistant summary") == "Thoughts"
    assert "An owl, then." not in page.text(".assistant details")
    page.click(".assistant summary")
    page.wait_for_text(".assistant details", "An owl, then.")


def test_the_settings_are_sent_and_kept(page: Browser, server: Running, says: Says) -> None:
    page.click("[popovertarget=settings]")
    page.type("#system", "You are a poet.")
    page.type("#temperature", "101")
    page.press(ESCAPE)
    ask(page)
    page.wait_for_text(".error", "temperature")
    page.click("[popovertarget=settings]")
    page.command("POST", f"/element/{page.find('#temperature')}/clear")
    page.type("#temperature", "0.5")
    page.press(ESCAPE)
    says("A verse.")
    page.script("""window.sent = []; const plain = window.fetch;
        window.fetch = (path, options) => { window.sent.push(options.body); return plain(path, options); }""")
    page.click(".error button")
    page.wait_for_text(ANSWER, "A verse.")
    [sent] = [json.loads(each) for each in page.script("return window.sent") if each]
    assert sent["temperature"] == 0.5 and sent["model"] == "tiny" and sent["stream"] is True
    assert sent["messages"] == [{"role": "system", "content": "You are a poet."}, {"role": "user", "content": QUESTION}]
    page.command("POST", "/refresh")
    page.wait_for_text(ANSWER, "A verse.")
    assert page.script("return [system.value, temperature.value]") == ["You are a poet.", "0.5"]


def test_light_and_dark_follow_the_system_until_they_are_chosen(page: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        page.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen.append(page.script(ground))
    page.click("#theme")
    assert [page.script(ground), seen[1]] == [seen[0], "rgb(21, 23, 26)"]
    page.command("POST", "/refresh")
    assert page.script(ground) == seen[0]


def test_nothing_is_wider_than_a_narrow_screen(page: Browser, says: Says) -> None:
    page.resize(360, 640)
    try:
        says(f"{MARKDOWN}\n\n{'wide' * 50}\n\n```\n{'long ' * 50}\n```")
        answered(page)
        widths = "return [document.documentElement, messages].map((each) => each.scrollWidth - each.clientWidth)"
        assert page.script(widths) == [0, 0]
    finally:
        page.cdp("Emulation.clearDeviceMetricsOverride")


def test_a_prompt_that_is_too_long_is_said_with_its_numbers(page: Browser, says: Says) -> None:
    page.script("question.value = 'owl '.repeat(9000)")
    ask(page)
    page.wait_for_text(".error", "maximum context length")
    assert "New chat" in page.text(".error") and page.text("#send") == "Send"
    page.click(".error button:last-child")  # which gives the question back
    assert page.count("article") == 0
    page.script("question.value = question.value.slice(0, 7)")
    says("Yes.")
    assert answered(page, "!") == "Yes." and page.text(".user > .body") == "owl owl!"


def test_the_key_is_asked_for_and_kept_for_the_session(window: Browser) -> None:
    with running(key=KEY) as server, visited(window, server) as page:
        page.wait_for_text("dialog", "needs its API key")
        page.type("#key", f"wrong-key{ENTER}")
        page.wait_for_text("dialog", "key is wrong")
        page.type("#key", f"{KEY}{ENTER}")
        page.wait_for_text("#model", "tiny")
        page.command("POST", "/refresh")
        page.wait_for_text("#model", "tiny")
        assert page.count("dialog[open]") == 0
        assert page.script("return [sessionStorage, localStorage].map((each) => Object.values(each).join())") == [
            KEY,
            "",
        ]


def test_without_the_key_the_page_says_so(window: Browser) -> None:
    with running(key=KEY) as server, visited(window, server) as page:
        page.wait_for_text("dialog", "needs its API key")
        page.press(ESCAPE)
        ask(page)
        page.wait_for_text("dialog", "needs its API key")
        page.press(ESCAPE)
        page.wait_for_text(".error", "an API key is needed")


def test_a_server_that_has_gone_is_said(window: Browser) -> None:
    with ExitStack() as running_server:
        server = running_server.enter_context(running())
        with visited(window, server) as page:
            ask_for_long(page)
            running_server.close()
            page.wait_for_text(".error", "shutting down")
            page.click(".error button")
            page.wait_for_text(".error", "does not answer. Is localllm serve running?")
            assert "Ask again" in page.text(".error") and [each["role"] for each in kept(page)] == ["user"]


def test_a_browser_that_keeps_no_more_says_so_and_the_chat_goes_on(page: Browser, says: Says) -> None:
    page.script("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 5))")
    says("Yes.")
    ask(page)
    page.wait_for_text(ANSWER, "Yes.")
    page.wait_for_text(".error", "Regenerate")
    assert "this chat is not kept" in page.text(".error") and page.count(".error") == 1


def test_another_model_says_that_it_is_loading(window: Browser, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    with running(also=[other]) as server, visited(window, server) as page:
        page.wait_for_text("#model", "other (not loaded)")
        page.script("model.value = 'other'; model.dispatchEvent(new Event('change'))")
        page.script("""window.seen = "";
            const watch = new MutationObserver(() => { window.seen += messages.innerText; });
            watch.observe(messages, {childList: true, subtree: true});""")
        ask(page)
        page.wait_for_text(ANSWER, " ")
        assert "loading other …" in page.script("return window.seen")
        page.press(ESCAPE)
        page.wait_for_text(LAST_NOTE, "stopped")
        wait_for(lambda: "other (not loaded)" not in page.text("#model"))
        page.command("POST", "/refresh")
        wait_for(lambda: page.script("return model.value") == "other")


def test_a_model_that_is_loading_answers_when_it_is_there(window: Browser, monkeypatch: Patch) -> None:
    """Also where that takes longer than the server lets a request wait."""
    monkeypatch.setattr("localllm.runtime.model_pool.LOAD_WAIT_S", 0.05)
    loaded = threading.Event()

    def load() -> Engine:
        loaded.wait(PATIENCE_S)
        return Engine.load("tiny")

    with running(load=load) as server, visited(window, server) as page:
        page.wait_for_text("#model", "tiny (not loaded)")
        ask(page)
        page.wait_for_text(LAST_NOTE, "loading tiny … ")
        server.line_with("503 loading")
        loaded.set()
        page.wait_for_text(ANSWER, " ")
