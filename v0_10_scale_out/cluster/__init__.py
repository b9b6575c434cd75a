"""Many replicas on Ray Serve: the same server, several times, behind one address.

In reading order: `routing` (the policy) and `keys` (what it compares), `replica` (an engine with its server), `ingress`
and `outgoing` (what stands before all replicas), `joint` (how answers come back), then `router`, `deployments` and
`local`, which import Ray. Beside them: the flags (`cluster_args`, `main`), metrics of all (`expositions`), the page of
all (`overview`), and one repair of Ray (`loopback`).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazy, so that one replica, --help and the policy need no Ray. `serve run` looks for the name.
    if name == "app":
        from .deployments import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
