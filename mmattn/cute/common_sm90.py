"""What the forward and the backward kernel on row intervals share: tables as FA4's block lists, one tile per CTA,
interval bits, and rows that are cleared."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from flash_attn.cute.mask import r2p_bitmask_above, r2p_bitmask_below
from flash_attn.cute.tile_scheduler import WorkTileInfo


def rebuilt(tables: Any, values: list[Any]) -> Any:
    """`tables`, a named tuple of tensors and None, with other values: what the DSL asks of an argument."""
    fresh = iter(values)
    return type(tables)(*[None if field is None else next(fresh) for field in tables])


class DenseMainLoop:
    """FA4 derives `use_block_sparsity` from its block list argument, which carries tables here: keep the dense main loop."""

    @property
    def use_block_sparsity(self) -> bool:
        return False

    @use_block_sparsity.setter
    def use_block_sparsity(self, given: bool) -> None:
        pass


class OneTile:
    """Tile scheduler of a CTA that has already decoded its only tile."""

    def __init__(self, coord: tuple, pending: bool = True):
        self._coord, self._pending = coord, pending

    def get_current_work(self, *, loc=None, ip=None) -> WorkTileInfo:
        return WorkTileInfo(self._coord, self._pending)

    def initial_work_tile_info(self, *, loc=None, ip=None) -> WorkTileInfo:
        return self.get_current_work()

    def prefetch_next_work(self, *, loc=None, ip=None) -> None:
        pass

    def advance_to_next_work(self, *, loc=None, ip=None) -> None:
        self._pending = False

    def __extract_mlir_values__(self):
        return cutlass.extract_mlir_values(self._coord)

    def __new_from_mlir_values__(self, values):
        return OneTile(cutlass.new_from_mlir_values(self._coord, values), self._pending)


def softcap(*args, **kwargs):
    """Tells FA4 that scores are modified; the work is done in the kernels' `apply_score_mod`."""
    raise NotImplementedError


def keep_bits(lo: Int32, hi: Int32, chunk: int) -> cutlass.Uint32:
    """Bits of the 32 elements of `chunk` that lie in [lo, hi)."""
    return r2p_bitmask_below(hi, chunk) & r2p_bitmask_above(lo, chunk)


@cute.jit
def clear_smem_rows(tile: cute.Tensor, begin: Int32, end: Int32, thread: Int32, threads: cutlass.Constexpr[int]):
    """Zeroes rows [begin, end) of a (row, element) tile in shared memory; fence and barrier are the caller's."""
    # A swizzle permutes the bytes of a row within the row, so whole rows may be cleared without it.
    words = cute.recast_tensor(tile, Int64)
    per_row = cute.size(words, mode=[1])
    for i in cutlass.range(thread, (end - begin) * per_row, threads, unroll=1):
        words[begin + i // per_row, i % per_row] = Int64(0)


@cute.jit
def clear_rows_behind(x: cute.Tensor, cu_seqlens: cute.Tensor, thread: Int32, threads: cutlass.Constexpr[int]):
    """Zeroes the rows of packed `x` behind the last sequence (CUDA graphs pad; as a rule there are none)."""
    rows, heads, dim = x.shape
    row = cu_seqlens[cute.size(cu_seqlens) - 1] + cute.arch.block_idx()[0]
    while row < rows:
        for i in cutlass.range(thread, heads * dim, threads, unroll=1):
            x[row, i // dim, i % dim] = x.element_type(0.0)
        row += cute.arch.grid_dim()[0]
