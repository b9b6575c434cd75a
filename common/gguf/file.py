"""Turns a `.gguf` file of a Llama into a Hugging Face folder, once, in float32: everything else reads one format.

Reads any quantisation that the `gguf` package can undo. A tensor of the file that has no place in the folder is an
error, and so is one that is missing. `config.py` and `tokenizer.py` do their parts. Left out: split files,
and keeping weights quantised in memory. No torch, and no `gguf` either once a file is converted. Changes in no
milestone.
"""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from safetensors import SafetensorError

from common.cache_directory import cache_directory
from common.errors import ModelError
from common.gguf.config import Metadata, Target, build_config, check_supported, tensor_targets

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2  # part of the cached folder's name: raise it whenever the same file would convert differently
SAMPLE_BYTES = 1024**2  # hashed of the file's begin, of its end, and of all places between, in place of the whole file
NUM_SAMPLES = 64  # places between: a fine-tuned model may have its base's metadata and its very last weights
SHARD_BYTES = 2 * 1024**3  # of a safetensors file; converting needs about as much memory

_ROPE_FACTORS = "rope_freqs.weight"  # goes into config.json


def cached_folder(gguf_file: Path) -> Path:
    """The converted folder of this file, in `$MINI_VLLM_CACHE`, `$XDG_CACHE_HOME/mini-vllm` or `~/.cache/mini-vllm`.

    The first call converts, and a process that comes meanwhile waits for it; the folder has its name only when it is
    complete. The name depends on the file's size and samples of its content, not on where the file lies.

    Raises:
        ModelError: the file cannot be read or converted, or the cache directory cannot be written.
    """
    digest = _digest(gguf_file)
    folder = cache_directory() / f"{gguf_file.stem}-{digest}"
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():  # else it was made by the process that held the lock
                logger.info("Converting %s to float32 safetensors, once, in %s", gguf_file, folder)
                _convert_atomically(gguf_file, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"The converted copy of {gguf_file} cannot be written ({error}): set MINI_VLLM_CACHE to a directory that "
            "can be written and has room for the model in float32."
        ) from error
    return folder


def convert(gguf_file: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json`, the tokenizer and the weights to `folder`, which may exist.

    Raises:
        ModelError: the file is damaged, or holds something that is not supported; the folder is then of no use.
    """
    from common.gguf.tokenizer import build_tokenizer, end_token_ids, tokenizer_config

    try:
        metadata, tensors = _read(gguf_file)
        check_supported(metadata)
        config = build_config(
            metadata, {name: _shape(tensor) for name, tensor in tensors.items()}, _rope_factors(tensors)
        )
        targets = tensor_targets(config)
        _check_tensors(tensors, targets)
        tokenizer = build_tokenizer(metadata)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", config)
        # Chat models may end a turn and a text with different tokens; generation ends at either.
        generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_token_ids(metadata)}
        _write_json(folder / "generation_config.json", generation)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
        _write_weights(tensors, targets, folder)
    except ModelError as error:
        raise ModelError(f"{gguf_file} cannot be converted: {error}") from None


def _digest(gguf_file: Path) -> str:
    try:
        with gguf_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(f"{FORMAT_VERSION} {size} ".encode())
            between = [(size * i // NUM_SAMPLES, SAMPLE_BYTES // NUM_SAMPLES) for i in range(1, NUM_SAMPLES)]
            for start, length in [(0, SAMPLE_BYTES), *between, (max(0, size - SAMPLE_BYTES), SAMPLE_BYTES)]:
                file.seek(start)
                digest.update(file.read(length))
    except OSError as error:
        raise ModelError(f"{gguf_file} cannot be read ({error.strerror}): check its path and permissions.") from error
    return digest.hexdigest()[:12]


def _convert_atomically(gguf_file: Path, folder: Path) -> None:
    """Convert beside the folder and rename at the end. The caller holds the folder's lock."""
    partial = folder.with_name(folder.name + ".partial")
    # Under the lock nobody else writes there: what is found was left by a process that was killed.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        convert(gguf_file, partial)
        partial.rename(folder)
    except BaseException:  # KeyboardInterrupt too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read(gguf_file: Path) -> tuple[Metadata, "dict[str, ReaderTensor]"]:
    """Metadata and tensors by name; the tensors' data stays in the file until it is touched."""
    from gguf.gguf_reader import GGUFReader

    class CheckedReader(GGUFReader):
        def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, *args: Any, **options: Any) -> Any:
            # The base class slices past the end of a truncated file, and fails later at a shape that does not fit.
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ModelError(f"it is truncated, with {len(self.data)} of at least {end} bytes: download it again.")
            return super()._get(offset, dtype, count, *args, **options)

    try:
        with gguf_file.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(
                f"it is not a GGUF file, as it starts with {magic!r}: download it again (a Git LFS pointer or a web "
                "page in its place is a common mistake)."
            )
        reader = CheckedReader(gguf_file)
        metadata = Metadata({key: field.contents() for key, field in reader.fields.items()})
    except OSError as error:
        raise ModelError(f"it cannot be read ({error.strerror}): check its path and permissions.") from error
    except ModelError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ModelError(
            f"the gguf package cannot read it ({error}): it is damaged or of another version, download it again."
        ) from error
    if reader.byte_order != "I":
        raise ModelError("it was made for machines of the other byte order: download the common version.")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _shape(tensor: "ReaderTensor") -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF has the innermost size first


def _check_tensors(tensors: "dict[str, ReaderTensor]", targets: dict[str, Target]) -> None:
    for name, target in targets.items():
        if name not in tensors:
            raise ModelError(f"it has no tensor {name}: the file is incomplete, choose another one.")
        if _shape(tensors[name]) != target.shape:
            raise ModelError(
                f"its tensor {name} has the shape {_shape(tensors[name])}, but its metadata asks for {target.shape}: "
                "choose another file."
            )
    for name in tensors:
        if name not in targets and name != _ROPE_FACTORS:
            raise ModelError(
                f"its tensor {name} is no part of a Llama as this engine computes it: choose another model."
            )


def _rope_factors(tensors: "dict[str, ReaderTensor]") -> npt.NDArray[np.float32] | None:
    return _dequantize(tensors[_ROPE_FACTORS]) if _ROPE_FACTORS in tensors else None


def _dequantize(tensor: "ReaderTensor") -> npt.NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"its tensor {tensor.name} has the type {tensor.tensor_type.name}, which the gguf package cannot turn into "
            "float32: choose a file with another quantisation, such as Q8_0 or Q4_K_M."
        ) from None


def _half_split(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the reordering of q and k rows by llama.cpp's converter (its `LlamaModel.permute`).

    Rotary embedding turns pairs of a head's rows. GGUF has the pairs side by side (0 1, 2 3, ...), Hugging Face has
    them half a head apart (0 and D/2, 1 and D/2 + 1, ...).
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(tensors: "dict[str, ReaderTensor]", targets: dict[str, Target], folder: Path) -> None:
    from safetensors.numpy import save_file
    from tqdm import tqdm

    shards = _shards(targets)
    weight_map = {}
    # disable=None: silent when stderr is not a terminal.
    with tqdm(total=len(targets), desc="Converting", unit="tensor", leave=False, disable=None) as progress:
        for index, names in enumerate(shards, start=1):
            arrays = {}
            for name in names:
                array, target = _dequantize(tensors[name]), targets[name]
                if target.num_rotary_heads:
                    array = _half_split(array, target.num_rotary_heads)
                arrays[target.name] = np.ascontiguousarray(array)
                progress.update()
            file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
            save_file(arrays, folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / file)  # safetensors lets only the owner read
            weight_map.update(dict.fromkeys(arrays, file))
    if len(shards) > 1:
        total_size = sum(_num_bytes(target) for target in targets.values())
        index_file = folder / "model.safetensors.index.json"
        _write_json(index_file, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _shards(targets: dict[str, Target]) -> list[list[str]]:
    """Names of tensors that go to one file together, in order; a tensor above the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, target in targets.items():
        if shards[-1] and size + _num_bytes(target) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _num_bytes(target)
    return shards


def _num_bytes(target: Target) -> int:
    return int(np.prod(target.shape)) * np.dtype(np.float32).itemsize


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
