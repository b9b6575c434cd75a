"""The flags of many replicas, beside the server's and the engine's. Torch-free and Ray-free."""

from dataclasses import dataclass, field

from common.errors import ModelError
from common.units import check_count

from .routing import ROUTINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterArgs:
    """How many replicas there are, on what, and how requests find them.

    Raises:
        ModelError: a value is out of its range.
    """

    replicas: int = field(
        default=1, metadata={"help": "engines, each with its own server and its own cache; 1 needs no Ray"}
    )
    max_replicas: int | None = field(
        default=None,
        metadata={"help": "start and end replicas as the load asks, from --replicas up to so many (default: fixed)"},
    )
    target_requests: float = field(
        default=32.0,
        metadata={"help": "with --max-replicas: running and waiting requests that a replica is to have on average"},
    )
    upscale_delay: float = field(
        default=10.0, metadata={"help": "with --max-replicas: seconds of more load before a replica is started"}
    )
    downscale_delay: float = field(
        default=300.0,
        metadata={"help": "with --max-replicas: seconds of less load before one ends, and its cache"},
    )
    drain_timeout: float = field(
        default=600.0, metadata={"help": "seconds that a replica which is scaled down has to end what it runs"}
    )
    routing: str = field(
        default="prefix",
        metadata={
            "help": "where a request goes: prefix, to the replica that has computed most of its prompt; balanced, to "
            "the less busy of two; random",
            "choices": ROUTINGS,
        },
    )
    routing_threshold: int = field(
        default=8,
        metadata={"help": "prefix: requests that a replica may have more than the least busy one, and still be chosen"},
    )
    routing_min_share: float = field(
        default=0.25, metadata={"help": "prefix: share of a prompt that a replica must hold to be chosen for it"}
    )
    routing_blocks: int = field(
        default=65536, metadata={"help": "prefix: blocks of 64 bytes that are remembered of each replica"}
    )
    joint_answers: bool = field(
        default=True,
        metadata={"help": "one stream from a replica for the tokens of all its requests, not one for each request"},
    )
    replica_cpus: int = field(default=1, metadata={"help": "cores of a replica, and threads that it computes with"})
    replica_gpus: float = field(default=0.0, metadata={"help": "GPUs of a replica; a half lets two share one"})
    ray_address: str | None = field(
        default=None,
        metadata={
            "help": "a Ray cluster that runs already, or auto to find it; local starts one here also for one replica "
            "(default: one here, if there is more than one replica)"
        },
    )

    def __post_init__(self) -> None:
        for name in ("replicas", "replica_cpus", "routing_blocks"):
            check_count(name, getattr(self, name))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ModelError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}.")
        if not 0 < self.target_requests < float("inf"):
            raise ModelError(f"target_requests must be above 0, got {self.target_requests}.")
        for name in ("upscale_delay", "downscale_delay", "drain_timeout", "replica_gpus", "routing_threshold"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ModelError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.routing_min_share <= 1:
            raise ModelError(f"routing_min_share must be from 0 to 1, got {self.routing_min_share}.")
        if self.routing not in ROUTINGS:
            raise ModelError(f"routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}.")

    @property
    def needs_ray(self) -> bool:
        """Whether one process is not enough."""
        return self.most_replicas > 1 or self.ray_address is not None

    @property
    def starts_ray(self) -> bool:
        """Whether Ray is started here, and ends with the server."""
        return self.ray_address in (None, "local")

    @property
    def most_replicas(self) -> int:
        """How many there may be at any time."""
        return self.replicas if self.max_replicas is None else self.max_replicas
