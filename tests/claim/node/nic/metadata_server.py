"""Metadata services of clouds on loopback, as strict as the real ones, with answers from files."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = Path(__file__).parent / "metadata"
TOKEN = "AQAEAsecret=="
_NEEDED = {
    "gke": ("Metadata-Flavor", "Google", 403),
    "azure": ("Metadata", "true", 400),
    "aws": ("X-aws-ec2-metadata-token", TOKEN, 401),
    "oke": ("Authorization", "Bearer Oracle", 401),
}


def recorded(cloud):
    """Bodies by path."""
    return json.loads((RECORDED / f"{cloud}.json").read_text())


class Service(ThreadingHTTPServer):
    """One service. Tests change `answers`, and see the requests in `asked`."""

    daemon_threads = True

    def __init__(self, cloud):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud, self.answers, self.asked = cloud, recorded(cloud), []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self.server.asked.append(f"PUT {self.path}")
        life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.server.cloud != "aws" or self.path != "/latest/api/token":
            self._answer(405)
        elif not life.isdecimal() or not 1 <= int(life) <= 21600:
            self._answer(400)
        else:
            self._answer(200, TOKEN.encode())

    def do_GET(self):
        self.server.asked.append(self.path)
        name, value, refusal = _NEEDED[self.server.cloud]
        flavor = {"Metadata_Flavor": "Google"} if self.server.cloud == "gke" else {}
        # Azure and Google refuse requests that came through a proxy.
        if self.headers.get(name) != value or "X-Forwarded-For" in self.headers:
            self._answer(refusal)
            return
        found = self.server.answers.get(self.path)
        if found is None and self.server.cloud == "azure":
            self._answer(400, b'{"error": "Bad request. api-version is invalid"}')
        elif found is None:
            self._answer(404, b"<html>not found</html>", **flavor)
        elif callable(found):
            found(self)
        else:
            self._answer(200, found.encode(), **flavor)


def slow(handler):
    """Begin an answer and never end it."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.server.ended.wait(60)


def endless(handler):
    """Send for as long as a client listens."""
    handler.send_response(200)
    handler.send_header("Metadata-Flavor", "Google")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    try:
        while not handler.server.ended.is_set():
            handler.wfile.write(b"x" * 65536)
    except OSError:
        pass


def moved(place):
    """An answer that redirects the client to another place."""
    return lambda handler: handler._answer(302, Location=place)


def failing(status):
    """An answer with this status."""
    return lambda handler: handler._answer(status)


@contextmanager
def serving(cloud) -> Iterator[Service]:
    """The service of one cloud, on a free port."""
    with Service(cloud) as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.ended.set()
            service.shutdown()
            thread.join()
