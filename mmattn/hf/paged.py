"""Continuous batching of transformers (`generate_batch`, `transformers serve`) with its paged cache.

transformers keeps the layers in groups, full and sliding, and runs many requests as one packed row. A step either hands over
indices, by which its cache writes new keys and gathers all of a request, or a block table, when every request decodes one
token and all layers are full. transformers 5.23 knows by name which attentions can do that; `allow` adds one.
"""

from __future__ import annotations

import functools
import logging
import threading
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..attention import attention
from ..dispatch import UnsupportedError
from ..engines import Step, layer_mask

log = logging.getLogger(__name__)

_PACKAGE = "transformers.generation.continuous_batching"
_names: set[str] = set()
"""`attn_implementation`s that continuous batching takes as it takes FlashAttention."""
_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""`cu_seq_lens_q` of a step, which all its layers share -> (version, group of layers -> `Step`)."""
_state = threading.local()


def running() -> bool:
    """Whether this thread runs a step of continuous batching, which needs no masks: requests are told apart by lengths."""
    return getattr(_state, "running", False)


def allow(name: str) -> None:
    """Lets continuous batching take models with `attn_implementation=name`.

    In a transformers without it, or built otherwise, nothing is changed: continuous batching then refuses the name itself.
    """
    _names.add(name)
    try:
        api, setup, cache, runner = (
            import_module(f"{_PACKAGE}.{module}")
            for module in ("continuous_api", "initialization", "cache", "model_runner")
        )
        _patch_names((api, setup, cache))
        _patch_decode(setup)
        _patch_runner(runner.ModelRunner)
    except (ImportError, AttributeError) as error:
        _names.discard(name)
        log.info("continuous batching of this transformers cannot take %r: %s", name, error)


def _patch_names(modules: tuple[Any, ...]) -> None:
    """No masks, and none of their memory, for our names: as for FlashAttention."""
    for module in modules:
        theirs = module.is_flash_attention_requested
        if hasattr(theirs, "mmattn"):
            continue

        @functools.wraps(theirs)
        def requested(
            config: Any = None,
            requested_attention_implementation: Any = None,
            version: Any = None,
            theirs: Any = theirs,
        ) -> Any:
            name = requested_attention_implementation if config is None else config._attn_implementation
            if name in _names and version is None:
                return True
            return theirs(config, requested_attention_implementation, version)

        requested.mmattn = True  # type: ignore[attr-defined]
        module.is_flash_attention_requested = requested


def _patch_decode(setup: Any) -> None:
    """Block tables when every request decodes: transformers asks for the kernels of FlashAttention 2 or 3."""
    theirs = setup.ensure_decode_fast_path_is_available
    if hasattr(theirs, "mmattn"):
        return

    @functools.wraps(theirs)
    def ensure(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation not in _names:
            return theirs(config, cb_config, user_requested)
        groups = setup.group_layers_by_attn_type(config)
        if not all(setup.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in groups):
            cb_config.max_blocks_per_request = 0
        return None

    ensure.mmattn = True  # type: ignore[attr-defined]
    setup.ensure_decode_fast_path_is_available = ensure


def _patch_runner(cls: Any) -> None:
    theirs = cls.compute_batch
    if hasattr(theirs, "mmattn"):
        return

    @functools.wraps(theirs)
    def compute_batch(self: Any, model: Any, batch_data: Any) -> Any:
        _state.running = model.config._attn_implementation in _names
        try:
            return theirs(self, model, batch_data)
        finally:
            _state.running = False

    compute_batch.mmattn = True  # type: ignore[attr-defined]
    cls.compute_batch = compute_batch


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer of a step. query `[1, Hq, T, D]`, key and value `[1, Hkv, T, ...]`: the new tokens of all requests.

    Raises:
        UnsupportedError: a mask or a bias came beside the lengths.
    """
    layer_idx: Any = module.layer_idx
    given = [name for name in ("position_bias", "indices", "block_indices") if kwargs.get(name) is not None]
    given += ["attention_mask"] if attention_mask is not None else []
    if given or dropout:
        raise UnsupportedError(
            f"layer {layer_idx}: continuous batching with mmattn takes no {' or '.join(given or ['dropout'])}"
        )
    cache = kwargs["cache"]
    group = cache.layer_to_allocator[layer_idx]
    window = getattr(group, "sliding_window", None)
    block_table = kwargs.get("block_table")
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer_idx, kwargs=kwargs)
    options: dict[str, Any] = {}
    if block_table is None:
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    else:
        k, v = kwargs["k_cache"], kwargs["v_cache"]
        options["page_table"] = kwargs["block_table"]
    step = _step(group.index, query.shape[2], k, kwargs, paged=block_table is not None)
    if step.page_table is not None:
        _append(key[0].transpose(0, 1), value[0].transpose(0, 1), k, v, step)
    out = attention(
        query[0].transpose(0, 1), k, v, step.plan(layer_mask(sliding_window=window)), scale=scaling, softcap=softcap,
        sinks=s_aux, backend=backend, **options,
    )  # fmt: skip
    return out[None], None


def _step(group: int, rows: int, k: Tensor, kwargs: dict[str, Any], *, paged: bool) -> Step:
    """What the layers of a group share in this step; `cu_seq_lens_k` and `block_table` are already the group's."""
    starts, ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    version = starts._version, ends._version
    entry = _steps.get(starts)
    if entry is None or entry[0] != version:
        entry = _steps[starts] = version, {}
    steps = entry[1]
    if group not in steps:
        keys: dict[str, Any]
        if paged:
            table = kwargs["block_table"]
            keys = dict(seqused_k=ends[1:] - ends[:-1], page_table=table, max_seqlen_k=table.shape[1] * k.shape[1])
        else:
            keys = dict(cu_seqlens_k=ends, max_seqlen_k=int(kwargs["max_length_k"]))
        steps[group] = Step(starts.to(torch.int32), rows, int(kwargs["max_length_q"]), **keys)
    step: Step = steps[group]
    return step


def _append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, step: Step) -> None:
    """Writes the one new token of every request to its place, the last of its keys.

    Requests that only pad the batch have no keys; theirs goes to page 0, which the cache keeps for that.
    """
    assert step.seqused_k is not None and step.page_table is not None
    size = k_pages.shape[1]
    last = (step.seqused_k - 1).clamp(min=0).long()
    page = step.page_table.gather(1, (last // size)[:, None])[:, 0].long()
    page = torch.where(step.seqused_k > 0, page, 0)
    k_pages[page, last % size] = key[: len(page)]
    v_pages[page, last % size] = value[: len(page)]
