"""The server: who is answered, what is read, and the addresses of the playground over HTTP."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from parbank.errors import ConfigError
from parbank.eval.sampling import find_sight
from parbank.serve import check_installed
from parbank.serve.player import Player
from parbank.serve.playground import MOST_BODY, MOST_TEXT
from parbank.serve.server import Address, join_names, listen, read_name
from parbank.serve.worker import Item
from tests.serve.site import Site, open_site

SETTINGS = {"model": 0, "prompt": "The sea", "tokens": 5, "temperature": 0.8, "top_p": 0.9, "seed": 1}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:80", "localhost"),
        ("[::1]:8417", "::1"),
        ("[::1]", "::1"),
        ("A.b", "a.b"),
        ("::1", ""),
        ("localhost:x", ""),
        ("a@localhost:1]", ""),
    ],
)
def test_a_host_header_has_a_name(host: str, name: str) -> None:
    assert read_name(host) == name


def test_loopback_answers_to_its_own_names_alone() -> None:
    address = Address(port=8417)
    for host in ("127.0.0.1:8417", "localhost:8417", "LOCALHOST:8417", "[::1]:8417", "localhost:9000"):
        assert address.allows(host)
    for host in ("", "evil.example:8417", "192.168.1.2:8417", "localhost:8417x", "localhost.evil.example:8417"):
        assert not address.allows(host)


def test_beyond_loopback_addresses_and_given_names_are_answered() -> None:
    address = Address(host="0.0.0.0", port=8417, names=join_names([" Models.Example "]))
    for host in ("192.168.1.2:8417", "[fe80::1]:8417", "models.example:8417", "models.example"):
        assert address.allows(host)
    assert not address.allows("evil.example:8417"), "a name that an attacker may have pointed here"
    assert not address.is_loopback


def test_a_server_answers_to_its_host_in_small_letters() -> None:
    """Browsers write the name of a host so."""
    assert Address(host="Models.Example").allows("models.example:8417")
    assert Address(host="LOCALHOST").is_loopback


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    listening, address = listen(Address())
    with listening, pytest.raises(ConfigError, match=rf"port {address.port}: .*--port 0"):
        listen(address)
    with pytest.raises(ConfigError, match="choose an address of this machine by --host"):
        listen(Address(host="192.0.2.1"))  # of no machine: kept for examples
    with pytest.raises(ConfigError, match="65535"):
        Address(port=70000)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.serve.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs starlette and uvicorn.*pip install starlette uvicorn$"):
        check_installed("parbank serve")


def test_strangers_are_refused(site: Site) -> None:
    own = f"http://127.0.0.1:{site.address.port}"
    assert site.ask("GET", "/api/models", headers={"origin": own})[0] == 200
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"http://localhost:{site.address.port}"},
        {"sec-fetch-site": "cross-site"},
    ):
        status, found, _ = site.ask("GET", "/api/models", headers=headers)
        assert status == 403, headers
        assert "error" in found


def test_every_answer_keeps_the_page_closed(site: Site) -> None:
    for path in ("/", "/playground.js", "/playground.css", "/api/models", "/nothing"):
        _, _, headers = site.ask("GET", path)
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    page = site.ask("GET", "/")[1]
    assert "<script>" not in page, "the policy allows no script inside the page"
    assert "style=" not in page


def test_models_are_described(site: Site, player: Player) -> None:
    found = site.ask("GET", "/api/models")[1]
    assert [model["name"] for model in found["models"]] == ["v2"]
    assert found["models"][0]["vocabulary"] == player.model.tokenizer.vocab_size
    assert found["limits"]["text_bytes"] == MOST_TEXT


def test_a_continuation_streams_lines(site: Site, player: Player) -> None:
    status, lines, headers = site.ask("POST", "/api/continue", SETTINGS)
    assert status == 200
    assert headers.get_content_type() == "application/x-ndjson"
    assert lines[-1]["end"] in ("length", "document")
    assert len(lines[0]["likeliest"]) == 10
    text = player.model.sample("The sea", tokens=5, temperature=0.8, top_p=0.9, seed=1)
    assert "".join(line["text"] for line in lines) == text


def test_compressors_stand_beside(site: Site) -> None:
    _, found, _ = site.ask("POST", "/api/compressors", {"text": "The sea was calm. " * 50})
    assert 0 < found["xz -9"] < 2


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/continue", b"{", 400, "not JSON"),
        ("/api/continue", [], 400, "JSON object"),
        ("/api/continue", SETTINGS | {"model": 3}, 400, "no model 3"),
        ("/api/continue", SETTINGS | {"model": True}, 400, "whole number"),
        ("/api/continue", SETTINGS | {"prompt": 3}, 400, "must be a text"),
        ("/api/continue", SETTINGS | {"prompt": "\ud800"}, 400, "surrogate"),
        ("/api/continue", SETTINGS | {"temperature": "warm"}, 400, "a number"),
        ("/api/continue", SETTINGS | {"temperature": -1}, 400, "temperature"),
        ("/api/continue", SETTINGS | {"temperature": 10**400}, 400, "'temperature' is a number of 401 digits"),
        ("/api/continue", SETTINGS | {"top_p": 0}, 400, "top-p"),
        ("/api/continue", SETTINGS | {"tokens": 10**6}, 400, "at most 2,000 tokens"),
        ("/api/bits", {"model": 0, "text": "x" * (MOST_TEXT + 1)}, 413, "2,000,000"),
        ("/api/bits", b" " * (MOST_BODY + 1), 413, "6,000,000"),
    ],
)
def test_bad_requests_get_a_sentence(site: Site, path: str, body: object, status: int, message: str) -> None:
    found = site.ask("POST", path, body)
    assert found[0] == status
    assert message in found[1]["error"]


def test_a_form_of_another_site_cannot_post(site: Site) -> None:
    """A form sends text/plain without asking the server first."""
    status, found, _ = site.ask("POST", "/api/bits", b'{"model":0,"text":"a"}', {"content-type": "text/plain"})
    assert status == 400
    assert "content-type" in found["error"]


def test_an_empty_text_is_an_error_in_the_stream(site: Site) -> None:
    _, lines, _ = site.ask("POST", "/api/bits", {"model": 0, "text": ""})
    assert "no text" in lines[-1]["error"]


def test_a_long_prompt_keeps_no_other_client_waiting(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte, in parts so small that it is read for longer than this test takes, unless its client leaves."""
    monkeypatch.setattr("parbank.eval.sampling.PREFILL", 1)
    monkeypatch.setattr("parbank.eval.sampling.find_sight", lambda model, context: 10**9)
    with open_site([player], most=2) as site:
        long = site.connect()
        body = json.dumps(SETTINGS | {"prompt": "The sea was calm. " * 55_000})
        long.request("POST", "/api/continue", body, {"content-type": "application/json"})
        answer = long.getresponse()
        assert json.loads(answer.readline()) == {"reading": True}
        monkeypatch.setattr("parbank.eval.sampling.find_sight", find_sight)
        status, lines, _ = site.ask("POST", "/api/continue", SETTINGS)
        assert status == 200
        assert lines[-1]["end"]
        assert json.loads(answer.readline()) == {"reading": True}, "it is still being read"
        assert site.worker.active >= 1
        answer.close()
        long.close()
        wait_until_idle(site)


class Endless(Player):
    """Writes until its reader leaves."""

    def write(self, prompt: str, **settings: Any) -> Iterator[Item]:
        while True:
            time.sleep(0.001)
            yield {"text": "a"}


def test_a_closed_connection_ends_the_work_and_frees_its_place(player: Player) -> None:
    with open_site([Endless("endless", player.model)], most=2) as site:
        busy = [site.connect() for _ in range(2)]
        for connection in busy:
            connection.request("POST", "/api/continue", json.dumps(SETTINGS), {"content-type": "application/json"})
            assert connection.getresponse().readline()
        status, found, headers = site.ask("POST", "/api/continue", SETTINGS)
        assert status == 503
        assert "busy with 2 requests" in found["error"]
        assert headers["retry-after"]
        for connection in busy:
            connection.close()
        wait_until_idle(site)


def wait_until_idle(site: Site) -> None:
    deadline = time.monotonic() + 60
    while site.worker.active:
        assert time.monotonic() < deadline
        time.sleep(0.01)
