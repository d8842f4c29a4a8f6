"""Like is compared with like; anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from parbank.errors import ConfigError
from parbank.eval.methods import make_method
from parbank.eval.result import compare, read_result, refuse_unlike

METHOD = make_method("ttt", context=32, blocks=(1, 2))
RESULT: dict[str, Any] = {
    "val_bpb": 1.25, "bytes": 100, "text_sha256": "ab", "documents": 2, "documents_sha256": "d",
    "tokenizer_sha256": "t", "seconds": 3, **METHOD.describe()
}  # fmt: skip


def test_like_results_differ_by_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RESULT | {"val_bpb": 1.5}))
    found = compare(RESULT, read_result(path), "a.json")
    common = {"compared_with": "a.json", "their_bpb": 1.5, "difference_bpb": -0.25, "same_tokenizer": True}
    assert found == common | {"their_text": "not proved"}  # a result from before texts were proved
    assert compare(RESULT, RESULT | {"text": "proved"}, "a.json")["their_text"] == "proved"
    other = RESULT | {"tokenizer_sha256": "u", "seconds": 9}
    assert compare(RESULT, other, "b")["same_tokenizer"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_sha256": "cd"}, "the text is ab here and cd in b"),
        ({"bytes": 99}, "size in bytes is 100 here and 99"),
        ({"documents": 3}, "the number of documents is 2 here and 3"),
        ({"documents_sha256": "e"}, r"where documents begin \(its hash\) is d here and e"),
        ({"method": "sliding"}, "the method is ttt here and sliding"),
        ({"context": 16}, "the context is 32 here and 16"),
        ({"stride": 64}, "the stride is None here and 64"),
        ({"adapt": None}, "how the model adapts is"),
        ({"adapt": RESULT["adapt"] | {"lr": 0.5}}, r"adapts \(lr\) is 0.002 here and 0.5"),
        ({"adapt": RESULT["adapt"] | {"blocks": [3]}}, r"adapts \(blocks\) is \[1, 2\] here and \[3\]"),
    ],
)
def test_unlike_results_are_refused_by_what_differs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(RESULT, RESULT | change, "b")


def test_settings_without_effect_do_not_make_scores_unlike() -> None:
    def result(**settings: Any) -> dict[str, Any]:
        return RESULT | make_method("ttt", context=32, **settings).describe()

    for a, b in (
        ({"micro_tokens": 4}, {"segment": 8}),
        ({"blocks": (1, 1)}, {"blocks": (1,)}),
        ({"blocks": (3, 1)}, {"blocks": (1, 3)}),
    ):
        assert compare(result(**a), result(**b), "b")["difference_bpb"] == 0
    # all settings were recorded once, of all adapters
    for settings, others in (({}, {"rank": 4}), ({"adapter": "low-rank"}, {"momentum": 0.5})):
        old = result(**settings) | {"adapt": result(**settings)["adapt"] | others | {"micro_tokens": 1}}
        assert compare(result(**settings), old, "old")["difference_bpb"] == 0
    for change in ({"adapter": "newer"}, {"unheard": 1}):
        newer = result() | {"adapt": result()["adapt"] | change}
        with pytest.raises(ConfigError, match=rf"how the model adapts \({next(iter(change))}\)"):
            compare(result(), newer, "newer")
    for a, b, name in (
        ({"adapter": "low-rank", "rank": 4}, {"adapter": "low-rank"}, "rank"),
        ({"momentum": 0.5}, {}, "momentum"),
        ({"blocks": (1,)}, {"blocks": (2,)}, "blocks"),
        ({"adapter": "low-rank"}, {}, "adapter"),
    ):
        with pytest.raises(ConfigError, match=rf"how the model adapts \({name}\)"):
            compare(result(**a), result(**b), "b")


@pytest.mark.parametrize("adapter", ["sgd", "low-rank"])
def test_a_score_that_adapts_says_what_becomes_of_documents(adapter: str) -> None:
    """Older results did not, and compare: the adapter's name says as much."""
    ours = RESULT | make_method("ttt", context=32, adapter=adapter).describe()
    assert ours["adapt"]["documents"] == {"sgd": "in the order of the text"}.get(
        adapter, "learnt one by one, each anew"
    )
    older = {name: value for name, value in ours["adapt"].items() if name != "documents"}
    for mine, theirs in ((ours, ours | {"adapt": older}), (ours | {"adapt": older}, ours)):
        assert compare(mine, theirs, "older")["difference_bpb"] == 0


def test_what_is_not_known_yet_is_not_compared() -> None:
    refuse_unlike({"method": "ttt"}, RESULT, "b")
    with pytest.raises(ConfigError, match="the method is chunked here and ttt in b"):
        refuse_unlike({"method": "chunked"}, RESULT, "b")


def test_a_result_from_before_documents_were_told_apart_still_compares(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({key: value for key, value in RESULT.items() if not key.startswith("documents")}))
    assert compare(RESULT, read_result(path), "old")["difference_bpb"] == 0
    assert compare(read_result(path), RESULT, "new")["difference_bpb"] == 0
    with pytest.raises(ConfigError, match="the text is ab here and cd"):
        compare(RESULT, read_result(path) | {"text_sha256": "cd"}, "old")


@pytest.mark.parametrize("content", ["", "[1]", '{"val_bpb": 1}', "\x00"])
def test_a_file_that_is_no_result(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_result(path)
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_result(tmp_path / "gone.json")


@pytest.mark.parametrize("bpb", ["1.2", None, True, float("nan"), [1.2]])
def test_a_score_that_is_no_number_is_refused(bpb: object, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RESULT | {"val_bpb": bpb}))
    with pytest.raises(ConfigError, match=r"x\.json has .* for a score"):
        read_result(path)
