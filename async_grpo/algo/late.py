"""torch, imported where a formula first runs.

Runs in: any process. A formula stands in one file with its traits and its options, which settings
read in processes that never import torch. Hides the import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Late:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Late()

__all__ = ["torch"]
