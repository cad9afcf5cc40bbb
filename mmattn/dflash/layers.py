"""Which mask every layer of a drafter has, by the fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..mask import Mask
from .fields import ConfigLike, count, flag, nested, read_fields

SLIDING, FULL = "sliding_attention", "full_attention"
MAX_WINDOW_LAYERS = 28
"""Of a config that does not say: that of transformers' `Qwen3Config`, as which engines read these files."""


def resolve_layers(config: ConfigLike, *, sliding_causal: bool | None = None) -> list[Mask]:
    """The mask of every draft layer, as `(window, causal)`; a window of W keeps W keys, self included.

    * causal, of a layer with a window: `sliding_causal` if it is set, here or in the config. Of every layer: `is_causal`,
      else `dflash_config.causal`. Of a layer with a window: not `sliding_window_non_causal`. Else whether the layer
      is a `sliding_attention` layer of `layer_types`.
    * sliding: without `layer_types`, or when `use_swa` is set and no layer is sliding, `use_swa` for every layer;
      else whether the layer is a `sliding_attention` layer. Where `layer_types` is absent it is derived from
      `sliding_windows` (a window per layer, null = full), else from `sliding_window_pattern` (every so many layers
      a full one), else from `use_sliding_window` and `max_window_layers` (that many full layers first).
    * W: `sliding_windows[i]`, else `dflash_config.swa_window_size`, else `sliding_window` (which
      `use_sliding_window: false` switches off).

    | `layer_types` | `dflash_config.use_swa` | causal unset                   | causal = True     | causal = False    |
    |---------------|-------------------------|--------------------------------|-------------------|-------------------|
    | absent        | false / absent          | (None, F)                      | (None, T)         | (None, F)         |
    | absent        | true                    | (W, F)                         | (W, T)            | (W, F)            |
    | all full      | false / absent          | (None, F)                      | (None, T)         | (None, F)         |
    | all full      | true                    | (W, F)                         | (W, T)            | (W, F)            |
    | all sliding   | any (ignored)           | (W, T)                         | (W, T)            | (W, F)            |
    | mixed         | any (ignored)           | sliding (W, T), full (None, F) | (W, T), (None, T) | (W, F), (None, F) |
    | a sliding layer, no W configured        | `ValueError` that names the layer                                      |

    On rows that are not causal a window W is symmetric, `|q - k| < W`: by this static flag, or by the `causal` tensor
    of `attention()` and `Drafter.draft()`, which overrides it per sequence and is read on the device only.

    The table is vLLM's (0.33, executed over a grid of configs). The column "causal unset" is where implementations part:
    vLLM and SGLang (`srt/models/dflash.py` at 003b23d) make sliding layers causal, the modelling code of the DFlash
    authors (z-lab/dflash at 44947fb, `dflash/model.py`) makes no layer causal and passes no mask, so that under its
    sdpa and eager attention even the window has no effect. `sliding_causal=False` gives layers with a window their
    causality by that code. Set `is_causal` when you train.

    Args:
        config: a mapping, a path of a JSON file or checkpoint directory, or a transformers config.
        sliding_causal: causality of layers with a window, whatever the config says; None = as the config says.

    Raises:
        ValueError: a sliding layer without a window, an unknown layer type, or a wrong number of them.
    """
    fields = read_fields(config)
    dflash = nested(fields)
    layers = _count(fields)
    listed = _listed(fields, layers)
    use_swa = bool(flag("dflash_config.use_swa", dflash.get("use_swa")))
    sliding = [use_swa] * layers if use_swa and not any(listed) else listed

    causal = flag("is_causal", fields.get("is_causal"))
    if causal is None:
        causal = flag("dflash_config.causal", dflash.get("causal"))
    windowed = flag("sliding_causal", fields.get("sliding_causal")) if sliding_causal is None else sliding_causal
    if windowed is None and causal is None:
        for where, held in (("dflash_config.", dflash), ("", fields)):
            away = flag(f"{where}sliding_window_non_causal", held.get("sliding_window_non_causal"))
            if away is not None:
                windowed = not away
                break
    masks = []
    for i in range(layers):
        layer_causal = listed[i] if causal is None else causal
        if sliding[i]:
            window = _window(fields, i, "layer_types" if listed[i] else "dflash_config.use_swa")
            masks.append(Mask.sliding_window(window, causal=layer_causal if windowed is None else windowed))
        else:
            masks.append(Mask(causal=layer_causal))
    return masks


def _count(fields: Mapping[str, Any]) -> int:
    layers = fields.get("num_hidden_layers")
    for name in ("layer_types", "sliding_windows"):
        listed = fields.get(name)
        if listed is None:
            continue
        if not isinstance(listed, (list, tuple)):
            raise ValueError(f"{name} must be a list with one entry per layer, got {listed!r}")
        if layers is None:
            layers = len(listed)
        if len(listed) != layers:
            raise ValueError(f"{name} has {len(listed)} entries, but num_hidden_layers is {layers}")
    if layers is None:
        raise ValueError("the config has neither num_hidden_layers nor layer_types: how many layers are there?")
    return count("num_hidden_layers", layers)


def _listed(fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer is a sliding one by `layer_types`, given or derived."""
    layer_types, windows = fields.get("layer_types"), fields.get("sliding_windows")
    if layer_types is not None:
        for i, kind in enumerate(layer_types):
            if kind not in (SLIDING, FULL):
                raise ValueError(f"layer_types[{i}] must be {SLIDING!r} or {FULL!r}, got {kind!r}")
            if windows is not None and kind == FULL and windows[i] is not None:
                raise ValueError(f"layer_types[{i}] is {FULL!r}, but sliding_windows[{i}] is {windows[i]!r}")
        return [kind == SLIDING for kind in layer_types]
    if windows is not None:
        return [window is not None for window in windows]
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if fields.get(name) is not None:
            every = count(name, fields[name])
            return [bool((i + 1) % every) for i in range(layers)]
    if flag("use_sliding_window", fields.get("use_sliding_window")) and fields.get("sliding_window") is not None:
        name = "max_window_layers"
        first = MAX_WINDOW_LAYERS if fields.get(name) is None else count(name, fields[name], 0)
        return [i >= first for i in range(layers)]
    return [False] * layers


def _window(fields: Mapping[str, Any], i: int, by: str) -> int:
    windows = fields.get("sliding_windows")
    if windows is not None:
        return count(f"sliding_windows[{i}]", windows[i])
    switched_off = fields.get("use_sliding_window") is False
    window = nested(fields).get("swa_window_size")
    if window is None and not switched_off:
        window = fields.get("sliding_window")
    if window is None:
        raise ValueError(
            f"layer {i} is a {SLIDING} layer (by {by}), but none of sliding_windows, dflash_config.swa_window_size and "
            "sliding_window is set" + (", and use_sliding_window is false" if switched_off else "")
        )
    return count("the sliding window", window)
