"""What every results file begins with."""

import re
import sys

from common.measuring.recipe import recipe, spread


def test_a_recipe_says_with_what_where_and_how_a_number_was_made():
    made = recipe(dtype="float32", repeats=3)
    assert made["settings"] == {"dtype": "float32", "repeats": 3}
    assert made["command"].startswith("python -m ")
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?|unknown", made["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert set(made["versions"]) == {"python", "torch", "transformers", "tokenizers", "numpy"}
    assert made["machine"]["cores"] >= 1
    assert made["machine"]["cpu"]


def test_a_path_of_this_machine_is_no_part_of_a_recipe(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--out", "/some/where/bench.json", "--repeats", "3"])
    assert recipe()["command"].endswith(" --out bench.json --repeats 3")


def test_repeated_measurements_are_told_by_median_and_extremes():
    assert spread([3.0, 1.0, 2.00049]) == {"median": 2.0, "min": 1.0, "max": 3.0}
