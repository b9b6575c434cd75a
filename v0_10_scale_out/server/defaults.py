"""The sampling that a model's makers recommend, for requests that say nothing else: `generation_config.json`.

Read as vLLM 0.32 does (`config/model.py` · `get_diff_sampling_param`): the penalties, temperature, top_k, top_p, min_p,
and `max_new_tokens`, which is our `max_tokens`. `do_sample` is not looked at.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from common.errors import ModelError, RequestError
from common.sampling_params import SamplingParams

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(source: str, folder: Path) -> dict[str, Any]:
    """The fields of `SamplingParams` that differ from their own defaults.

    Args:
        source: `"auto"`, which is the model's folder, `"vllm"`, which is none, or another folder.
        folder: the model's.

    Raises:
        ModelError: the file cannot be read, or has a value out of its range.
    """
    if source == "vllm":
        return {}
    file = (folder if source == "auto" else Path(source)) / "generation_config.json"
    if not file.is_file():
        if source == "auto":
            return {}
        raise ModelError(f"generation_config: there is no {file}. Give a folder that has it, or auto, or vllm.")
    try:
        content = json.loads(file.read_bytes())
        given = {ours: content[theirs] for theirs, ours in NAMES.items() if content.get(theirs) is not None}
        params = SamplingParams(**given)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        said = f"{error.strerror}." if isinstance(error, OSError) else "it is not a JSON object."
        reason = str(error) if isinstance(error, RequestError) else said
        raise ModelError(f"{file}: {reason} With --generation-config vllm it is not read.") from None
    neutral = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | {"max_tokens": None}
    return {name: getattr(params, name) for name in given if getattr(params, name) != neutral[name]}
