"""The kernels as functions of tensors. C checks nothing, so types, shapes and strides are checked here.

What the numbers in block tables and items say is up to the caller.

All take and return float32 tensors on the CPU. A row of a tensor may be longer than what is used of it (its stride is
passed on), its last dimension lies side by side.
"""

import ctypes
import functools
import logging
import re
from ctypes import c_float, c_int, c_long, c_void_p
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from .build import BuildError, library

logger = logging.getLogger(__name__)

STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # tile.h has the same order
_PROTOTYPES: dict[str, list[type]] = {
    "product": [c_void_p, c_long, c_long, c_void_p, c_int, c_void_p, c_void_p, c_long, c_int],
    "rms_norm": [c_void_p, c_long, c_long, c_void_p, c_float, c_void_p],
    "rotate": [c_void_p, c_long, c_long, c_long, c_long, c_void_p, c_void_p],
    "silu_mul": [c_void_p, c_long, c_long, c_void_p],
    "attention": [c_void_p, c_long, *[c_void_p] * 4, *[c_long] * 6, c_void_p],
    "store": [c_void_p, c_long, c_void_p, c_long, *[c_void_p] * 2, c_long, *[c_void_p] * 2, *[c_long] * 3],
    "use_threads": [c_int],
}
WRONG = "a tensor is not what the kernel takes"
_SHORT = ("rms_norm", "rotate", "silu_mul", "store", "use_threads")


@functools.cache
def load() -> "Kernels | str":
    """The kernels, or in a sentence why there are none here; built at the first call, and asked for once a process."""
    try:
        return Kernels(library(_openmp()))
    except BuildError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # such as a cache on a disk from which nothing may be run
        return f"the compiled kernels cannot be loaded ({error})"


def _openmp() -> str | None:
    """The OpenMP runtime that PyTorch has brought into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return found and found[0]


class Kernels:
    """The functions of one library."""

    def __init__(self, file: Path) -> None:
        # A call through PyDLL keeps Python's lock. To give it up and ask for it again takes as long as a short kernel,
        # and whoever took it meanwhile, the server's event loop, may keep it for 5 ms.
        keeping, giving_up = ctypes.PyDLL(str(file)), ctypes.CDLL(str(file))
        functions = {name: getattr(keeping if name in _SHORT else giving_up, name) for name in _PROTOTYPES}
        for name, function in functions.items():
            function.argtypes, function.restype = _PROTOTYPES[name], c_int if name == "attention" else None
        self._c = SimpleNamespace(**functions)
        self.name = file.name
        self.panel_width: int = keeping.panel_width()

    def use_threads(self, num_threads: int) -> None:
        """How many threads the kernels take that are called from this thread of Python."""
        self._c.use_threads(num_threads)

    def pack(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A matrix `[width, depth]` in panels (product.c), `[panels, depth, panel_width]`, padded with zeros."""
        width, depth = weight.shape
        num_panels = -(-width // self.panel_width)
        packed = torch.zeros(num_panels, depth, self.panel_width, dtype=dtype, device="cpu")
        whole = width // self.panel_width
        packed[:whole] = weight[: whole * self.panel_width].view(whole, self.panel_width, depth).transpose(1, 2)
        if whole < num_panels:
            packed[whole, :, : width % self.panel_width] = weight[whole * self.panel_width :].T
        return packed

    def product(
        self, x: Tensor, packed: Tensor, width: int, bias: Tensor | None = None, add_to: Tensor | None = None
    ) -> Tensor:
        """`x @ weight.T + bias`, or that added to `add_to` in place: `[T, depth] -> [T, width]`."""
        num_rows, depth = x.shape
        y = _empty(num_rows, width) if add_to is None else add_to
        if not (
            x.dtype == y.dtype == torch.float32
            and x.is_contiguous()
            and y.is_contiguous()
            and y.shape == (num_rows, width)
            and packed.shape == (-(-width // self.panel_width), depth, self.panel_width)
            and packed.is_contiguous()
            and (bias is None or (bias.dtype == torch.float32 and bias.shape == (width,) and bias.is_contiguous()))
        ):
            raise TypeError(WRONG)
        self._c.product(
            *(x.data_ptr(), num_rows, depth, packed.data_ptr(), STORED[packed.dtype]),
            *(None if bias is None else bias.data_ptr(), y.data_ptr(), width, add_to is not None),
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `common.llama.rms_norm`: `[T, width]` in and out."""
        if not (
            x.dtype == weight.dtype == torch.float32
            and x.is_contiguous()
            and weight.is_contiguous()
            and x.shape[1:] == weight.shape
        ):
            raise TypeError(WRONG)
        out = _empty(*x.shape)
        self._c.rms_norm(x.data_ptr(), *x.shape, weight.data_ptr(), eps, out.data_ptr())
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """`common.llama.apply_rope`, in place: `x` `[T, heads, head_dim]`, `cos` and `sin` `[T, head_dim / 2]`."""
        num_rows, num_heads, head_dim = x.shape
        if not (
            x.dtype == cos.dtype == sin.dtype == torch.float32
            and (x.stride(1), x.stride(2)) == (head_dim, 1)
            and cos.shape == sin.shape == (num_rows, head_dim // 2)
            and cos.is_contiguous()
            and sin.is_contiguous()
        ):
            raise TypeError(WRONG)
        self._c.rotate(x.data_ptr(), num_rows, x.stride(0), num_heads, head_dim, cos.data_ptr(), sin.data_ptr())

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up`: `[T, 2 * width] -> [T, width]`, the gate first."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if not (gate_up.is_contiguous() and gate_up.dtype == torch.float32 and gate_up.shape[1] == 2 * width):
            raise TypeError(WRONG)
        out = _empty(num_rows, width)
        self._c.silu_mul(gate_up.data_ptr(), num_rows, width, out.data_ptr())
        return out

    def store(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, items: Tensor, block_size: int
    ) -> None:
        """Put `k` and `v`, `[T, num_kv_heads, head_dim]`, into the requests' blocks; for the others see `attention`."""
        num_heads, head_dim = k.shape[1:]
        if not (
            k.dtype == v.dtype == torch.float32
            and k.shape == v.shape
            and k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
            and _are_places(tables, items)
            and _is_pool(keys, values, num_heads, block_size * head_dim)
        ):
            raise TypeError(WRONG)
        self._c.store(
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), tables.data_ptr(), items.data_ptr(), len(items)),
            *(keys.data_ptr(), values.data_ptr(), num_heads, head_dim, block_size),
        )

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        items: Tensor,
        most_queries: int,
        num_kv_heads: int,
        block_size: int,
    ) -> Tensor:
        """Causal attention over blocks in place.

        Args:
            q: `[T, num_heads, head_dim]`.
            keys: one layer's, `[num_blocks, num_kv_heads, head_dim * block_size]`, transposed within a block.
            values: one layer's, `[num_blocks, num_kv_heads, block_size * head_dim]`.
            tables: int32: the requests' blocks, one table after the other.
            items: `[I, 4]`, int32: runs of queries of one request. Where its table begins, the first query's token, how
                many there are, and the first one's position.
            most_queries: of an item; no item has more.
            num_kv_heads: which share the query heads evenly.
            block_size: tokens in a block.

        Returns:
            `[T, num_heads, head_dim]`.
        """
        num_heads, head_dim = q.shape[1:]
        if not (
            q.dtype == torch.float32
            and q.stride()[1:] == (head_dim, 1)
            and _are_places(tables, items)
            and num_heads % num_kv_heads == 0
            and _is_pool(keys, values, num_kv_heads, block_size * head_dim)
        ):
            raise TypeError(WRONG)
        out = _empty(*q.shape)
        no_memory = self._c.attention(
            *(q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), tables.data_ptr()),
            *(items.data_ptr(), len(items), most_queries, num_heads, num_kv_heads, head_dim, block_size),
            out.data_ptr(),
        )
        if no_memory:
            raise MemoryError("There is no memory for the attention of a step.")
        return out


def _empty(*shape: int) -> Tensor:
    """What C writes into, whatever PyTorch's defaults are in this process."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _are_places(tables: Tensor, items: Tensor) -> bool:
    """Whether these have the form of a step's block tables and items."""
    return (
        tables.dtype == items.dtype == torch.int32
        and tables.is_contiguous()
        and items.is_contiguous()
        and items.shape[1:] == (4,)
    )


def _is_pool(keys: Tensor, values: Tensor, num_kv_heads: int, floats_per_head: int) -> bool:
    """Whether these are one layer's keys and values, `[num_blocks, num_kv_heads, floats_per_head]`."""
    return (
        keys.dtype == values.dtype == torch.float32
        and keys.shape == values.shape
        and keys.shape[1:] == (num_kv_heads, floats_per_head)
        and keys.is_contiguous()
        and values.is_contiguous()
    )
