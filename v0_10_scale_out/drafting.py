"""From the flags to a drafter: what has to be loaded for it, and what it must fit."""

from common.errors import ModelError
from common.llama import Llama, Model
from common.tokenizer import Tokenizer

from .drafter import Drafter, DraftModelDrafter, EarlyExitDrafter, NgramDrafter
from .engine_args import EngineArgs
from .kv_cache import KVCache
from .loader import load, make_kv_cache


def load_draft_model(args: EngineArgs, model: Model, tokenizer: Tokenizer) -> Model | None:
    """The model that guesses, if one was asked for.

    Raises:
        ModelError: its tokens are not the target's, or its context is shorter.
    """
    if args.draft_model is None:
        return None
    drafting, its_tokenizer = load(args.draft_model, None, args)
    if its_tokenizer.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ModelError(
            f"draft_model {args.draft_model} has another vocabulary than the model: its guesses would be other tokens."
        )
    longest, needed = drafting.config.max_position_embeddings, args.max_model_len
    needed = model.config.max_position_embeddings if needed is None else needed
    if longest < needed:
        raise ModelError(
            f"draft_model {args.draft_model} was trained for {longest} tokens, the model serves {needed}: set "
            f"max_model_len to {longest} or less."
        )
    return drafting


def make_drafter(
    args: EngineArgs, model: Model, draft_model: Model | None, kv_cache: KVCache, vocab_size: int
) -> Drafter | None:
    """What `--speculative-method` says.

    Raises:
        ModelError: the model has no such layer to leave it at.
    """
    if args.speculative_method == "ngram":
        return NgramDrafter(args.ngram_min, args.ngram_max)
    if args.speculative_method == "early_exit":
        if not isinstance(model, Llama):
            raise ModelError("early_exit needs a Llama, whose layers can be counted.")
        exit_layer = max(1, model.config.num_layers // 3) if args.exit_layer is None else args.exit_layer
        if exit_layer >= model.config.num_layers:
            raise ModelError(
                f"exit_layer must be below the model's {model.config.num_layers} layers, got {exit_layer}."
            )
        return EarlyExitDrafter(model, kv_cache, vocab_size, exit_layer)
    if draft_model is not None:
        its_pool = make_kv_cache(args, draft_model, kv_cache.kv.shape[2], kv_cache.attention)
        return DraftModelDrafter(draft_model, its_pool, vocab_size)
    return None
