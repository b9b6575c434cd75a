"""The metrics of many replicas as one scrape, which a strict parser reads."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from v0_10_scale_out.cluster.expositions import merge


def exposition(value, *, label="tiny", extra=False):
    """A counter, a labelled gauge, a histogram, and perhaps one that others have not."""
    registry = CollectorRegistry()
    Counter("made:requests", "Requests.", registry=registry).inc(value)
    Gauge("made:running", "Runs, {with} a brace.", ["model"], registry=registry).labels(label).set(value)
    Histogram("made:seconds", "Time.", ["model"], buckets=(1, 2), registry=registry).labels(label).observe(value)
    if extra:
        Gauge("made:extra", "Only here.", registry=registry).set(value)
    return generate_latest(registry).decode()


def samples(text):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_sample_is_there_once_with_its_replica():
    merged = samples(merge({"a": exposition(1), "b": exposition(2)}))
    for replica, value in (("a", 1), ("b", 2)):
        for (name, labels), expected in samples(exposition(value)).items():
            if not name.endswith("_created"):
                assert merged[name, labels | {("replica", replica)}] == expected
    assert len(merged) == len(samples(exposition(1))) * 2


def test_families_stand_there_once_and_in_one_piece():
    lines = merge({"a": exposition(1), "b": exposition(2, extra=True), "c": exposition(3)}).splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == len(set(heads))
    names = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    runs = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    plain = [name for name in runs if not name.startswith("made:seconds")]  # a histogram's go round for each replica
    assert len(plain) == len(set(plain))


def test_a_family_that_one_replica_alone_has_is_kept():
    merged = samples(merge({"a": exposition(1), "b": exposition(2, extra=True)}))
    assert merged["made:extra", frozenset({("replica", "b")})] == 2
    assert ("made:extra", frozenset({("replica", "a")})) not in merged


@pytest.mark.parametrize("label", ['a"b', "a}b", "a b", "a{b", "a\\b", "a\nb", "", 'x" 5'])
def test_any_label_is_kept(label):
    merged = samples(merge({"a": exposition(1, label=label)}))
    assert merged["made:running", frozenset({("model", label), ("replica", "a")})] == 1


def test_of_one_replica_and_of_none():
    assert merge({}) == ""
    assert samples(merge({"a": exposition(1)})).keys() == {
        (name, labels | {("replica", "a")}) for name, labels in samples(exposition(1))
    }


def test_an_empty_brace_gets_no_comma():
    assert merge({"a": "# TYPE x gauge\nx{} 1.0\nx 2.0 123\n"}) == (
        '# TYPE x gauge\nx{replica="a"} 1.0\nx{replica="a"} 2.0 123\n'
    )
