"""Files that a browser loads: they lie in page/."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def page_route(name: str, path: str | None = None) -> Route:
    """The address of a file: /NAME, unless a path is given."""
    data = files("parbank.serve").joinpath("page", name).read_bytes()
    kind = _KINDS[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(data, media_type=kind)

    return Route(f"/{name}" if path is None else path, answer)
