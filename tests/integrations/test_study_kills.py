"""A study that is killed thirty times at random ends with the table of an undisturbed one."""

import multiprocessing
import random
import time
from pathlib import Path

from parbank.study.engine import open_study, run_study
from parbank.study.report import make_report
from parbank.study.ship import make_study
from parbank.study.worker import work

KILLS = 30


def test_thirty_kills_change_nothing(text_spec: str, tmp_path: Path) -> None:
    study = make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="12steps",
        seeds=4,
        arms=["value-residual"],
        extra=["slow:optim.matrix_lr=0.0001,optim.embedding_lr=0.0001"],
        score_tokens=5000,
    )
    undisturbed = run_study(study, tmp_path / "undisturbed", device="cpu", quiet=True)
    seconds = max(run["wall_seconds"] for run in undisturbed.results.values())
    folder = tmp_path / "killed"
    open_study(folder, study)
    forks = multiprocessing.get_context("forkserver")  # imports once, and forks a worker in milliseconds
    forks.set_forkserver_preload(["parbank.study.worker"])
    generator, hits = random.Random(30), 0
    for _ in range(KILLS):
        workers = [forks.Process(target=work, args=(folder,), kwargs={"device": "cpu"}) for _ in range(2)]
        for worker in workers:
            worker.start()
        wait_for_claim(folder)
        time.sleep(generator.random() * seconds)
        for worker in workers:
            hits += worker.is_alive()
            worker.kill()
            worker.join()
        if make_report(folder).is_complete:
            for path in sorted((folder / "results").iterdir())[::2]:  # as if they had never ended: there is work again
                path.unlink()
    assert hits > KILLS, "most kills must meet a worker"
    killed = run_study(None, folder, device="cpu", quiet=True)
    assert killed.is_complete
    values = [{job: result["value"] for job, result in report.results.items()} for report in (undisturbed, killed)]
    assert values[0] == values[1]
    assert undisturbed.comparisons == killed.comparisons
    assert not list((folder / "failures").iterdir())


def wait_for_claim(folder: Path) -> None:
    end = time.monotonic() + 60
    while not any((folder / "claims").glob("*.json")) and time.monotonic() < end:
        time.sleep(0.01)
