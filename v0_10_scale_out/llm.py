"""`LLM`: the engine for whoever has all prompts at hand. It adds them, steps until they are done, and joins the deltas.

Several streams, and a `generate` between their steps, may be open at once: they share the engine's steps, so that each
step may bring something for any of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import prompts as prompt_forms
from common.llama import Model
from common.outputs import OutputQueues, OutputStream, RequestOutput
from common.prompts import Prompt
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer

from .engine import LLMEngine

Messages = Sequence[dict[str, Any]]


class LLM:
    """Text in, text out; many requests share each step.

    Its arguments and errors are those of `LLMEngine`.
    """

    def __init__(
        self, model: str | Path | Model | None = None, *, tokenizer: Tokenizer | None = None, **engine_args: Any
    ) -> None:
        self.engine = LLMEngine(model, tokenizer=tokenizer, **engine_args)
        self.tokenizer, self.max_model_len = self.engine.tokenizer, self.engine.max_model_len
        self._outputs = OutputQueues(self.engine)  # of each open request: what its reader has not taken yet
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, each text or token ids; whole answers, in the order of the prompts.

        Raises:
            RequestError: one of them cannot be served; then none was.
        """
        inputs = prompt_forms.as_list(prompts)
        params = prompt_forms.params_for_each(sampling_params, len(inputs))
        return self._serve(inputs, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; raises as `generate` does."""
        conversations = prompt_forms.as_conversations(messages)
        params = prompt_forms.params_for_each(sampling_params, len(conversations))
        token_ids = [
            self.tokenizer.chat_token_ids(conversation, add_generation_prompt, continue_final_message)
            for conversation in conversations
        ]
        return self._serve(token_ids, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, as it is written: every output holds only what its step added (a delta).

        With `n > 1` a step's output has the deltas of several choices, told apart by their `index`.

        Raises:
            RequestError: at once, not at the first step.
        """
        request_ids: list[str] = []
        try:
            self._add(request_ids, [prompt], prompt_forms.params_for_each(sampling_params, 1))
            return OutputStream(request_ids[0], self._outputs)
        except BaseException:
            self._outputs.leave(request_ids)
            raise

    def reset_prefix_cache(self) -> None:
        """Let no later request find what has been computed so far."""
        self.engine.reset_prefix_cache()

    def _add(self, request_ids: list[str], prompts: Sequence[Prompt], all_params: Sequence[SamplingParams]) -> None:
        """Check all prompts, and only then add them to the engine: one that is refused changes nothing.

        Each one's id goes to `request_ids` before anything else, so that who is interrupted knows whom to leave.
        """
        token_ids = prompt_forms.for_each(self.engine.validate, prompts, all_params)
        for prompt, ids, params in zip(prompts, token_ids, all_params, strict=True):
            request_ids.append(str(self._num_requests))
            self._num_requests += 1
            self._outputs.open(request_ids[-1])
            self.engine.add_request(request_ids[-1], prompt, params, prompt_token_ids=ids)

    def _serve(
        self, prompts: Sequence[Prompt], all_params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Step until all are done; whichever is done first moves the bar."""
        request_ids: list[str] = []
        wholes: dict[str, RequestOutput] = {}
        try:
            self._add(request_ids, prompts, all_params)
            with tqdm(total=len(prompts), desc="Requests", disable=None if use_tqdm else True, delay=1.0) as bar:
                while any(request_id in self._outputs for request_id in request_ids):
                    self._outputs.step()
                    for request_id in request_ids:
                        for output in self._outputs.take(request_id):
                            wholes.setdefault(request_id, replace(output, outputs=[])).extend(output)
                            bar.update(output.finished)
        finally:
            self._outputs.leave(request_ids)
        return [wholes[request_id] for request_id in request_ids]
