"""What the outputs of one HTTP request add up to. Knows no HTTP and no engine."""

from common.outputs import CompletionOutput, Logprob, RequestOutput

from .responses import Usage, usage


class Totals:
    """What all outputs of a request add up to: its choices, and what the log and `usage` say of them."""

    def __init__(self, num_prompts: int, num_choices: int) -> None:
        self.num_prompts, self.num_choices = num_prompts, num_choices  # choices of each prompt
        self.choices: dict[int, CompletionOutput] = {}
        self.prompt_token_ids: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        self.num_cached_tokens: dict[int, int] = {}  # of each prompt
        self.num_preemptions = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.failed = False  # by a fault of the server's

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in."""
        self.prompt_token_ids[prompt_index] = output.prompt_token_ids
        self.num_cached_tokens[prompt_index] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index] = output.prompt_logprobs
        for delta in output.outputs:
            index = prompt_index * self.num_choices + delta.index
            self.choices.setdefault(index, CompletionOutput(index)).extend(delta)
        if output.finished:
            self.num_preemptions += output.metrics.num_preemptions
            self.num_draft_tokens += output.metrics.num_draft_tokens
            self.num_accepted_tokens += output.metrics.num_accepted_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts; each counts once, whatever `n` is."""
        return sum(len(token_ids) for token_ids in self.prompt_token_ids.values())

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, end tokens included."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def finish_reasons(self) -> list[str]:
        """How all choices have ended, each reason once; empty while one of them has not."""
        reasons = [choice.finish_reason for choice in self.choices.values() if choice.finish_reason is not None]
        return sorted(set(reasons)) if len(reasons) == self.num_prompts * self.num_choices else []

    def usage(self) -> Usage:
        """OpenAI's token counts."""
        return usage(self.num_prompt_tokens, self.num_output_tokens, sum(self.num_cached_tokens.values()))

    def usage_so_far(self, index: int) -> Usage:
        """Of one choice, as vLLM's `continuous_usage_stats` counts: its prompt, and its own tokens."""
        prompt = index // self.num_choices
        num_prompt_tokens, num_output_tokens = len(self.prompt_token_ids[prompt]), len(self.choices[index].token_ids)
        return usage(num_prompt_tokens, num_output_tokens, self.num_cached_tokens[prompt])
