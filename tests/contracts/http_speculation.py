"""What clients and dashboards see of drafts."""

from tests.kit.models import Successor
from tests.kit.server import metrics, post_lines, texts

SINCE = "v0_7"
NAMES = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


def test_metrics_count_drafts_and_those_that_were_right_under_vllms_names(serve, caplog):
    caplog.set_level("INFO")
    # The stand-in answers every letter with the next one. Behind "ABCDEFG ABC" the lookup finds DEFG, and is right.
    # Then nothing that was there before comes again.
    options = {"speculative_method": "ngram", "num_speculative_tokens": 3, "ngram_min": 2, "ngram_max": 4}
    with serve(Successor(), num_blocks=100, block_size=4, **options) as server:
        assert [metrics(server)[name] for name in NAMES] == [0, 0, 0]
        response = server.complete(prompt=[*b"ABCDEFG ABC"], max_tokens=6)
        assert texts(response) == ["DEFGHI"]
        assert response.json()["usage"]["completion_tokens"] == 6
        values = metrics(server)
        # Step 1 samples D. Step 2: behind "ABCD" came EFG, all right, and H. Step 3: nothing came behind "GH".
        assert [values[name] for name in NAMES] == [1, 3, 3]
        text = server.http.get("/metrics").text
        for position in range(3):
            assert f'position="{position}"}} 1.0' in text
        assert post_lines(caplog, 1)[-1].endswith(" preemptions=0 accepted=3/3")


def test_without_a_drafter_the_counters_are_0_and_the_log_says_nothing_of_them(serve, caplog):
    caplog.set_level("INFO")
    with serve(Successor(), num_blocks=100) as server:
        server.complete(prompt=[*b"ABCDEFG ABC"], max_tokens=6)
        assert [metrics(server)[name] for name in NAMES] == [0, 0, 0]
        assert post_lines(caplog, 1)[-1].endswith(" preemptions=0")
