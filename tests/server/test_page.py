"""The page at ``/``, in headless Chromium, on a real server: it chats, it shows the loop, and it asks nobody else."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from .conftest import address, launch

KEY = "kä/y+1"  # what a header cannot carry as it is
PATIENCE = 120  # seconds, for what does come; nothing is asserted of how soon
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
ESSAY = "Write a long essay about the sea, the ships that cross it and the people who live from it."
# Keeps what the page shows as it changes, since a look now and then might miss it.
RECORD = """
window.told = [];
window.grown = [];
new MutationObserver(() => told.push(at("step").textContent)).observe(at("step"), {childList: true});
new MutationObserver(() => grown.push(at("log").querySelector(".assistant")?.textContent.length ?? 0))
    .observe(at("log"), {childList: true, subtree: true});
"""


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    """Of a server with an API key."""
    server = launch(smollm2_path, "--max-model-len", "1024", "--quiet", env={"INFERFLOW_API_KEY": KEY})
    try:
        yield f"{address(server)}/"
    finally:
        server.kill()


class Page:
    """The page in a browser."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        host = url.removeprefix("http://")
        driver.get(f"http://any:{quote(KEY, safe='')}@{host}")
        self.wait(lambda: self.text("#link") == "live")
        self.run(RECORD)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def wait(self, met: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: met())

    def fill(self, name: str, value: object) -> None:
        if name in ("system", "temperature", "limit", "key"):
            self.run("at('settings').open = true")
        field = self.find(f"#{name}")
        field.clear()
        field.send_keys(str(value), Keys.TAB)

    def ask(self, text: str, limit: int) -> None:
        self.fill("limit", limit)
        self.fill("temperature", 0)
        self.find("#text").send_keys(text, Keys.ENTER)

    def answered(self) -> None:
        self.wait(lambda: self.run("return running === null && turns.at(-1)?.role === 'assistant'"))

    def pixels(self, name: str) -> int:
        """How many pixels of the picture have that colour of the palette."""
        return self.run(
            """
            const canvas = at("picture"), pen = new OffscreenCanvas(1, 1).getContext("2d");
            pen.fillStyle = getComputedStyle(canvas).getPropertyValue("--" + arguments[0]);
            pen.fillRect(0, 0, 1, 1);
            const word = image => new Uint32Array(image.data.buffer);
            const wanted = word(pen.getImageData(0, 0, 1, 1))[0];
            const {width, height} = canvas;
            return word(canvas.getContext("2d").getImageData(0, 0, width, height)).filter(one => one === wanted).length;
            """,
            name,
        )

    def requests(self) -> list[str]:
        """The addresses of all that was asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("there is no chromium with its chromedriver here (Debian's packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1280,800"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, Service(driver_path)) as made:
        yield made


@pytest.fixture
def page(driver: webdriver.Chrome, url: str) -> Iterator[Page]:
    """Opened anew, on a desktop, in the light."""
    yield Page(driver, url)
    driver.execute_script("sessionStorage.clear()")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get("about:blank")


@contextmanager
def another_request(url: str) -> Iterator[None]:
    """One that is in the loop until it is left."""
    asked = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with post(f"{url}v1/completions", asked) as response:
        response.readline()
        yield


def post(address: str, asked: dict[str, Any]) -> HTTPResponse:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}".encode().decode("latin-1")}
    return urllib.request.urlopen(urllib.request.Request(address, json.dumps(asked).encode(), headers))


def test_an_answer_streams(page: Page) -> None:
    page.ask("What is the capital of France?", 40)
    page.answered()
    answer, grown = page.text(".assistant"), page.run("return grown")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with post(f"{page.url}v1/chat/completions", {"messages": messages, "max_tokens": 40, "temperature": 0}) as response:
        assert answer == json.load(response)["choices"][0]["message"]["content"] != ""
    lengths = [length for length, before in zip(grown, [0, *grown], strict=False) if length > before]
    assert len(lengths) > 3, "it came in one piece"
    assert grown == sorted(grown)
    assert "a second · first after" in page.text(".foot")
    assert page.run("return turns.map(turn => turn.content)") == ["What is the capital of France?", answer]
    # Of the network there was only our server, nor did the browser complain.
    hosts = {
        urlsplit(address).netloc.rpartition("@")[2] for address in page.requests() if not address.startswith("data:")
    }
    assert hosts == {urlsplit(page.url).netloc}
    assert page.driver.get_log("browser") == []


def test_the_picture_moves(page: Page) -> None:
    decode, prefill = page.pixels("decode"), page.pixels("prefill")  # of the numbers beside it
    with another_request(page.url):
        page.wait(lambda: page.text("#running") == "1")
        page.ask("Name a colour.", 12)
        page.answered()
        page.wait(lambda: page.text("#running") == "1")
        page.wait(lambda: page.run("return told.at(-1)").count("#") == 1)
    page.wait(lambda: page.text("#running") == "0")
    told = page.run("return told")
    steps = [int(line.split(":")[0].removeprefix("Step ")) for line in told]
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    rows = [line.count("#") for line in told]
    assert rows[0] == 1, "another request, alone"
    assert 2 in rows, "ours has joined it"
    assert rows[-1] == 1, "and left"
    stays = page.run(
        "return strips.map(({number, lane, last, spans}) => [lane, spans[0].from, last, spans[0].prefill])"
    )
    (lane, joined, left, prefill), (ours, came, went, computed) = stays
    assert (lane, prefill, ours, computed) == (0, True, 1, True)
    assert joined < came < went < left
    assert went - came in range(2, 13)
    assert page.pixels("decode") > decode + 200
    assert page.pixels("prefill") > prefill + 10
    assert page.text("#blocks").startswith("0 of ")
    # It can be made to stand still.
    page.find("#pause").click()
    shown = page.text("#step")
    page.ask("Name a colour.", 12)
    page.answered()
    page.wait(lambda: page.run("return newest") > steps[-1])
    assert page.text("#step") == shown
    page.find("#pause").click()
    page.wait(lambda: page.text("#step") != shown)


@pytest.mark.parametrize("how", ["button", "Esc"])
def test_stop(page: Page, how: str) -> None:
    page.ask(ESSAY, 900)
    page.wait(lambda: page.run("return turns.at(-1).content.length > 20"))
    assert page.text("#send") == "Stop"
    if how == "Esc":
        page.find("body").send_keys(Keys.ESCAPE)
    else:
        page.find("#send").click()
    page.answered()
    assert page.text(".foot").startswith("stopped")
    assert not page.find("#error").is_displayed()
    answer = page.text(".assistant")
    page.wait(lambda: page.text("#running") == "0")
    assert page.text(".assistant") == answer
    # What was said so far is part of the conversation.
    page.ask("Go on.", 5)
    page.wait(lambda: page.run("return running === null && turns.length === 4"))
    assert page.run("return turns[1].content") == answer
    assert page.text(".foot:last-of-type").startswith("cut at max tokens · 5 tokens")
    assert page.run("return document.querySelectorAll('.foot button').length") == 2


def test_a_wrong_key(page: Page) -> None:
    page.fill("key", "wrong")
    page.wait(lambda: page.find("#error").is_displayed() and page.text("#link") == "it wants the API key")
    page.ask("Hello", 5)
    page.wait(lambda: page.text(".foot").startswith("not answered"))
    assert page.text("#error").startswith("The server refused: the API key is missing or wrong")
    assert page.run("return turns.length") == 1
    page.fill("key", KEY)
    page.wait(lambda: page.text("#link") == "live" and not page.find("#error").is_displayed())
    page.find(".foot button").click()
    page.answered()
    assert page.text(".assistant")
    page.driver.refresh()
    page.wait(lambda: page.text("#link") == "live")
    assert page.run("return [at('key').value, sessionStorage.length, localStorage.length]") == [KEY, 1, 0]


def test_what_the_server_refuses_is_said(page: Page) -> None:
    page.ask("Hello", 100_000)
    page.wait(lambda: page.find("#error").is_displayed())
    assert "the context holds 1024" in page.text("#error")
    page.find(".foot button:last-child").click()  # Edit
    assert page.run("return [turns.length, at('text').value]") == [0, "Hello"]


def test_text_is_text(page: Page) -> None:
    text = "<img src=x onerror=alert(1)><b>5 < 6</b>"
    page.find("#text").send_keys(text, Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "second line")
    page.ask("", 5)
    page.answered()
    assert page.text(".user") == f"{text}\nsecond line"
    assert page.run("addTurn('assistant', '').node.append(arguments[0]); return turns.at(-1).node.innerHTML", text) == (
        "&lt;img src=x onerror=alert(1)&gt;&lt;b&gt;5 &lt; 6&lt;/b&gt;"
    )
    page.find("#new").click()
    assert page.run("return [turns.length, document.querySelectorAll('.turn').length]") == [0, 0]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_cut_anywhere(page: Page, size: int, end: str) -> None:
    lines = [
        ": a comment",
        'data: {"a": "é€😀"}',
        "",
        "event: x",
        "data:1",
        "data: 2",
        "",
        "",
        "data: [DONE]",
        "",
        "data: lost",
    ]
    got = page.driver.execute_async_script(
        """
        const [bytes, size, done] = [new TextEncoder().encode(arguments[0]), arguments[1], arguments[2]];
        const stream = new ReadableStream({start(to) {
            for (let i = 0; i < bytes.length; i += size) to.enqueue(bytes.slice(i, i + size));
            to.close();
        }});
        (async () => { const got = []; for await (const data of events(new Response(stream))) got.push(data); done(got); })();
        """,
        end.join(lines),
        size,
    )
    assert got == ['{"a": "é€😀"}', "1\n2", "[DONE]"]


def test_a_page_out_of_sight_holds_no_connection(page: Page) -> None:
    """Of which a browser has six for all its pages of one server."""
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true}); document.onvisibilitychange()"
    page.run(hide, True)
    page.wait(lambda: page.text("#link") == "reconnecting")
    page.run(hide, False)
    page.wait(lambda: page.text("#link") == "live")


def test_a_phone(page: Page) -> None:
    boxes = "return ['#loop', 'main'].map(name => document.querySelector(name).getBoundingClientRect().toJSON())"
    loop, chat = page.run(boxes)
    assert chat["right"] <= loop["left"]
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    loop, chat = page.run(boxes)
    assert loop["bottom"] <= chat["top"]
    assert chat["bottom"] <= PHONE["height"]
    page.run("at('settings').open = true")
    page.ask(ESSAY, 30)
    page.answered()
    assert page.run("return document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_palette_of_the_dark(page: Page) -> None:
    ink = "const {color, backgroundColor} = getComputedStyle(document.body); return [color, backgroundColor]"
    light = page.run(ink)
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert all(a != b for a, b in zip(light, page.run(ink), strict=True))


def test_what_has_no_name_for_a_screen_reader(page: Page) -> None:
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "textbox", "spinbutton", "combobox", "image", "meter", "log", "region"}
    nodes = [n for n in tree if not n["ignored"] and n["role"]["value"] in roles]
    assert {"button", "textbox", "combobox", "image", "meter", "log", "region"} <= {n["role"]["value"] for n in nodes}
    assert [n for n in nodes if not n.get("name", {}).get("value")] == []
