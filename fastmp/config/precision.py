"""FP8 recipe: the numbers in which linear layers and experts multiply. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FP8_BLOCKS", "FP8_GRADS", "PRECISIONS", "Fp8Recipe", "row_bytes"]

PRECISIONS = ("dtype", "fp8")
FP8_BLOCKS = (128, 32)
FP8_GRADS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Fp8Recipe:
    """Blocks and formats of FP8 GEMMs; activations and weights are always e4m3.

    block: elements that share a scale, 1 x block of an activation and block x block of a weight: 128 is
        Hopper's recipe [blockwise], 32 Blackwell's [MXFP8].
    grad: format of upstream gradients, "e4m3" (more precise) or "e5m2" (wider range).
    """

    block: int = 128
    grad: str = "e4m3"

    def __post_init__(self) -> None:
        for name, value, choices in (("block", self.block, FP8_BLOCKS), ("grad", self.grad, FP8_GRADS)):
            if value not in choices:
                listed = " or ".join(map(repr, choices))
                raise ValueError(f"Fp8Recipe: expected {name} {listed}, got {value!r}")

    def misfit(self, sizes: dict[str, int]) -> str | None:
        """Name the sizes that blocks do not divide, in a phrase; None if all fit."""
        wrong = [f"{name} {size}" for name, size in sizes.items() if size % self.block]
        if not wrong:
            return None
        return f"FP8 blocks of {self.block} do not divide {', '.join(wrong)}"

    def weight_bytes(self, elements: int) -> int:
        """Return the bytes of both copies of a weight and of their scales."""
        return 2 * elements + self.scale_bytes(elements // self.block**2)

    def scale_bytes(self, blocks: int) -> int:
        """Return the bytes of the scales of `blocks`."""
        return blocks * (4 if self.block == 128 else 1)


def row_bytes(elements: int) -> int:
    """Return the bytes of quantised rows: four of a scale for 128 elements are as many as one for 32."""
    return elements + elements // 32
