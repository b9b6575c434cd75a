"""What every results file begins with."""

import re

from common.recipe import recipe


def test_a_recipe_says_with_what_where_and_how_a_number_was_made():
    made = recipe(dtype="float32", repeats=3)
    assert made["settings"] == {"dtype": "float32", "repeats": 3}
    assert made["command"].startswith("python -m ")
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?|unknown", made["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert set(made["versions"]) == {"python", "torch", "transformers", "tokenizers", "numpy"}
    assert made["machine"]["cores"] >= 1
    assert made["machine"]["cpu"]
