"""Workers as jobs of a cluster, through submitit (extra `slurm`). The study's folder must be visible to all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parbank.errors import ConfigError
from parbank.study.worker import work

MINUTES = 240  # submitit's own limit, 5 minutes, is shorter than most studies


def import_submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError("--submit needs submitit; install it by pip install 'parbank[slurm]'") from None
    return submitit


def submit_workers(
    folder: Path,
    workers: int,
    *,
    cluster: str = "slurm",
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
) -> list[Any]:
    """Submits that many workers and returns submitit's jobs, without waiting.

    options: parameters of submitit's executor, such as slurm_partition, gpus_per_node or timeout_min. A worker that its
    time limit ends gives its run back.
    """
    submitit = import_submitit()
    try:
        executor = submitit.AutoExecutor(folder=folder / "submitted", cluster=cluster)
        executor.update_parameters(**{"name": "parbank-study", "timeout_min": MINUTES, **(options or {})})
    except (RuntimeError, ValueError, NameError, TypeError) as error:
        raise ConfigError(f"submitit refuses --submit {cluster} with these options: {error}") from error
    return [executor.submit(work, folder.resolve(), device=device) for _ in range(workers)]
