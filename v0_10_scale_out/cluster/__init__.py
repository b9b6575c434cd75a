"""Many replicas on Ray Serve: the same server, several times, behind one address.

A reading order: `routing` (who gets a request: the policy) and `keys` (what it looks at), `replica` (an engine with its
server), `ingress` (what stands before all of them), then Ray: `router`, `deployments` and `local`. `cluster_args` and
`expositions` are what they say. Only `router`, `deployments` and `local` import Ray.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazy, so that one replica, --help and the policy need no Ray. `serve run` looks for the name.
    if name == "app":
        from .deployments import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
