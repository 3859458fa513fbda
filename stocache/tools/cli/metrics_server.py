"""Serve the metrics over HTTP, by default on this machine only."""

import contextlib
import errno
import ipaddress
import re
import signal
import socket
import time

from prometheus_client import start_http_server

from stocache.tools.cli.metrics import registry_of
from stocache.tools.cli.output import echo, fail

_LISTEN = re.compile(r"(?:(?P<host>[^:\[\]]*):|\[(?P<ipv6>[^\[\]]+)\]:)?(?P<port>[0-9]{1,5})", re.ASCII)


def resolve(listen: str, allow_remote: bool) -> tuple[str, int]:
    """Return the address and the port that ``--listen`` names.

    End the command if it is not "HOST:PORT", ":PORT" or "PORT", the host is not known, or is not this machine alone.
    """
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > 65535:
        fail(f"--listen {listen!r}: write HOST:PORT or PORT, with a port up to 65535; IPv6 as [::1]:9108.", 2)
    host, port = found["host"] or found["ipv6"] or "127.0.0.1", int(found["port"])
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fail(f"--listen {listen!r}: there is no host {host!r}: {getattr(error, 'strerror', error)}.", 2)
    addresses = [str(info[4][0]) for info in sorted(infos)]  # addresses of IPv4 first: IPv6 may be off
    remote = [each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    if remote and not allow_remote:
        fail(
            f"--listen {listen!r}: others can reach {remote[0]}, and the metrics have no password. If that is wanted: "
            "--allow-remote",
            2,
        )
    return addresses[0], port


def serve(listen: str, allow_remote: bool) -> None:
    """Serve the metrics of this user, until Ctrl-C or SIGTERM."""
    address, port = resolve(listen, allow_remote)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            server, _ = start_http_server(port, address, registry_of())
        except OSError as error:
            hint = " Choose another port, or end what uses this one." if error.errno == errno.EADDRINUSE else ""
            fail(f"--listen {listen}: {error.strerror or error}.{hint}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        echo(f"serving http://{f'[{address}]' if ':' in address else address}:{server.server_port}/metrics until Ctrl-C")
        while True:
            time.sleep(60)
