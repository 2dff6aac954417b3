"""What stands before every route: the key, the host's name, other sites' pages, the log."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from .conftest import Client, Start

ROUTES = [
    ("GET", "/"), ("GET", "/live"), ("GET", "/metrics"), ("GET", "/ready"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/completions"), ("GET", "/nope"), ("POST", "/v1/completions/"), ("POST", "//v1/completions"),
    ("HEAD", "/v1/models"), ("OPTIONS", "/v1/models"), ("DELETE", "/"), ("GET", "/health/"), ("GET", "/health/../v1/models"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked(folder: Any) -> Any:
    from .conftest import address, launch

    server = launch(folder, "--api-key", "sesame-1", "--cors-origin", "https://friend.example")
    server.url = address(server)
    yield Client(server)
    server.kill()


def test_every_route_that_there_is_is_in_the_table_of_this_test() -> None:
    from inferflow.server.app import make_app  # the guard holds the router

    class Nothing:
        class settings:  # noqa: N801 - a stand-in
            origins = ()

    paths = {route.path.replace("{name:path}", "tiny") for route in make_app(Nothing()).app.routes}  # type: ignore
    assert paths - {"/health"} <= {path for _, path in ROUTES}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_without_the_key(locked: Client, method: str, path: str) -> None:
    http, url = locked.server.http, locked.server.url + path
    wrong = ("", "Bearer", "Bearer sesame", "Bearer sesame-12", "Bearer SESAME-1", "sesame-1", "Token sesame-1", "Basic !!",
             "Basic " + base64.b64encode(b"me:sesame").decode(), "Bearer s\xe9same-1".encode("latin-1"))  # fmt: skip
    for value in wrong:
        headers = {"Authorization": value} if value else {}
        answer = http.request(method, url, headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 401, (value, answer.text)
        assert answer.headers["www-authenticate"].split()[0] == ("Basic" if path == "/" else "Bearer")
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_key_opens(locked: Client) -> None:
    http, url = locked.server.http, locked.server.url
    assert http.get(f"{url}/health").status_code == http.head(f"{url}/health").status_code == 200
    browser = "Basic " + base64.b64encode(b"anyone:sesame-1").decode()
    for value in ("Bearer sesame-1", "bearer sesame-1", browser):
        assert http.get(f"{url}/v1/models", headers={"Authorization": value}).status_code == 200
        assert "<title>" in http.get(url, headers={"Authorization": value}).text


def test_pages_of_other_sites(locked: Client, client: Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
        refused = client.post("/v1/completions", body, headers={"Origin": origin})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in refused.headers
    assert client.post("/v1/completions", body, headers={"Origin": client.server.url}).status_code == 200
    friend = {"Origin": "https://friend.example"}
    asks = {**friend, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    http, url = locked.server.http, f"{locked.server.url}/v1/completions"
    before = http.options(url, headers=asks)
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "https://friend.example")
    answer = http.post(url, json=body, headers={**friend, "Authorization": "Bearer sesame-1"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://friend.example")
    assert http.options(url, headers={**asks, "Origin": "https://evil.example"}).status_code == 400


def test_names_of_the_host(client: Client, start: Start) -> None:
    """A page whose name is made to lead to this machine does not get in by it."""
    for name, status in (("localhost", 200), ("LOCALHOST:80", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403),
                         ("127.0.0.1.evil.example:80", 403), ("localhost.evil.example", 403)):  # fmt: skip
        assert client.server.http.get(f"{client.server.url}/health", headers={"Host": name}).status_code == status, name
    named = start("--allowed-host", "box.example")
    assert named.http.get(f"{named.url}/health", headers={"Host": "box.example:8000"}).status_code == 200
    assert named.http.get(f"{named.url}/health", headers={"Host": "evil.example"}).status_code == 403


def test_bound_elsewhere_without_a_key(start: Start) -> None:
    server = start("--host", "0.0.0.0")
    assert any("set --api-key" in line for line in server.said)
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert server.http.get(f"{url}/health", headers={"Host": "any.example"}).status_code == 200
    assert not any("set --api-key" in line for line in start("--host", "0.0.0.0", "--api-key", "k").said)


def test_a_key_in_a_file_and_one_that_is_none(start: Start, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    server = start("--api-key-file", str(file))
    answer = server.http.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer from-a-file"})
    assert answer.status_code == 200
    assert start("--api-key", "", wait=False).process.wait(60) == 2


def test_the_log(client: Client, start: Start) -> None:
    """One line a request, with what it cost and how it ended; none with --quiet."""
    client.ask("/v1/completions", prompt="hello", max_tokens=3, ignore_eos=True)
    client.server.wait_for(r"POST /v1/completions 200 \d+\.\d+s prompt=\d+ cached=\d+ new=3 finish=length")
    client.post("/v1/completions", {"prompt": "x", "n": 0})
    client.server.wait_for("POST /v1/completions 400 .* error=n: it is 0")
    quiet = start("--quiet")
    Client(quiet).ask("/v1/completions", prompt="hello", max_tokens=3)
    assert quiet.end() == 0
    assert not any("POST" in line for line in quiet.said)
