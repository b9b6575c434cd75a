"""inspect-ai: evaluations. Its `openai/` provider may ask for the Responses API."""

import os
import tempfile

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import exact
from scenario import Server, equal, main, refused, works


def judge(server: Server, model: Model) -> float:
    """An evaluation's score: of two samples the one's target is the greedy answer, the other's is not."""
    samples = [Sample(input=server.question, target=target) for target in (server.chat_text, "no")]
    with tempfile.TemporaryDirectory() as folder:
        [log] = evaluate(
            Task(dataset=samples, scorer=exact()), model=model, log_dir=folder, display="none", fail_on_error=True
        )
    if log.status != "success":
        raise RuntimeError(log.error.message if log.error else log.status)
    [usage] = log.stats.model_usage.values()
    equal([usage.input_tokens, usage.output_tokens], [2 * count for count in server.chat_usage], "usage")
    return log.results.scores[0].metrics["mean"].value


def config(server: Server) -> GenerateConfig:
    return GenerateConfig(temperature=0, max_tokens=server.max_tokens, max_retries=0)


@refused("an evaluation with `openai/NAME` by its defaults", saying="/v1/responses")
def responses(server: Server) -> None:
    options = {"base_url": server.api, "api_key": "none", "config": config(server), "memoize": False}
    judge(server, get_model(f"openai/{server.model}", **options))


@works(
    "the same, but it leaves `temperature` out: it takes an unknown name for a new model of OpenAI's",
    "`-M responses_api=false`",
)
def chat_completions(server: Server) -> None:
    options = {"base_url": server.api, "api_key": "none", "config": config(server), "memoize": False}
    judge(server, get_model(f"openai/{server.model}", responses_api=False, **options))


@works("an evaluation", "`openai-api/mini/NAME`, `MINI_BASE_URL`, `MINI_API_KEY=none`")
def openai_api(server: Server) -> None:
    os.environ |= {"MINI_BASE_URL": server.api, "MINI_API_KEY": "none"}
    model = get_model(f"openai-api/mini/{server.model}", config=config(server), memoize=False)
    equal(judge(server, model), 0.5, "mean score")


main()
