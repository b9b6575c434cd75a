"""Every field of other servers' APIs that this one does not have, and what becomes of it: one table.

Gathered from the requests of OpenAI's API, vLLM 0.32, SGLang, llama.cpp's server, Ollama, and Hugging Face's and
Anthropic's. A field that would change the answer is refused, but for the values that ask for what is done anyway
(`null` always does). One that changes nothing is ignored, as is a field that nobody knows, with a line in the log.
"""

from typing import Any

from common.errors import RequestError

# Why they are refused -> the fields, each with its harmless values. The reason ends the message.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "there is no structured output": {
        "ebnf": ("",),
        "format": ("",),
        "grammar": ("",),
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "json_schema": (),
        "preserved_tokens": ([],),
        "regex": ("",),
        "response_format": ({"type": "text"},),
        "structural_tag": (),
        "structured_outputs": ({},),
    },
    "there are no tools": {
        "function_call": ("none", "auto"),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "web_search_options": (),
    },
    "there is no such sampler": {
        "adaptive_decay": (),
        "adaptive_target": (-1,),
        "dry_allowed_length": (2,),
        "dry_base": (1.75,),
        "dry_multiplier": (0,),
        "dry_penalty_last_n": (),
        "dry_sequence_breakers": (),
        "dynatemp_exponent": (1,),
        "dynatemp_range": (0,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "min_keep": (0,),
        "mirostat": (0,),
        "mirostat_eta": (),
        "mirostat_tau": (),
        "penalty_alpha": (0,),
        "samplers": (),
        "smoothing_factor": (0,),
        "tfs_z": (1,),
        "top_a": (0,),
        "top_n_sigma": (-1,),
        "typical_p": (1,),
        "xtc_probability": (0,),
        "xtc_threshold": (0.1,),
    },
    "there is no beam search, nor any other search among answers": {
        "best_of": (1,),  # and what `n` says
        "early_stopping": (False,),
        "length_penalty": (1,),
        "num_beams": (1,),
        "use_beam_search": (False,),
    },
    "tokens can be made likelier or less likely by logit_bias and the penalties only": {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "custom_logit_processor": (),
        "custom_params": ({},),
        "encoder_repetition_penalty": (1,),
        "guidance_scale": (1,),
        "logits_processors": ([],),
        "n_indent": (0,),
        "negative_prompt": ("",),
        "no_repeat_ngram_size": (0,),
        "penalize_nl": (False,),
        "repeat_last_n": (-1,),
        "watermark": (False,),
        "watermarking": (False,),
    },
    "an answer ends by stop, stop_token_ids, an end token or max_tokens only": {
        "no_stop_trim": (False,),
        "repetition_detection": (),
        "stop_regex": ("", []),
        "t_max_predict_ms": (-1, 0),
    },
    "prompts are never cut": {
        "truncate": (),
        "truncate_prompt_tokens": (),
        "truncation": ("disabled", False),
        "truncation_side": (),
    },
    "here it is called max_tokens": {
        "max_completion_tokens": (),  # of completions
        "max_length": (),
        "max_new_tokens": (),
        "n_predict": (),
        "num_predict": (),
    },
    "here it is called min_tokens": {"min_length": (0,), "min_new_tokens": (0,)},
    "here it is called n": {"n_cmpl": (1,), "num_return_sequences": (1,)},
    "here it is called seed": {"random_seed": ()},
    "here it is called repetition_penalty": {"repeat_penalty": (1,)},
    "here it is called stop": {"stop_sequences": ([],)},
    "here it is called return_token_ids": {"return_prompt_token_ids": (False,), "return_tokens": (False,)},
    "here it is called logprobs": {"n_probs": (0,), "top_logprobs": (0,), "top_n_tokens": (0,)},
    "here temperature: 0 means no sampling": {"do_sample": (True,)},
    "sampling parameters are fields of the request itself": {
        "options": ({},),
        "parameters": ({},),
        "sampling_params": ({},),
    },
    "this server does not give that back": {
        "details": (False,),
        "decoder_input_details": (False,),
        "logprob_token_ids": ([],),
        "post_sampling_probs": (False,),
        "response_fields": ([],),
        "return_cached_tokens_details": (False,),
        "return_full_text": (False,),
        "return_hidden_states": (False,),
        "return_meta_info": (False,),
        "return_prompt_text": (False,),
        "return_routed_experts": (False,),
        "return_tokens_as_token_ids": (False,),
    },
    "prompts are text or token ids only, and answers text": {
        "audio": (),
        "image_data": ([],),
        "images": ([],),
        "modalities": (["text"],),
        "prompt_embeds": ([],),
    },
    "a prompt is made of messages by the model's own chat template, or given as it is": {
        "add_special_tokens": (),  # a chat's template prints them, a text gets the tokenizer's: see `protocol.py`
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),  # of a chat
        "generation_prompt": ("",),
        "input_ids": ([],),
        "inputs": (),
        "raw": (False,),
        "safe_prompt": (False,),
        "system": ("",),
        "task": (),
        "template": ("",),
    },
    "nothing here is written after a text that is given": {"suffix": ("",)},
    "there is no reasoning here; what a template reads goes into chat_template_kwargs": {
        "enable_thinking": (),
        "reasoning": ({}, {"effort": "none"}, {"enabled": False}),
        "reasoning_budget": (-1,),
        "reasoning_budget_tokens": (-1,),
        "reasoning_effort": ("none",),
        "think": (False,),
        "thinking": ({"type": "disabled"}, False),
        "thinking_budget": (-1,),
        "thinking_token_budget": (-1,),
        "verbosity": ("medium",),
    },
    "there are no adapters": {"adapter_id": (), "lora": ([],), "lora_path": (), "lora_request": ()},
    "no answers are moderated": {"moderation": ()},
    "requests are served in the order of their arrival": {"priority": (0,)},
    "keys and values stay within this server": {
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "ec_transfer_params": ({},),
        "kv_transfer_params": ({},),
        "session_params": ({},),
    },
    "there are no extensions that would read it": {"vllm_xargs": ({},)},
}

# Why they change no answer -> the fields.
IGNORED: dict[str, tuple[str, ...]] = {
    "it is for the caller's records": (
        *("custom_labels", "extra_key", "metadata", "request_id", "rid", "safety_identifier", "session_id", "store"),
        "user",
    ),
    "it may only make an answer faster, or cheaper": (
        *("backend_sampling", "cache_prompt", "id_slot", "keep_alive", "n_cache_reuse"),
        *("ngram_corpus_id", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("service_tier", "stream_interval"),
    ),
    "it chooses among servers": ("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"),
    "it says how tools, reasoning or images are shown, and there are none": (
        *("images_config", "include_reasoning", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch"),
        *("mm_payload", "mm_processor_kwargs", "parallel_tool_calls", "parse_tool_calls", "reasoning_format"),
        *("return_mm_kwargs", "routed_experts_prompt_start", "routed_experts_start_len", "separate_reasoning"),
        *("stream_reasoning", "use_audio_in_video"),
    ),
    "there is one way to put texts together: without spaces between special tokens": ("spaces_between_special_tokens",),
    "the context never shifts": ("n_discard", "n_keep", "num_ctx"),
    "it is for debugging": (
        "return_progress",
        "return_token_offsets",
        "sse_ping_interval",
        "timings_per_token",
        "verbose",
    ),
}

REASONS = {name: reason for reason, fields in REFUSED.items() for name in fields}
HARMLESS = {name: values for fields in REFUSED.values() for name, values in fields.items()}
KNOWN = REASONS.keys() | {name for names in IGNORED.values() for name in names}


def check(name: str, value: object, harmless: tuple[Any, ...] | None) -> None:
    """Refuse a field that would change the answer, unless the value is one of those that do not (`None`: all).

    Raises:
        RequestError: with the field's name and the reason.
    """
    if value is not None and harmless is not None and not any(_same(value, other) for other in harmless):
        raise RequestError(f"{name} is not supported: {REASONS[name]}.", param=name)


def _same(value: object, other: object) -> bool:
    """Equal as JSON: `true` is not 1, 1.0 is, and a key whose value is null is not there."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return value == other
