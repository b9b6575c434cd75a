"""The policy behind Ray's hooks, with requests and replicas that are not Ray's."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.v0_10.ray_kit import needs_ray
from v0_10_scale_out.cluster.routing import Choice, Route

pytestmark = needs_ray


@pytest.fixture
def router():
    """One that knows the replicas a and b; `choose`, `loads`."""
    from v0_10_scale_out.cluster.router import PolicyRouter

    class Router(PolicyRouter):
        curr_replicas = property(lambda self: {replica.replica_id for replica in self.replicas})

        def choose(self, request):
            return [
                [replica.replica_id.unique_id for replica in rank]
                for rank in asyncio.run(self.choose_replicas(self.replicas, request))
            ]

        def loads(self):
            return {name: replica.load for name, replica in self._policy.replicas.items()}

    made = object.__new__(Router)  # its constructor wants a cluster
    made.replicas = [SimpleNamespace(replica_id=Id(name)) for name in "ab"]
    made.initialize_state(routing="prefix", seed=0)
    return made


class Id(SimpleNamespace):
    def __init__(self, name):
        super().__init__(unique_id=name)

    __hash__ = object.__hash__


def request(request_id, route=None):
    return SimpleNamespace(
        args=[] if route is None else [route], metadata=SimpleNamespace(internal_request_id=request_id)
    )


def test_the_chosen_one_comes_first_and_the_others_in_case_it_cannot_be_reached(router):
    route = Route([b"1", b"2"])
    first, others = router.choose(request("1", route))
    assert first == [route.choice.replica]
    assert sorted(first + others) == ["a", "b"]
    again = Route([b"1", b"2", b"3"])
    assert router.choose(request("2", again))[0] == first
    assert again.choice == Choice(first[0], "prefix", 2)


def test_a_request_counts_from_its_choice_to_its_completion(router):
    route = Route([b"1"])
    [[name], [other]] = router.choose(request("1", route))
    assert router.loads() == {name: 1, other: 0}
    router.on_request_routed(request("1", route), Id(name), None)
    assert router.loads() == {name: 1, other: 0}
    router.on_request_completed(Id(name), "1")
    assert router.loads() == {"a": 0, "b": 0}


def test_one_that_came_to_another_replica_counts_there(router):
    route = Route([b"1"])
    [[name], [other]] = router.choose(request("1", route))
    router.on_request_completed(Id(name), "1")  # it was rejected
    router.on_request_routed(request("1", route), Id(other), None)
    assert route.choice == Choice(other, "unreachable", 0)
    assert router.loads() == {name: 0, other: 1}
    router.on_request_completed(Id(other), "1")
    assert router.loads() == {"a": 0, "b": 0}


def test_one_that_was_cancelled_before_it_came_to_a_replica_is_forgotten_with_the_next_choice(router):
    routes = [Route([bytes([number])]) for number in range(5)]
    for number, route in enumerate(routes):
        router.choose(request(f"{number}", route))
        route.has_ended = True
    router.choose(request("next", Route()))
    assert sum(router.loads().values()) == 1


def test_the_stream_of_a_replicas_outbox_adds_no_load(router):
    route = Route(only="b", is_request=False)
    assert router.choose(request("1", route)) == [["b"], ["a"]]
    router.on_request_routed(request("1", route), Id("a"), None)
    assert route.choice.rule == "named"
    assert router.loads() == {"a": 0, "b": 0}
    router.choose(request("2", Route(only="b")))
    router.choose(request("2", Route(only="b", is_request=False)))  # nor does it take any away
    assert router.loads() == {"a": 0, "b": 1}


def test_a_lost_replica_takes_its_requests_along(router):
    for number in range(4):
        router.choose(request(f"{number}", Route([bytes([number])])))
    router.replicas.pop()
    router.choose(request("next", Route()))
    assert router.loads() == {"a": 3}


def test_what_is_no_request_of_the_ingress_is_routed_too(router):
    assert sorted(name for rank in router.choose(request("1")) for name in rank) == ["a", "b"]
    assert router.choose(None) == [["a", "b"]]


def test_where_the_policy_fails_any_replica_will_do_and_the_log_says_so(router, caplog):
    router._policy.choose_for = None
    assert router.choose(request("1", Route())) == [["a", "b"]]
    assert "The routing failed." in caplog.text
