"""Files of a drafter checkpoint: tensors, the mask embedding, and sinks under tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MASK_EMBEDDING = ("mask_embedding.pt", "mask_embedding.safetensors")
INDEX = "model.safetensors.index.json"


def load_mask_embedding(
    path: str | Path,
    *,
    mask_token_id: int | None = None,
    hidden_size: int | None = None,
    vocabulary: Tensor | None = None,
) -> Tensor | None:
    """The learnt embedding of the mask token, `[hidden_size]`.

    Args:
        path: `mask_embedding.pt` (read with `weights_only=True`) or `.safetensors`, or the checkpoint directory that
            may hold one. The file holds a tensor `[hidden]` or `[1, hidden]`, or it under the name `embedding`, perhaps
            with its `mask_token_id` (of a safetensors file: a tensor, or in the metadata).
        mask_token_id: the id in the config. A file that says another one is an error.
        hidden_size: the drafter's hidden size. A file of another size is an error.
        vocabulary: `[vocabulary, hidden]`, the embedding whose row `mask_token_id` is used where there is no file.

    Returns:
        The embedding, or None if there is neither a file nor a vocabulary.

    Raises:
        ValueError: wrong shape, mismatched id (both values are named), or not a mask embedding.
        FileNotFoundError: the directory does not exist.
    """
    file = mask_embedding_file(Path(path))
    if file is None:
        if vocabulary is None:
            return None
        if mask_token_id is None:
            raise ValueError(
                f"{path} holds no mask embedding: mask_token_id is needed to take its row of the vocabulary"
            )
        if not 0 <= mask_token_id < vocabulary.shape[0]:
            raise ValueError(
                f"there is no mask embedding in {path}, and mask_token_id {mask_token_id} is outside the vocabulary of "
                f"{vocabulary.shape[0]}"
            )
        embedding, where = vocabulary[mask_token_id], f"row {mask_token_id} of the vocabulary"
    else:
        embedding, held_id = _read_mask_embedding(file)
        where = str(file)
        if held_id is not None and mask_token_id is not None and held_id != mask_token_id:
            raise ValueError(f"{file} is for mask_token_id {held_id}, but the config says {mask_token_id}")
    size = embedding.shape[-1] if hidden_size is None and embedding.dim() else hidden_size
    if tuple(embedding.shape) not in ((size,), (1, size)) or not embedding.dtype.is_floating_point:
        raise ValueError(
            f"the mask embedding must be a floating-point tensor [{'hidden_size' if size is None else size}], "
            f"but {where} has {embedding.dtype} {list(embedding.shape)}"
        )
    return embedding.reshape(-1)


def mask_embedding_file(path: Path) -> Path | None:
    """The file of a mask embedding: `path` itself, or the one in the directory `path`; None where there is none."""
    if path.suffix in (".pt", ".safetensors"):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"no such directory: {path.parent}")
        return path if path.exists() else None
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    found = [path / name for name in MASK_EMBEDDING if (path / name).exists()]
    if len(found) > 1:
        raise ValueError(f"both {found[0]} and {found[1]} exist; remove the one that is not meant")
    return found[0] if found else None


def _read_mask_embedding(file: Path) -> tuple[Tensor, int | None]:
    held: Any
    if file.suffix == ".safetensors":
        with _safetensors().safe_open(file, framework="pt") as reader:
            held = {name: reader.get_tensor(name) for name in reader.keys()}
            metadata = reader.metadata() or {}
        if "mask_token_id" in metadata:
            held.setdefault("mask_token_id", int(metadata["mask_token_id"]))
    else:
        held = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(held, Tensor):
        return held, None
    if not isinstance(held, dict) or not isinstance(held.get("embedding"), Tensor):
        names = sorted(map(str, held)) if isinstance(held, dict) else type(held).__name__
        raise ValueError(f"{file} must hold a tensor, or one named 'embedding'; it holds {names}")
    held_id = held.get("mask_token_id")
    if isinstance(held_id, Tensor):
        if held_id.numel() != 1:
            raise ValueError(f"mask_token_id in {file} must be one integer, got a tensor {list(held_id.shape)}")
        held_id = held_id.item()
    if held_id is not None and not isinstance(held_id, int):
        raise ValueError(f"mask_token_id in {file} must be an integer, got {held_id!r}")
    return held["embedding"], held_id


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "reading .safetensors needs safetensors: pip install 'mmattn[hf]'", name="safetensors"
        ) from None
    return safetensors


def shard_sinks(sinks: Tensor, rank: int, world: int) -> Tensor:
    """The sinks of the query heads that tensor-parallel `rank` of `world` holds: `[heads]` -> `[heads / world]`.

    Query heads are split into `world` equal runs in order. `-inf` (no sink) is kept as it is: it adds nothing to the
    softmax denominator and never makes NaN. Raises `ValueError` where the heads do not divide.
    """
    if sinks.dim() != 1:
        raise ValueError(f"sinks must be [heads], got {list(sinks.shape)}")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..world-1, got rank {rank} of world {world}")
    heads = sinks.shape[0]
    if heads % world:
        raise ValueError(f"{heads} sinks (one per query head) do not divide over {world} ranks")
    if torch.isnan(sinks).any() or (sinks == float("inf")).any():
        raise ValueError("sinks must be finite or -inf; got NaN or +inf")
    size = heads // world
    return sinks[rank * size : (rank + 1) * size]


def draft_ids(d2t: Tensor, vocabulary: int, t2d: Tensor | None = None) -> Tensor:
    """The target's token of each token of a drafter for part of the vocabulary: `j + d2t[j]`, `[draft vocabulary]`.

    Raises `ValueError` for integers outside the vocabulary, tokens that two drafted ones map to, and a `t2d` (bool
    `[vocabulary]`, which tokens are drafted at all) that says otherwise.
    """
    if d2t.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"d2t must hold integers, got {d2t.dtype}")
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"d2t maps to tokens {low}..{high}, but the target's vocabulary holds {vocabulary}")
    if len(ids.unique()) < len(ids):
        raise ValueError(f"d2t maps {len(ids)} drafted tokens to {len(ids.unique())} tokens of the target only")
    if t2d is not None:
        drafted = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
        if t2d.shape != (vocabulary,) or not torch.equal(t2d.cpu().bool(), drafted):
            raise ValueError(
                f"t2d {list(t2d.shape)} says that {int(t2d.sum())} tokens are drafted, "
                f"d2t {list(d2t.shape)} maps to {len(ids)} others of a vocabulary of {vocabulary}"
            )
    return ids


def _files(directory: Path) -> list[Path]:
    """The files of a checkpoint's index, else all of its `.safetensors` files."""
    index = directory / INDEX
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [directory / name for name in sorted(set(weight_map.values()))]
    return sorted(f for f in directory.glob("*.safetensors") if f.name not in MASK_EMBEDDING)


def tensor_names(directory: Path) -> set[str]:
    """Names of the tensors of a checkpoint directory, from the headers of its files."""
    safe_open = _safetensors().safe_open
    names: set[str] = set()
    for file in _files(directory):
        with safe_open(file, framework="pt") as reader:
            names.update(reader.keys())
    return names


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory."""
    load_file = _safetensors().torch.load_file
    files = _files(directory)
    if not files:
        raise FileNotFoundError(f"{directory} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = load_file(file)
        twice = tensors.keys() & loaded.keys()
        if twice:
            raise ValueError(f"{file} holds {', '.join(sorted(twice))} once more")
        tensors.update(loaded)
    return tensors


def check_tensors(where: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """`found` must be `expected` in names and shapes. Raises one `ValueError` that lists everything that is not."""
    faults = []
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    if missing:
        faults.append(f"missing: {', '.join(missing)}")
    if unknown:
        faults.append(f"unknown: {', '.join(unknown)}")
    faults += [
        f"{name} is {list(found[name].shape)}, but the config makes it {list(x.shape)}"
        for name, x in expected.items()
        if name in found and found[name].shape != x.shape
    ]
    if faults:
        raise ValueError(f"the tensors of {where} are not those of its config.\n  " + "\n  ".join(faults))
