"""Keeps what Ray opens on this machine, where the whole of Ray is on this machine.

A replica of Ray Serve 2.60.0 opens a port for calls between replicas on all addresses, and no option says otherwise
(`serve/_private/replica.py` · `_on_initialized`). We call by another way. Whoever reaches that port can have the
replica unpickle whatever they like.
"""

from typing import Any

EVERYWHERE, HERE = "[::]", "127.0.0.1"


def stay() -> None:
    """Called in a replica's constructor, which is before the port is opened. Elsewhere than on a loopback: nothing."""
    import ray
    import ray.serve._private.replica

    replica: Any = ray.serve._private.replica
    if ray.util.get_node_ip_address() != HERE:
        return
    add_port = replica.add_port_to_grpc_server

    def add_port_here(server: Any, address: str, *args: Any) -> int:
        return add_port(server, address.replace(EVERYWHERE, HERE), *args)

    replica.add_port_to_grpc_server = add_port_here
