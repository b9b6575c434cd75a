"""The metrics of many replicas as one scrape: each sample gets the label `replica`, each family stands there once.

    vllm:num_requests_running{engine="0"} 3.0   of a1      ─▶  vllm:num_requests_running{engine="0",replica="a1"} 3.0
    vllm:num_requests_running{engine="0"} 1.0   of b2          vllm:num_requests_running{engine="0",replica="b2"} 1.0

Prometheus's text format wants all samples of a family in one group below its HELP and TYPE. Nothing is added up:
`sum without (replica) (...)` does it where it makes sense. Torch-free.
"""

from collections.abc import Mapping


def merge(expositions: Mapping[str, str]) -> str:
    """One exposition of all, by the replicas' names, in their order.

    Args:
        expositions: as `prometheus_client.generate_latest` writes them: each family's HELP, TYPE and samples together.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, []))]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, replica: str) -> str:
    """With the label as the last one. A label's value may hold a brace; behind the last one there are only numbers."""
    label, brace = f'replica="{replica}"', sample.rfind("}")
    if brace < 0:
        name, _, value = sample.partition(" ")
        return f"{name}{{{label}}} {value}"
    comma = "" if sample[brace - 1] == "{" else ","
    return f"{sample[:brace]}{comma}{label}{sample[brace:]}"
