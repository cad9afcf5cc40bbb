"""Writing new keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor


def write_pages(
    key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """Writes row `i` of `key` `[T, Hkv, D]` and `value` to slot `slots[i]` of pages `[P, page, Hkv, D]`, in any layout.

    A slot is `page * page size + place in the page`; negative ones are skipped. Rows past the end of `slots` are not
    written. Pages of another dtype get the values divided by the scales, cut to what the dtype holds. With torch
    operators; which slots are negative is read on the host, so on a GPU use a kernel.
    """
    size = k_pages.shape[1]
    wanted = slots >= 0
    slots = slots[wanted]
    for x, pages, scale in ((key, k_pages, k_scale), (value, v_pages, v_scale)):
        rows = x[: wanted.numel()][wanted]
        if pages.dtype != rows.dtype:
            most = torch.finfo(pages.dtype).max
            rows = (rows.float() / scale).clamp(-most, most).to(pages.dtype)
            if pages.element_size() == 1:  # float8 has no index_put on every device
                rows, pages = rows.view(torch.uint8), pages.view(torch.uint8)
        pages[slots // size, slots % size] = rows
