"""Triton's hash begins beside the imports, and only where a GPU may use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from parbank import ahead


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Instead of a hash, a note. The driver's device is a file of this test."""
    found: list[str] = []
    (tmp_path / "driver").touch()
    monkeypatch.setattr(ahead, "_DRIVERS", (tmp_path / "driver",))
    monkeypatch.setattr(ahead, "_hash_triton", lambda: found.append("hashed"))
    monkeypatch.setattr(ahead, "_threads", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PARBANK_OPS", raising=False)
    yield found
    ahead.wait()


def test_the_hash_is_computed_once(hashed: list[str]) -> None:
    ahead.begin()
    ahead.begin("cuda")
    ahead.wait()
    assert hashed == ["hashed"]


def test_nothing_is_hashed_where_nothing_needs_it(hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.begin("cpu")
    monkeypatch.setenv("PARBANK_OPS", "reference")
    ahead.begin()
    monkeypatch.delenv("PARBANK_OPS")
    monkeypatch.setattr(ahead, "_DRIVERS", ())
    ahead.begin()
    ahead.wait()
    assert hashed == []


def test_the_hash_is_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps it: kernels then find it computed."""
    cache = pytest.importorskip("triton.runtime.cache")
    calls: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: calls.append("key"))
    ahead._hash_triton()
    assert calls == ["key"]


def test_a_broken_triton_is_reported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.delattr(cache, "triton_key")
    ahead._hash_triton()
