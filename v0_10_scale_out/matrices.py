"""A weight matrix, in the order in which a product reads it: ours, oneDNN's, or both where each is faster at times."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common import llama

from .kernels.bindings import Kernels


@dataclass(frozen=True, slots=True)
class Matrix:
    """`[width, depth]`; our product computes steps of at most `most_rows` rows, oneDNN's those of more.

    Only what is used is kept: without `panels` or without `reordered`, the other one computes all.
    """

    kernels: Kernels
    width: int
    bias: Tensor | None
    panels: Tensor | None  # kernels/product.c
    reordered: Tensor | None  # common.llama.pack
    most_rows: float

    @classmethod
    def packed(
        cls, kernels: Kernels, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, most_rows: float
    ) -> "Matrix":
        """A plain matrix, packed; `dtype` is what our product stores, `most_rows` may be none (0) or all (infinity)."""
        panels = kernels.pack(weight, dtype) if most_rows else None
        reordered = llama.pack(weight) if most_rows != float("inf") else None
        return cls(kernels, len(weight), bias, panels, reordered, most_rows)

    def product(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, or that added to `add_to` in place: `[T, depth] -> [T, width]`."""
        if self.panels is not None and x.shape[0] <= self.most_rows:
            return self.kernels.product(x, self.panels, self.width, self.bias, add_to)
        assert self.reordered is not None
        y = llama.linear(x, self.reordered, self.bias)  # by that name, so that a profiler finds it
        return y if add_to is None else add_to.add_(y)
