"""Names of a server and of its clients; the process that accepts connections imports this, and little else."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit


def names_of(hosts: Iterable[str]) -> set[str]:
    """Return names of a server as ``known`` compares them."""
    return {host.lower().rstrip(".") for host in hosts}


def known(host: str, hosts: Collection[str]) -> bool:
    """Whether a Host is an address, or a name of this server.

    Args:
        host: of a request.
        hosts: names that clients may call this server by, of ``names_of``; ``*`` = any.  Addresses and localhost are.
    """
    try:
        found = urlsplit(f"//{host}")
        name, _ = (found.hostname or "").rstrip("."), found.port
    except ValueError:
        return False
    if found.username is not None or found.path or found.query or found.fragment:
        return False
    return "*" in hosts or name in hosts or is_address(name) or is_local(name)


def is_address(name: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def client_of(address: str) -> str:
    """Whose an address is, for sharing: of IPv6 the first half, as each subscriber has all addresses of one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if not is_address(host):
        return host == "localhost" or host.endswith(".localhost")
    return ipaddress.ip_address(host).is_loopback
