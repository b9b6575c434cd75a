"""Who can be compared, and how each is started: its interpreter, its arguments, its environment. Torch-free.

    v0_1 ... v0_9             ours: `LLM.generate` of a milestone, in this environment
    v0_9-torch, v0_9-float16  v0.9 without its kernels, and with weights of 16 bits
    transformers              `generate` of Hugging Face on one static batch, in this environment
    transformers-continuous   the same model under its continuous batching
    vllm                      the real one, from the environment named by --vllm-venv
    vllm-in-process           the same without its engine's own process, to see into it
    llama.cpp                 `llama_decode` in process, from the environment named by --llama-venv
    llama.cpp-float16         the same with matrices of 16 bits

All are asked for float32, for weights and KV cache, unless their name says otherwise. They get the same tensors: a
folder in Hugging Face layout, or, for llama.cpp, the GGUF file that the folder was made from, written once more.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.measuring.child import Child
from common.measuring.recipe import ROOT

from .. import MILESTONE

NUM_THREADS = os.cpu_count() or 1
MILESTONES = {
    "v0_1": "v0_1_single_request",
    "v0_2": "v0_2_block_manager",
    "v0_3": "v0_3_scheduler",
    "v0_4": "v0_4_http",
    "v0_5": MILESTONE,
    "v0_6": "v0_6_prefix_cache",
    "v0_7": "v0_7_speculative",
    "v0_8": "v0_8_visualizer",
    "v0_9": "v0_9_fast",
}
WITH_PREFIX_CACHE = tuple(MILESTONES.values())[5:]  # those of them that have a flag for it
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v0_9-torch": ("v0_9", {"kernels": "torch"}),
    "v0_9-float16": ("v0_9", {"weights_dtype": "float16"}),
}
PEERS = (
    *MILESTONES,
    *VARIANTS,
    "transformers",
    "transformers-continuous",
    "vllm",
    "vllm-in-process",
    "llama.cpp",
    "llama.cpp-float16",
)


@dataclass(frozen=True, slots=True)
class Places:
    """The model's folder, the GGUF it was made from, the environments of the others; and what all are asked for."""

    folder: Path
    gguf: Path | None = None
    vllm_venv: Path | None = None
    llama_venv: Path | None = None
    max_model_len: int | None = None  # so that no engine reserves or prepares for more
    dtype: str = "float32"
    prefix_caching: bool = False  # of those engines that have it


@dataclass(frozen=True, slots=True)
class Start:
    """How one engine is started."""

    kind: str
    arguments: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)


class Engine(Child):
    """An engine in a process of its own, its model loaded.

    Args:
        name: what it is called in errors.
        start: see there.

    Raises:
        ModelError: it did not start; the message has what it said last.
    """

    def __init__(self, name: str, start: Start) -> None:
        # The file's text, not its path: a script's folder comes first on the import path, and ours has a trace.py.
        code = (Path(__file__).parent / "engines.py").read_text()
        cwd = ROOT if start.python == sys.executable else Path(start.python).parent
        super().__init__(name, [start.python, "-c", code], environment=start.environment, cwd=cwd)
        try:
            self.versions: dict[str, str] = self.ask({"kind": start.kind, "arguments": start.arguments})
        except BaseException:
            self.close()
            raise


def machine() -> Start:
    """How the process is started that measures the machine itself (`rates.py`), in this environment."""
    return Start("machine", {"module": f"{__package__}.rates"})


def ours(package: str, **arguments: Any) -> Start:
    """How a milestone is started.

    Args:
        package: its name, the short one of `MILESTONES`, or any package that has an `LLM` like ours.
        arguments: of its `LLM`.

    Raises:
        ModelError: there is no such package.
    """
    package = MILESTONES.get(package, package)
    try:
        is_there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise ModelError(f"There is no engine {package}: choose from {', '.join(PEERS)}.")
    return Start("llm", {"package": package, "arguments": arguments})


def describe(name: str, places: Places, **arguments: Any) -> Start:
    """How one of `PEERS` is started.

    Args:
        name: which; a package's name is as good for ours.
        places: see there.
        arguments: of its `LLM`, for ours and vLLM's; they replace what `places` says.

    Raises:
        ModelError: there is no such engine, or its environment is not given.
    """
    ways: dict[str, Callable[[Places], Start]] = {
        "transformers": lambda places: Start("transformers", {"folder": str(places.folder), "dtype": places.dtype}),
        "transformers-continuous": lambda places: Start(
            "transformers_continuous",
            {"folder": str(places.folder), "dtype": places.dtype, "max_batch_tokens": 512, "num_blocks": 512},
        ),
        "vllm": _vllm,
        "vllm-in-process": _vllm_in_process,
        "llama.cpp": _llama_cpp,
        "llama.cpp-float16": lambda places: _llama_cpp(places, "float16"),
    }
    if name in ways:
        start = ways[name](places)
        # The folder is here, so nobody has to ask the hub; tokenizers' own threads would spin beside the engine's.
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        start = replace(start, environment=offline | start.environment)
        if arguments:
            start.arguments["arguments"] |= arguments
        return start
    package, own = package_and_flags(name, places.prefix_caching)
    return ours(package, **(_llm_arguments(places) | own | arguments))


def package_and_flags(name: str, prefix_caching: bool) -> tuple[str, dict[str, Any]]:
    """Of one of ours: its package, and what its `LLM` is given because of the name and for its prefix cache."""
    name, own = VARIANTS.get(name, (name, {}))
    package = MILESTONES.get(name, name)
    return package, own | ({"enable_prefix_caching": prefix_caching} if package in WITH_PREFIX_CACHE else {})


def _llm_arguments(places: Places) -> dict[str, Any]:
    return {"model": str(places.folder), "dtype": places.dtype, "max_model_len": places.max_model_len}


def _vllm(places: Places) -> Start:
    python = _python(places.vllm_venv, "vllm", "--vllm-venv")
    arguments = _llm_arguments(places) | {"enable_prefix_caching": places.prefix_caching}
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
        "OMP_NUM_THREADS": str(NUM_THREADS),
    }
    return Start("llm", {"package": "vllm", "arguments": arguments}, python, environment)


def _vllm_in_process(places: Places) -> Start:
    start = _vllm(places)
    return replace(start, environment=start.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def _llama_cpp(places: Places, matrices: str = "float32") -> Start:
    python = _python(places.llama_venv, "llama.cpp", "--llama-venv")
    if places.dtype != "float32":
        raise ModelError(f"llama.cpp is compared in float32, not in {places.dtype}: leave it, or --dtype, out.")
    if places.gguf is None:
        raise ModelError("llama.cpp needs a .gguf file: give one as --model, or leave the default model.")
    gguf = unquantised_gguf(places.gguf, places.folder, matrices)
    arguments = {"gguf": str(gguf), "num_threads": NUM_THREADS}
    return Start("llama_cpp", arguments, python)


def _python(venv: Path | None, name: str, flag: str) -> str:
    if venv is None:
        raise ModelError(
            f"{name} needs a virtual environment of its own: name it with {flag} (make bench-vllm makes one)."
        )
    python = venv.absolute() / "bin" / "python"
    if not python.exists():
        raise ModelError(f"{flag} {venv} has no bin/python: make bench-vllm makes one.")
    return str(python)


def unquantised_gguf(source: Path, folder: Path, matrices: str) -> Path:
    """The same file with every matrix in float32 or float16, all else in float32, beside the converted `folder`.

    Made once.

    Raises:
        ModelError: it cannot be written.
    """
    target = folder.with_name(f"{folder.name}.f{matrices.removeprefix('float')}.gguf")
    if target.exists():
        return target
    import gguf
    from tqdm import tqdm

    partial = target.with_suffix(f".{os.getpid()}.partial")
    reader = gguf.GGUFReader(source)
    try:
        writer = gguf.GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
        for key, entry in reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue  # which the writer writes itself
            if key == "general.file_type":
                kinds = {"float32": gguf.LlamaFileType.ALL_F32, "float16": gguf.LlamaFileType.MOSTLY_F16}
                writer.add_file_type(kinds[matrices])
                continue
            sub_type = entry.types[-1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, entry.contents(), entry.types[0], sub_type=sub_type)
        for tensor in tqdm(reader.tensors, desc=f"Writing {matrices} GGUF", unit="tensor", disable=None, delay=1.0):
            rows = gguf.dequantize(tensor.data, tensor.tensor_type)
            dtype = matrices if len(tensor.shape) > 1 else "float32"
            writer.add_tensor(tensor.name, rows.reshape(tensor.shape[::-1]).astype(dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        shutil.move(partial, target)
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written ({error}): llama.cpp needs the model in {matrices} there."
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def sha256(file: Path) -> str:
    """Of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
