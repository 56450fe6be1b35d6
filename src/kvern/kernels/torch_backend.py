"""The torch backend: the reference operations over torch tensors (extra ``torch``).

On a CPU the tensors share memory with the engine's numpy arrays, so the slab stays what it is: raw bytes
with a dtype tag. On another device activations and the pages a step needs are copied there and back: right,
not fast; it exists for comparison.
"""

from __future__ import annotations

import warnings
from typing import Any

import array_api_compat.torch as array_torch
import numpy as np
import torch

from kvern.kernels.reference import ReferenceBackend


class TorchBackend(ReferenceBackend):
    """`ReferenceBackend` with torch's arithmetic."""

    name = "torch"
    xp: Any = array_torch

    def __init__(self, num_threads: int | None = None, device: str = "cpu") -> None:
        """Set torch's thread count for this process when ``num_threads`` is given."""
        super().__init__(num_threads or torch.get_num_threads())
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.device = torch.device(device)
        self.kernel_path = f"torch-{self.device.type}"

    def numerics_tag(self, weights_format: str) -> str:
        """See `Backend.numerics_tag`; torch's version decides bits too."""
        return f"{super().numerics_tag(weights_format)}/torch-{torch.__version__}"

    def _array(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        with warnings.catch_warnings():  # a memory-mapped weight is read-only, and is only read
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def _numpy(self, x: Any) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = x.detach().cpu().numpy()
        return array
