"""Figures in README and docs are those of results, and the machine that writes them leaves out what was not measured."""

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SPEC: dict[str, Any] = {
    "claims": {
        "step": {
            "script": "step.py",
            "hardware": "h200",
            "ours": {"case": "step", "provider": "ours", "show": "{:.1f} ms"},
            "theirs": {"case": "step", "provider": "theirs", "show": "{:.1f} ms"},
            "faster": {"of": ["step.theirs", "step.ours"], "take": "ratio", "show": "{:.1f} times"},
            "all": {"case": "step", "provider": "*", "pool": True, "take": "count", "show": "{:.0f}"},
        },
        "later": {"script": "later.py", "hardware": "h200", "x": {"case": "c", "provider": "p", "show": "{}"}},
    },
    "blocks": {
        "table": {
            "columns": ["what", "ours"],
            "rows": [["a step", "{step.ours}, not {step.theirs}"], ["not yet", "{later.x} and {step.ours}"]],
        },
        "picture": {"text": "![it]({step/curve.png})\n"},
        "led": {"lead": "In ms:", "columns": ["what"], "rows": [["a step of {step.ours}"]]},
        "leading nowhere": {"lead": "In ms:", "columns": ["what"], "rows": [["{later.x}"]]},
        "nothing": {"text": "{later.x} is measured later\n"},
        "grid": {"grid": "step", "show": "{:.0f}", "cases": {"step": "a step"}, "providers": {"ours": "us", "no": "-"}},
    },
}


@pytest.fixture
def claims(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("claims")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    add_result(tmp_path, "2026-01-01-h200-aaaaaaaaa", ours=9.0, theirs=11.0)
    add_result(tmp_path, "2026-01-02-h200-bbbbbbbbb", ours=5.0, theirs=12.0)
    add_result(tmp_path, "2026-01-03-a100-bbbbbbbbb", ours=1.0)
    add_result(tmp_path, "2026-01-04-h200-bbbbbbbbb-dirty", ours=2.0)
    return tmp_path


def add_result(root: Path, folder: str, **values: float) -> None:
    path = root / "step" / folder
    path.mkdir(parents=True)
    rows = [{"case": "step", "provider": name, "value": value} for name, value in values.items()]
    about = {"claim": "step", "commit": folder[16:25] * 4, "dirty": folder.endswith("-dirty"), "measured": ["parbank"]}
    about |= {"date": folder[:10], "time": "10:00 UTC", "command": f"step.py {values}", "rows": rows}
    (path / "result.json").write_text(json.dumps(about))


def test_texts_are_what_results_say(claims: ModuleType) -> None:
    found = claims.read_claims()
    for page in claims.texts():
        text = page.read_text(encoding="utf-8")
        assert found.render(text, page) == text, f"{page.name} differs from its results: run make claims"


def test_every_claim_of_the_file_can_be_read(claims: ModuleType) -> None:
    """Blocks that no page shows yet, too: names, formats and files that do not exist fail here."""
    found = claims.read_claims()
    for block in found._spec["blocks"]:
        found.block(block, claims.ROOT / "README.md")
    for claim, spec in found._spec["claims"].items():
        assert (claims.HERE / spec["script"]).is_file(), claim
        for figure in (name for name, value in spec.items() if isinstance(value, dict)):
            assert found.show_or_not(f"{claim}.{figure}")


def test_a_figure_is_the_newest_clean_result_of_its_hardware(claims: ModuleType, results: Path) -> None:
    found = claims.Claims(SPEC, results)
    assert found.show("step.ours") == "5.0 ms"
    assert found.show("step.faster") == "2.4 times"


def test_seeds_run_apart_are_pooled_within_a_commit(claims: ModuleType, results: Path) -> None:
    add_result(results, "2026-01-02-h200-bbbbbbbbb-2", ours=7.0)
    assert claims.Claims(SPEC, results).show("step.all") == "3"


def test_figures_in_prose_are_written_with_their_links(claims: ModuleType, results: Path) -> None:
    page = results / "docs" / "page.md"
    text = claims.Claims(SPEC, results).render("Takes [0 ms][step.ours] or\n[?][later.x].\n", page)
    assert text.startswith("Takes [5.0 ms][step.ours] or\n[not measured yet][later.x].\n")
    assert "[step.ours]: ../step/2026-01-02-h200-bbbbbbbbb/result.md\n" in text
    assert "/benchmarks/later.py\n" in text
    assert claims.Claims(SPEC, results).render(text, page) == text, "a second time changes nothing"


def test_tables_leave_out_lines_without_results(claims: ModuleType, results: Path) -> None:
    text = "<!-- claims:table -->\nold\n<!-- /claims -->\n<!-- claims:nothing -->\nold\n<!-- /claims -->\n"
    text = claims.Claims(SPEC, results).render(text, results / "page.md")
    link = "[step](step/2026-01-02-h200-bbbbbbbbb/result.md)"
    assert text == (
        "<!-- claims:table -->\n\n| what | ours | result |\n| --- | --- | --- |\n"
        f"| a step | 5.0 ms, not 12.0 ms | {link} |\n\n<!-- /claims -->\n<!-- claims:nothing -->\n<!-- /claims -->\n"
    )


def test_a_lead_stands_above_a_table_and_never_alone(claims: ModuleType, results: Path) -> None:
    found, page = claims.Claims(SPEC, results), results / "page.md"
    assert found.block("led", page).startswith("In ms:\n\n| what | result |\n")
    assert found.block("leading nowhere", page) == ""


def test_grids_and_pictures_follow_the_newest_result(claims: ModuleType, results: Path) -> None:
    found, page = claims.Claims(SPEC, results), results / "page.md"
    assert found.block("picture", page) == "![it](step/2026-01-02-h200-bbbbbbbbb/curve.png)\n"
    assert found.block("grid", page).splitlines()[0].endswith("| us | - |")
    assert found.block("grid", page).splitlines()[2] == "| a step | 5 |  |"


def test_results_of_lost_commits_are_listed(claims: ModuleType, results: Path) -> None:
    spec = SPEC | {"published": {"bbbbbbbbb": "abc"}, "blocks": {"lost": {"lost": ["result", "made by", "here"]}}}
    text = claims.Claims(spec, results).block("lost", results / "page.md")
    assert "| [step](step/2026-01-02-h200-bbbbbbbbb/result.md) | `bbbbbbbbb` | `abc` |" in text
    assert "aaaaaaaaa" not in text


@pytest.mark.parametrize("text", ["[1][step.nothing]", "[1][nothing.x]", "<!-- claims:none -->\n<!-- /claims -->"])
def test_names_that_do_not_exist_are_errors(claims: ModuleType, results: Path, text: str) -> None:
    with pytest.raises(claims.ClaimError, match=r"claims\.toml has no"):
        claims.Claims(SPEC, results).render(text, results / "page.md")


def test_rows_that_are_missing_are_named(claims: ModuleType, results: Path) -> None:
    add_result(results, "2026-01-05-h200-ccccccccc", ours=5.0)
    notes = claims.Claims(SPEC, results).notes()
    assert "step.theirs: no result has its row" in notes
    assert "step.ours: no result has its row" not in notes
    assert "later: no result on h200; python benchmarks/later.py makes one" in notes
    assert "step/2026-01-04-h200-bbbbbbbbb-dirty: made with uncommitted code, not used" in notes


def test_stale_results_without_a_figure_are_listed_too(
    claims: ModuleType, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "stale", lambda about, published: ["stale"])
    (results / "study_x").mkdir()
    (results / "step" / "2026-01-01-h200-aaaaaaaaa").rename(results / "study_x" / "2026-01-01-h200-aaaaaaaaa")
    about = results / "study_x" / "2026-01-01-h200-aaaaaaaaa" / "result.json"
    about.write_text(about.read_text().replace('"claim": "step"', '"claim": "study_x"'))
    assert "study_x/2026-01-01-h200-aaaaaaaaa: stale" in claims.Claims(SPEC, results).notes()


@pytest.fixture
def first_commit(claims: ModuleType) -> str:
    found = claims.ask_git("rev-list", "--max-parents=0", "HEAD")
    if not found:
        pytest.skip("no git repository: nothing can be known of commits")
    return str(found[0])


def test_results_say_when_what_they_measured_has_changed(claims: ModuleType, first_commit: str) -> None:
    assert "changed since" in claims.stale({"commit": first_commit, "dirty": False, "measured": ["parbank"]})[0]
    assert claims.stale({"commit": "HEAD", "dirty": False, "measured": ["no/such/folder"]}) == []


def test_a_lost_commit_is_named_and_its_files_are_compared(claims: ModuleType, first_commit: str) -> None:
    now = claims.provenance.digests(["parbank/errors.py", "parbank/optim"])
    lost = {"commit": "0" * 40, "dirty": False, "measured": [*now], "digests": now}
    assert claims.stale(lost) == ["commit 000000000 is not in this repository"]
    assert claims.stale(lost | {"digests": now | {"parbank/optim": "0"}}, {"000000000": "abc"}) == [
        "commit 000000000 is not in this repository; abc is the first commit with its code",
        "stale: parbank/optim changed since",
    ]


def test_an_old_result_of_a_lost_commit_is_compared_with_the_commit_named_for_it(
    claims: ModuleType, first_commit: str
) -> None:
    """Early results have no digests."""
    lost = {"commit": "0" * 40, "dirty": False, "measured": ["parbank"]}
    place, change = claims.stale(lost, {"000000000": first_commit})
    assert place.endswith("is the first commit with its code")
    assert change.endswith(f"changed since {first_commit[:9]}")


def test_a_result_from_beside_an_outdated_repository_counts_once_its_code_is_known(
    claims: ModuleType, results: Path, first_commit: str
) -> None:
    assert claims.Claims(SPEC, results).newest("step").folder.name == "2026-01-02-h200-bbbbbbbbb"
    known = claims.Claims(SPEC | {"published": {"bbbbbbbbb-dirty": first_commit}}, results)
    assert known.newest("step").folder.name == "2026-01-04-h200-bbbbbbbbb-dirty"
    notes = "\n".join(known.notes())
    assert "not used" not in notes
    assert "2026-01-04-h200-bbbbbbbbb-dirty: stale" in notes
    assert f"changed since {first_commit[:9]}" in notes


def test_without_git_files_are_still_compared(claims: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    now = claims.provenance.digests(["parbank/errors.py"])
    about = {"commit": "0" * 40, "dirty": False, "measured": [*now], "digests": now}
    assert claims.stale(about) == []
    assert claims.stale(about | {"digests": {"parbank/errors.py": "0"}}) == ["stale: parbank/errors.py changed since"]


def test_every_result_names_a_published_commit(claims: ModuleType, first_commit: str) -> None:
    """A result is a claim about a commit: anybody must be able to find the code."""
    published = claims.read_claims().published
    known = set(claims.ask_git("rev-list", "HEAD") or [])
    for path in claims.RESULTS.glob("*/*/result.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        found = claims.code_name(about) in published or (about["commit"] in known and not about["dirty"])
        assert found, f"{path.parent.name}: nobody can find this code"
    for commit in published.values():
        assert any(name.startswith(commit) for name in known), (
            f"[published] names {commit}, which is not in this history"
        )


def test_the_commit_named_for_a_lost_one_has_the_code_that_was_measured(
    claims: ModuleType, first_commit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As far as a result says what its files were: the first ones do not."""
    nowhere = {("94824b280", "parbank/eval")}  # no commit here has exactly these files
    published = claims.read_claims().published
    for path in claims.RESULTS.glob("*/*/result.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        commit = published.get(claims.code_name(about))
        assert "digests" in about or not about["dirty"], f"{path.parent}: nothing shows which code was measured"
        if not commit or "digests" not in about:
            continue
        tree = tmp_path / commit
        if not tree.exists():
            command = ["git", "archive", "--format=tar", f"--output={tree}.tar", commit, "parbank", "benchmarks/*.py"]
            subprocess.run(command, cwd=claims.ROOT, check=True)
            with tarfile.open(f"{tree}.tar") as packed:
                packed.extractall(tree, filter="data")
        monkeypatch.setattr(claims.provenance, "ROOT", tree)
        there = claims.provenance.digests(about["digests"])
        differ = {name for name, digest in there.items() if digest != about["digests"][name]}
        assert {(about["commit"][:9], name) for name in differ} <= nowhere, f"{path.parent}: not the code of {commit}"


def test_every_result_is_whole(claims: ModuleType, benchmark: Callable[[str], ModuleType]) -> None:
    """Its folder says what it says, it has what a result must have, and its page speaks of the same run."""
    harness = benchmark("harness")
    needed = {"claim", "commit", "dirty", "date", "time", "command", "settings", "seeds", "versions", "machine", "load"}
    for path in claims.RESULTS.glob("*/*/result.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        assert not needed - set(about), path
        assert path.parents[1].name == about["claim"]
        assert path.parent.name.startswith(about["date"])
        assert about["commit"][:9] in path.parent.name
        page = path.with_suffix(".md").read_text(encoding="utf-8")
        made = harness._markdown(about, [harness.Row(**row) for row in about["rows"]])
        assert page.startswith(made.partition("| case")[0]), f"{path.parent}: its page speaks of another run"


def test_an_archive_never_replaces_another_result(claims: ModuleType, results: Path, tmp_path: Path) -> None:
    archive = tmp_path / "results.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(results / "step", arcname="./step")
    place = tmp_path / "place"
    add_result(place, "2026-01-01-h200-aaaaaaaaa", ours=1.0)
    add_result(place, "2026-01-02-h200-bbbbbbbbb", ours=5.0, theirs=12.0)
    early = place / "step" / "2026-01-02-h200-bbbbbbbbb" / "result.json"
    early.write_text(json.dumps(json.loads(early.read_text()) | {"rows": []}))
    names = {path.name for path in claims.unpack(archive, place)}
    assert "2026-01-01-h200-aaaaaaaaa-2" in names
    assert "2026-01-02-h200-bbbbbbbbb-2" not in names
    assert json.loads(early.read_text())["rows"], "what the same run wrote later replaces what it wrote before"
    assert {path.name for path in claims.unpack(archive, place)} == names, "the same archive again adds nothing"
