"""`LLM`: the engine for whoever has all prompts at hand. It adds them, steps until they are done, and joins the deltas.

Several streams, and a `generate` between their steps, may be open at once: they share the engine's steps, so that each
step may bring something for any of them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common import prompts as prompt_forms
from common.llama import Model
from common.outputs import OutputStream, RequestOutput
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
        self._outputs: dict[str, deque[RequestOutput]] = {}  # of each open request: what its reader has not taken yet
        self._dropped: list[str] = []  # requests whose readers have gone without a word
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
        return self._serve(self._add(inputs, params), use_tqdm)

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
        return self._serve(self._add(token_ids, params), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, as it is written: every output holds only what its step added (a delta).

        With `n > 1` a step's output has the deltas of several choices, told apart by their `index`.

        Raises:
            RequestError: at once, not at the first step.
        """
        [request_id] = self._add([prompt], prompt_forms.params_for_each(sampling_params, 1))
        return OutputStream(request_id, self._read(request_id), self._leave, self._dropped.append)

    def _add(self, prompts: Sequence[Prompt], all_params: Sequence[SamplingParams]) -> list[str]:
        """Check all prompts, and only then add them to the engine: one that is refused changes nothing."""
        token_ids = prompt_forms.for_each(self.engine.validate, prompts, all_params)
        request_ids = []
        for prompt, ids, params in zip(prompts, token_ids, all_params, strict=True):
            request_ids.append(str(self._num_requests))
            self._num_requests += 1
            self.engine.add_request(request_ids[-1], prompt, params, prompt_token_ids=ids)
            self._outputs[request_ids[-1]] = deque()
        return request_ids

    def _serve(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step until all are done; whichever is done first moves the bar."""
        wholes: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), desc="Requests", disable=None if use_tqdm else True, delay=1.0) as bar:
            try:
                while any(request_id in self._outputs for request_id in request_ids):
                    self._step()
                    for request_id in request_ids:
                        for output in self._take(request_id):
                            wholes.setdefault(request_id, replace(output, outputs=[])).extend(output)
                            bar.update(output.finished)
            finally:
                self._leave(request_ids)
        return [wholes[request_id] for request_id in request_ids]

    def _read(self, request_id: str) -> Iterator[RequestOutput]:
        while request_id in self._outputs:
            yield from self._take(request_id)
            if request_id in self._outputs:
                self._step()

    def _step(self) -> None:
        while self._dropped:
            self._leave([self._dropped.pop()])
        for output in self.engine.step():
            if output.request_id in self._outputs:  # else of a request that somebody has given to the engine himself
                self._outputs[output.request_id].append(output)

    def _take(self, request_id: str) -> Iterator[RequestOutput]:
        outputs = self._outputs.get(request_id, deque())
        while outputs:
            output = outputs.popleft()
            if output.finished:
                del self._outputs[request_id]
            yield output

    def _leave(self, request_ids: list[str]) -> None:
        """Forget requests, and abort those that have not ended: their reader has left, or a step has failed."""
        for request_id in request_ids:
            if self._outputs.pop(request_id, None) is not None:
                self.engine.abort_request(request_id)
