"""Serve the metrics over HTTP, by default on this machine only."""

import contextlib
import errno
import io
import ipaddress
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from stocache.system.waiting import printable

logger = logging.getLogger("stocache")

PATH = "/metrics"

_LISTEN = re.compile(r"(?:(?P<host>[^:\[\]]*):|\[(?P<ipv6>[^\[\]]+)\]:)?(?P<port>[0-9]{1,5})", re.ASCII)
_PATIENCE_S = 10.0  # for a client that neither sends nor reads
_MOST = 32  # connections at a time

_Address: TypeAlias = tuple[socket.AddressFamily, Any]


class ListenError(ValueError):
    """The command line asks for an address that cannot be used."""


def resolve(listen: str, allow_remote: bool) -> list[_Address]:
    """Return the addresses that ``--listen`` names, best first.

    Raises:
        ListenError: it is not "HOST:PORT", ":PORT" or "PORT", the host is not known, or is not this machine alone.
    """
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535:
        raise ListenError(f"--listen {listen!r}: write HOST:PORT or PORT, with a port up to 65535; IPv6 as [::1]:9108.")
    host = found["host"] or found["ipv6"] or "127.0.0.1"
    try:
        infos = socket.getaddrinfo(host, int(found["port"]), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ListenError(f"--listen {listen!r}: there is no host {host!r}: {getattr(error, 'strerror', error)}.") from None
    remote = [str(info[4][0]) for info in infos if not ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback]
    if remote and not allow_remote:
        raise ListenError(
            f"--listen {listen!r}: others can reach {remote[0]}, and the metrics have no password. If that is wanted: "
            "--allow-remote"
        )
    return [(info[0], info[4]) for info in infos]


class Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, at most `_MOST` at a time.

    A client that sends or reads nothing for `_PATIENCE_S` is cut off, so that the next one is served.

    Raises:
        OSError: the address is in use, or is not one of this machine.
    """

    daemon_threads = True
    allow_reuse_port = False  # two servers at one port would share the requests

    def __init__(self, family: socket.AddressFamily, address: Any, registry: CollectorRegistry) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(_MOST)
        super().__init__(address, _Handler)
        self.set_app(_app(registry))

    def server_bind(self) -> None:
        """Bind, and do not look up the host's name, which may take long and is not needed."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}{PATH}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, when there are not too many."""
        self._free.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:  # the machine gives no more threads
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def service_actions(self) -> None:
        """End where a signal has asked for it; see `until_ended`."""
        if _ended:
            raise KeyboardInterrupt

    def handle_error(self, request: object, client_address: Any) -> None:
        """Do not print a traceback of a client's error."""
        logger.debug("a scrape failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone, or is too slow
            super().handle()

    def get_stderr(self) -> Any:
        """Return where wsgiref prints tracebacks: only those of connections are left, see `_app`."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _app(registry: CollectorRegistry) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        status, text = "404 Not Found", f"The metrics are at {PATH}.\n"
        if environ.get("PATH_INFO") == PATH:
            try:
                return metrics(environ, start_response)  # type: ignore[no-any-return]
            except Exception as error:  # also of a header that prometheus-client does not understand
                logger.warning("a scrape failed: %s: %s", type(error).__name__, printable(str(error)))
                status, text = "500 Internal Server Error", "The metrics cannot be collected.\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode()]

    return app


def open_server(addresses: list[_Address], registry: CollectorRegistry) -> Server:
    """Return a server at the first address that this machine has; IPv6 may be off.

    Raises:
        OSError: the address is in use, or may not be used.
    """
    for number, (family, address) in enumerate(addresses):
        try:
            return Server(family, address, registry)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or number == len(addresses) - 1:
                raise
    raise OSError(errno.EADDRNOTAVAIL, "there is no address")


_ended = False


@contextlib.contextmanager
def until_ended() -> Iterator[None]:
    """Leave the block at Ctrl-C and at SIGTERM, without an error.

    An error that a signal's handler raises is lost if the signal comes within a finalizer. So a `Server` looks again.
    """
    global _ended

    def end(*_: Any) -> None:
        global _ended
        _ended = True
        raise KeyboardInterrupt

    numbers = signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else [])
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _ended = False
