"""Figures in the documents are those of the results files."""

import json

import pytest

from common.measuring.recipe import ROOT, documents
from tools.figures import update


@pytest.fixture
def root(tmp_path):
    (tmp_path / "results.json").write_text(
        json.dumps({"decode": {"ratio": 2.1254}, "top_p_0.95": 7, "linear layers": 8, "name": "x", "a-b": {"32": 40}})
    )
    return tmp_path


def test_a_figure_is_replaced_by_the_files_in_its_format(root):
    text = "Is <!--=results.json decode.ratio .1f-->9.9<!--/--> times, <!--=results.json decode.ratio .0%-->?<!--/-->."
    expected = (
        "Is <!--=results.json decode.ratio .1f-->2.1<!--/--> times, <!--=results.json decode.ratio .0%-->213%<!--/-->."
    )
    assert update(text, root) == expected
    assert update(expected, root) == expected


def test_a_dot_in_a_key_is_written_as_a_tilde_a_space_as_a_plus_and_s_is_the_value_as_it_is(root):
    assert ">7<" in update("= <!--=results.json top_p_0~95 d--><!--/-->", root)
    assert ">8<" in update("= <!--=results.json linear+layers d--><!--/-->", root)
    assert ">x<" in update("= <!--=results.json name s--><!--/-->", root)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("top_p_0~95/linear+layers", "0.875"),
        ("32*top_p_0~95/a-b.32", "5.600"),  # from left to right, and a hyphen is part of a key
        ("1000/a-b.32/linear+layers", "3.125"),
        ("1000/linear+layers−1000/a-b.32−0.5", "99.500"),
    ],
)
def test_what_follows_from_figures_is_computed(root, expression, value):
    assert f">{value}<" in update(f"= <!--=results.json {expression} .3f-->?<!--/-->", root)


def test_a_lost_key_in_a_computation_is_named(root):
    with pytest.raises(LookupError, match=r"results.json has no decode.speed: 'speed' is not one of ratio"):
        update("= <!--=results.json 32*top_p_0~95/decode.speed .1f-->1<!--/-->", root)


@pytest.mark.parametrize(
    ("figure", "message"),
    [("results.json decode.speed .1f", "no decode.speed"), ("lost.json a .1f", "no results file lost.json")],
)
def test_a_lost_file_or_key_is_an_error(root, figure, message):
    with pytest.raises(LookupError, match=message):
        update(f"= <!--={figure}-->1<!--/-->", root)


def test_a_figure_at_the_start_of_a_line_is_refused_since_it_would_end_the_paragraph(root):
    with pytest.raises(LookupError, match="begins with the figure name"):
        update("It is\n<!--=results.json name s-->x<!--/--> here", root)


@pytest.mark.parametrize("document", list(documents(ROOT)), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_figures_of_this_projects_documents_are_measured_ones(document):
    text = document.read_text()
    assert update(text, ROOT) == text, "run python -m tools.figures --write"
