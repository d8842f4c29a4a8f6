"""Pages in a browser: the playground of packed models, and the page of a run while it trains.

server.py listens and refuses strangers. worker.py runs the models, a step of every request in turn. playground.py and
watch.py are the two sets of addresses. page/ holds what a browser loads.
"""

from importlib.util import find_spec

from parbank.errors import ConfigError


def check_installed(command: str) -> None:
    """Refuses to begin where the extra `serve` is missing. Call it before you import the files of this folder."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{command} needs {' and '.join(missing)}, which {verb} not installed; pip install {' '.join(missing)}"
        )
