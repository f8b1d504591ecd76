"""A plain web server of a folder on loopback: Python's own, which lists a folder as links and knows no ranges."""

from __future__ import annotations

import functools
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["WebServer", "web_server"]


@dataclass
class WebServer:
    """A running server.

    Attributes:
        url: where it listens.
        seen: method and path of every request.
        broken: paths that end so are answered with this status.
    """

    url: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)


class _Handler(SimpleHTTPRequestHandler):
    server_of: WebServer

    def send_head(self) -> object:  # type: ignore[override]  # what GET and HEAD begin with
        self.server_of.seen.append((self.command, self.path))
        for end, status in self.server_of.broken.items():
            if self.path.endswith(end):
                self.send_error(status)
                return None
        return super().send_head()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Tests read ``seen`` instead."""


@contextmanager
def web_server(root: Path, certificate: Path | None = None) -> Iterator[WebServer]:
    """Serves ``root`` in threads of this process; with a certificate (PEM, with its key) over TLS."""
    shared = WebServer()
    handler = type("Handler", (_Handler,), {"server_of": shared})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root)))
    shared.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield shared
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
