"""Tables and plots are those of the results files, in every document; and what the results must show, they show."""

import re
import shutil

import pytest

from common.errors import ModelError
from common.measuring.recipe import ROOT, documents
from v0_5_bench.harness import cli as harness
from v0_5_bench.harness.report import report, roofline, tables


@pytest.fixture(scope="module")
def results():
    return report.load(report.RESULTS)


def test_every_table_in_the_documents_is_that_of_the_results(results):
    with_tables = [document for document in documents(ROOT) if report.BLOCK.search(document.read_text())]
    assert {"README.md", "benchmarks.md", "v0_5.md", "NOTES.md"} <= {document.name for document in with_tables}
    for document in with_tables:
        assert report.update(document.read_text(), results) == document.read_text(), (
            f"{document.relative_to(ROOT)} differs: run python -m v0_5_bench report --write"
        )


def test_every_plot_that_a_document_shows_was_drawn_from_these_results(results):
    shown = set()
    for document in documents(ROOT):
        shown |= set(re.findall(r"bench_\w+\.(?:svg|png)", document.read_text()))
    assert {"bench_comparison.svg", "bench_progression.svg", "bench_steps.svg", "bench_roofline.svg"} <= shown
    for name in shown:
        content = (ROOT / "docs" / "img" / name).read_bytes()
        assert report.digest(results).encode() in content, f"{name} is older than the results: report --write"


def test_the_named_parts_of_a_step_are_within_5_per_cent_of_the_step_and_the_profiler_costs_under_2(results):
    for name, step in results["attribution"]["steps"]["steps"].items():
        assert 0.95 <= step["sum_of_step"]["median"] <= 1.05, name
        assert step["overhead"]["median"] < 0.02, name


def test_ben_6_the_comparison_has_the_same_tokens_three_rounds_and_nothing_unsaid(results):
    found = results["comparison"]
    assert {"v0_5", "vllm", "transformers", "llama.cpp"} <= set(found["engines"])
    assert found["recipe"]["settings"]["dtype"] == "float32"
    assert found["recipe"]["settings"]["ignore_eos"] is True
    assert found["recipe"]["settings"]["prefix_caching"] is False
    assert "+changes" not in found["recipe"]["commit"]
    assert set(found["workloads"]) == set(tables.WORKLOADS)
    for entry in found["workloads"].values():
        assert {len(samples) for samples in entry["samples_seconds"].values()} == {
            found["recipe"]["settings"]["repeats"]
        }
        assert len(next(iter(entry["samples_seconds"].values()))) >= 3


@pytest.mark.parametrize("peer", ["vllm", "vllm-in-process"])
def test_on_a_known_prefix_v0_6_has_at_least_0_9_of_the_rate_of_vllm_with_its_cache_on(results, peer):
    found = results["shared_prefix"]
    assert found["recipe"]["settings"]["prefix_caching"] is True
    assert next(iter(found["engines"])) == "v0_6"
    assert found["workloads"]["shared_prefix"]["ratio"][peer]["median"] >= 0.9


def test_the_clients_agree_within_2_per_cent_on_the_mock_server(results):
    ratios = results["crosscheck"]["mock"]["ratio"]
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "output_tokens_per_s"):
        assert ratios[figure]["median"] == pytest.approx(1.0, abs=0.02), figure


def test_the_clients_agree_on_our_server_within_what_each_differs_from_itself(results):
    found = results["crosscheck"]["ours"]
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "output_tokens_per_s"):
        ours, theirs = found["harness"][figure], found["vllm_bench_serve"][figure]
        assert ours["min"] <= theirs["max"], figure
        assert theirs["min"] <= ours["max"], figure


ENTRY = {"num_requests": 2, "input_len": 3, "output_len": 2, "seconds": {"a": {"median": 2e-9}}}
MODEL = {"layer_elements": 5, "head_elements": 7, "kv_elements_per_token": 11, "attention_elements_per_pair": 13}


def roof(read_gb_s, tflop_s):
    machine = {"read_gb_s": {"median": read_gb_s}, "float32_tflop_s": {"median": tflop_s}, "model": MODEL}
    return {"comparison": {"workloads": {"w": ENTRY}}, "attribution": {"machine": machine}}


def test_the_roofline_counts_what_two_requests_of_3_plus_2_tokens_need():
    # Four tokens a request go through the layers, two through the head; 1 + 2 + 3 + 4 pairs attend.
    flop = 2 * (2 * 5 * 4 + 2 * 7 * 2 + 2 * 13 * 10)
    num_bytes = 4 * (2 * (5 + 7) + 2 * 11 * (3 + 4))
    point = roofline.roofline_point(roof(10.0, 1.0), "a", "w")
    assert point["intensity"] == pytest.approx(flop / num_bytes)
    assert point["gflop_s"] == pytest.approx(flop / 2)
    assert point["low"] == point["high"] == pytest.approx(10.0 * flop / num_bytes)
    assert roofline.roofline_point(roof(1e6, 1e-3), "a", "w")["low"] == pytest.approx(1.0)


def test_the_roof_is_that_of_the_workloads_rounds_else_of_every_time_that_it_was_measured():
    def rates(read_gb_s, tflop_s):
        return {"read_gb_s": {"median": read_gb_s}, "float32_tflop_s": {"median": tflop_s}}

    found = roof(45.0, 0.5)
    found["attribution"]["machine_later"] = rates(75.0, 0.25)
    assert roofline.roofs(found, ["w"]) == ((250.0, 45.0), (500.0, 75.0))
    assert roofline.roofline_point(found, "a", "w")["high"] <= 500.0
    found["comparison"]["workloads"] = {"w": ENTRY | {"machine": rates(60.0, 0.4)}}
    assert roofline.roofs(found, ["w"]) == ((400.0, 60.0), (400.0, 60.0))


def test_matrices_of_16_bits_are_half_the_bytes_and_the_kv_stays_float32():
    found = roof(10.0, 1.0)
    seconds = {"v0_9": {"median": 2e-9}, "v0_9-float16": {"median": 1e-9}}
    found["comparison"]["workloads"] = {"w": ENTRY | {"seconds": seconds}}
    wide, narrow = (roofline.roofline_point(found, engine, "w") for engine in seconds)
    matrices, kv = 2 * (5 + 7), 2 * 11 * (3 + 4)
    assert narrow["intensity"] / wide["intensity"] == pytest.approx((4 * matrices + 4 * kv) / (2 * matrices + 4 * kv))
    assert narrow["gflop_s"] == pytest.approx(2 * wide["gflop_s"])
    assert narrow["low"] == pytest.approx(10.0 * narrow["intensity"])


def test_v0_9_stands_under_the_roof_of_its_own_rounds_with_matrices_in_float32_and_in_float16():
    machine = {"read_gb_s": {"median": 10.0}, "float32_tflop_s": {"median": 1.0}}
    found = roof(1e6, 1e6)

    def compared(engine, workloads):
        entry = ENTRY | {"seconds": {engine: {"median": 1e-9}}, "machine": machine}
        return {"engines": {engine: {}}, "workloads": dict.fromkeys(workloads, entry)}

    found["fast"] = compared("v0_9", tables.WORKLOADS)
    found["fast_float16"] = compared("v0_9-float16", ["decode_1", "prefill_2000"])
    lines = tables.render("roofline-fast", found).split("\n")
    assert "it reads 10 GB/s and multiplies float32 matrices at 1,000 GFLOP/s" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert [row[0] for row in rows] == [
        "mini-vLLM v0.9",
        "*what the roof allows*",
        "mini-vLLM v0.9, weights in 16 bits",
        "*what the roof allows, matrices in float16*",
    ]
    assert [[bool(cell) for cell in row[1:]] for row in rows] == [[True] * 5] * 2 + [
        [True, False, False, True, False]
    ] * 2
    point = roofline.roofline_point(found, "v0_9", "decode_1", "fast")
    assert rows[0][1] == f"{point['gflop_s']:,.0f} ({point['gflop_s'] / point['low']:.0%})"
    assert rows[1][1] == f"{point['low']:,.0f}"


def test_results_of_v0_9_lie_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "fast").mkdir()
    for name in ("comparison", "fast/comparison", "fast/float16"):
        (tmp_path / f"{name}.json").write_text(f'{{"is": "{name}"}}')
    found = {name: entry["is"] for name, entry in report.load(tmp_path).items()}
    assert found == {"comparison": "comparison", "fast": "fast/comparison", "fast_float16": "fast/float16"}
    assert next(iter(report.load(report.RESULTS)["fast"]["engines"])) == "v0_9"


def test_the_progression_takes_every_milestone():
    pytest.importorskip("matplotlib")
    from v0_5_bench.harness.compare.peers import MILESTONES
    from v0_5_bench.harness.report import plots

    names = list(MILESTONES)
    rates = {name: spread_of(float(number)) for number, name in enumerate(names, 1)}
    workloads = {"decode_8": {"tokens_per_s": rates, "seconds": rates}, "prefill_2000": {"seconds": rates}}
    found = {"progression": {"engines": {name: {} for name in names}, "workloads": workloads}}
    upper, lower = plots.progression(found).axes
    for axes in (upper, lower):
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"v0.{number}" for number in range(1, 10)]
        assert list(axes.lines[0].get_ydata()) == [float(number) for number in range(1, 10)]
    rows = tables.render("progression", found).split("\n")[2:]
    assert rows[-1] == "| mini-vLLM v0.9 | 9.0&nbsp;tok/s | 9.00&nbsp;s |"


def test_the_limits_of_an_a10_are_those_of_reading_all_matrices_and_of_multiplying_by_them():
    limits = roofline.a10_limits()
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert limits["one_tok_s"] == pytest.approx(600e9 / (2 * (layers + 128256 * 4096)))
    assert limits["many_tok_s"] == pytest.approx(32 * limits["one_tok_s"])
    assert limits["prefill_s"] == pytest.approx(2 * layers * 4000 / 125e12)


def test_a_table_is_put_between_its_comments_and_nothing_else_changes():
    found = {
        "progression": {"engines": {"v0_1": {}}, "workloads": {"prefill_2000": {"seconds": {"v0_1": {"median": 1.5}}}}}
    }
    text = "before\n\n<!-- report: progression -->\nold\n<!-- end of report -->\nafter"
    new = report.update(text, found)
    table = "| | prefill 2,000 |\n| --- | ---: |\n| v0.1, one slab | 1.50&nbsp;s |"
    assert new == f"before\n\n<!-- report: progression -->\n\n{table}\n\n<!-- end of report -->\nafter".replace(
        "| |", "|  |"
    )
    assert report.update(new, found) == new


def spread_of(median):
    return {"median": median, "min": median - 0.1, "max": median + 0.1}


def test_a_ratio_stands_beside_the_other_engine_and_above_1_is_ours():
    entry = {
        "tokens_per_s": {"v0_5": spread_of(20.0), "other": spread_of(10.0)},
        "ratio": {"v0_5": spread_of(1.0), "other": spread_of(2.0)},
    }
    found = {"comparison": {"engines": {"v0_5": {}, "other": {}}, "workloads": {"decode_8": entry}}}
    ours, theirs = tables.render("comparison", found).split("\n")[2:]
    assert ours == "| mini-vLLM v0.5 | 20&nbsp;tok/s |"
    assert theirs == "| other | 10&nbsp;tok/s<br>×2.00 (1.90&nbsp;to&nbsp;2.10) |"


def test_the_prefix_cache_is_a_row_of_the_experiments_once_it_is_measured():
    way = {"tokens_per_s": spread_of(20.0)}
    batching = {"what": "many", "ways": {"a": way, "b": {"tokens_per_s": spread_of(40.0)}}}
    found = {"attribution": {"experiments": {"batching": batching}}}
    assert len(tables.render("experiments", found).split("\n")) == 4
    found["attribution"]["prefix_caching"] = {"recipe": {}} | batching
    assert tables.render("experiments", found).split("\n")[4] == "| prefix caching: many | a | 20 tok/s |"


def test_the_parts_of_a_step_come_with_what_they_add_up_to():
    step = {"step_ms": spread_of(10.0), "sum_of_step": spread_of(0.98), "overhead": spread_of(0.01)}
    step |= {"linear layers": spread_of(7.0)}
    found = {"attribution": {"steps": {"steps": dict.fromkeys(("1", "8", "32", "prefill_2000"), step)}}}
    rows = tables.render("steps", found).split("\n")
    assert rows[2] == "| linear layers | 7.00 | 7.00 | 7.00 | 7.00 |"
    assert rows[4].startswith("| named parts, as a share of that step | 98.0% (88.0% to 108.0%) |")
    assert rows[5].startswith("| what the profiler adds | +1.0% (-9.0% to +11.0%) |")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "There is no table nothing: choose from"),
        ("comparison", "needs results that are not there: 'comparison'"),
    ],
)
def test_a_table_without_results_is_an_error_that_says_so(name, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        tables.render(name, {})


def test_a_document_that_differs_is_named_and_write_puts_it_right(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    document = tmp_path / "README.md"
    document.write_text("<!-- report: comparison -->\nold\n<!-- end of report -->\n")
    flags = ["report", "--root", str(tmp_path)]
    assert harness.main(flags) == 1
    assert "README.md: tables differ from the results" in capsys.readouterr().err
    assert harness.main([*flags, "--write"]) == 0
    assert harness.main(flags) == 0
    assert "vLLM 0.32.0" in document.read_text()
    assert {file.suffix for file in (tmp_path / "docs" / "img").iterdir()} == {".svg", ".png"}


def test_the_same_results_draw_the_same_svg(tmp_path):
    flags = ["report", "--write", "--root", str(tmp_path)]
    (tmp_path / "docs").mkdir()
    assert harness.main(flags) == 0
    first = {file.name: file.read_bytes() for file in (tmp_path / "docs" / "img").glob("*.svg")}
    shutil.rmtree(tmp_path / "docs" / "img")
    assert harness.main(flags) == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "docs" / "img").glob("*.svg")} == first


def test_tables_can_be_printed_alone(capsys):
    assert harness.main(["report", "--print", "comparison", "steps"]) == 0
    assert "linear layers" in capsys.readouterr().out
