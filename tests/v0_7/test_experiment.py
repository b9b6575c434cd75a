"""The arithmetic of v0.7's experiment: acceptance by position, and what acceptance a price asks for."""

import pytest

from v0_7_speculative.measurements.break_even import needed_acceptance, put_together
from v0_7_speculative.measurements.experiment import acceptance


def test_a_draft_counts_at_its_position_only_if_those_before_it_were_right():
    steps = [(4, 4), (4, 1), (2, 0), (0, 0)]
    assert acceptance(steps) == {
        "drafts": 10,
        "accepted_percent": 50.0,
        "by_position_percent": {"1": 66.7, "2": 33.3, "3": 50.0, "4": 50.0},
    }


@pytest.mark.parametrize(("num_drafts", "right"), [(1, 0.3), (4, 0.5), (8, 0.9)])
def test_the_acceptance_that_a_price_asks_for_brings_that_many_accepted_drafts(num_drafts, right):
    price = sum(right**i for i in range(1, num_drafts + 1))
    assert needed_acceptance(price, num_drafts) == pytest.approx(right)


def test_drafts_that_cost_as_much_as_all_of_them_bring_can_never_pay():
    assert needed_acceptance(4.0, 4) is None


def test_prices_and_speed_ups_follow_from_costs_and_acceptance():
    costs = {
        "num_layers": 10,
        "steps": {str(rows): {"plain_steps": {"median": 1 + 0.05 * (rows - 1)}} for rows in range(1, 10)},
        "passes": {"4": {"plain_steps": {"median": 0.5}}},
    }
    way = {"tokens_per_step": 2.0, "accepted_percent": 50.0, "speed_up": {"median": 0.9}}
    found = put_together({"costs": costs, "early_exit_4": {"ways": {"2": way}}, "ngram_edit": {"ways": {}}})
    exit_4 = found["early_exit"]["4"]
    assert (exit_4["simple_percent"], exit_4["pass_percent"]) == (40.0, 50.0)
    assert exit_4["2"]["price"] == pytest.approx(2 * 0.5 + 1.1)
    assert exit_4["2"]["predicted_speed_up"] == pytest.approx(2.0 / 2.1, abs=1e-3)
    assert found["free_drafts"]["8"] == pytest.approx(9 / 1.4, abs=0.01)
    assert (found["losers"], found["winners"], found["best_early_exit"]) == (["early_exit_4 2"], [], 0.9)
