"""Which address of this machine the other ranks reach, and what is wrong with one. IPv4 and IPv6.

`GLOO_SOCKET_IFNAME` names the interface, or several ("eth0,eth1": the first one that has an address), as it does for
gloo. Without it, ranks that are all on one machine stay inside that machine, and others listen where packets to
MASTER_ADDR leave from.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1", "2001:db8::1"  # addresses that no machine has: packets to them take the default route
INTERFACES = "GLOO_SOCKET_IFNAME"


def own_address(environment: Mapping[str, str]) -> str:
    """This machine's address for the other ranks; an IPv6 link-local one with its interface, "fe80::1%eth0".

    ValueError when there is none, with the variable that it should follow from.
    """
    if names := environment.get(INTERFACES):
        return _address_of_interface(names)
    ranks, ranks_here = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    if ranks is not None and ranks == ranks_here:
        return LOOPBACK
    master = environment.get("MASTER_ADDR", LOOPBACK)
    try:
        address = _source_towards(master)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR is {master!r}: no address of this machine follows from it ({error.strerror or error})"
        ) from None
    if ipaddress.ip_address(address).is_loopback and not _is_local_on_purpose(master):
        # Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, which is of no use to the others.
        return _default_route_address() or address
    return address


def _address_of_interface(names: str) -> str:
    """The address of the first interface in a list that has one: IPv4 before IPv6, link-local addresses last."""
    interfaces = psutil.net_if_addrs()
    for name in names.split(","):
        addresses = [
            entry.address
            for entry in interfaces.get(name.strip(), ())
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if addresses:
            return min(addresses, key=lambda address: (":" in address, "%" in address))
    known = ", ".join(sorted(interfaces))
    raise ValueError(f"{INTERFACES} is {names!r}: no interface of this machine with that name has an address ({known})")


def _source_towards(host: str) -> str:
    """The address that packets to a host leave from. OSError where it has no address, or no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return local_address(probe)


def local_address(connection: socket.socket) -> str:
    """The address of this machine that a connection has; an IPv6 link-local one with its interface."""
    host, _, *more = connection.getsockname()
    scope = more[1] if more else 0
    return f"{without_interface(host)}%{socket.if_indextoname(scope)}" if scope else host


def _is_local_on_purpose(master: str) -> bool:
    """Whether MASTER_ADDR says this machine and no other: "localhost", or a loopback address as a number."""
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _default_route_address() -> str | None:
    for host in ELSEWHERE:
        try:
            return _source_towards(host)
        except OSError:
            continue
    return None


def without_interface(host: str) -> str:
    """An address as other machines know it: their interfaces have other names."""
    return host.partition("%")[0]


def seen_from(own: str, host: str) -> str:
    """Another machine's address `host` as this one must write it: link-local ones through the interface of `own`."""
    interface = own.partition("%")[2]
    return f"{host}%{interface}" if interface and is_link_local(host) else host


def is_link_local(host: str) -> bool:
    return ipaddress.ip_address(host).is_link_local


def check_reachable(hosts: Sequence[str]) -> None:
    """ValueError when a rank has an address that only its own machine knows, and others are elsewhere."""
    inside = [ipaddress.ip_address(host).is_loopback for host in hosts]
    if any(inside) and not all(inside):
        rank = inside.index(True)
        raise ValueError(
            f"rank {rank} has the address {hosts[rank]}, which other machines cannot reach: give --master_addr as a "
            f"number, or name the network interface in {INTERFACES}"
        )


def public_addresses(hosts: Sequence[str]) -> list[str]:
    """Those of the addresses that the whole internet may reach."""
    return sorted({host for host in hosts if ipaddress.ip_address(host).is_global})
