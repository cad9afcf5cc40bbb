"""Every family of transformers that uses its attention or mask interface, tiny, against eager attention.

python -m tests.hf_sweep                      all families, with a progress bar; writes docs/models.jsonl
python -m tests.hf_sweep llama gemma3 -v      some families, printed only
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import mmattn.hf
from mmattn.hf import attention as hf_attention

from . import hf_families, hf_table
from .hf_inputs import repair

MODELS = Path(transformers.__file__).parent / "models"
SECONDS = 60
TOLERANCE = 1e-4
LENIENT = "mmattn_with_fallback"
USES = re.compile(r"ALL_ATTENTION_FUNCTIONS|create_(causal|bidirectional|sliding|chunked)\w*mask|create_masks_for")


def families() -> list[str]:
    """Folders of `transformers.models` with a model that asks for an attention function or for a mask."""
    return sorted({p.parent.name for p in MODELS.glob("*/modeling_*.py") if USES.search(p.read_text(encoding="utf-8"))})


# One family


class ByItself(Exception):
    """The model does not run with eager attention either."""


def candidates(family: str) -> list[Any]:
    """Model classes of a family, the most telling first."""
    found = []
    for path in sorted((MODELS / family).glob("modeling_*.py")):
        if path.stem.startswith(("modeling_tf", "modeling_flax")):
            continue
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        found += [
            c
            for c in vars(module).values()
            if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel) and c.__module__ == module.__name__
        ]
    order = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForCTC", "ForImageTextToText")

    def rank(c: Any) -> tuple[int, int]:
        name = c.__name__
        for i, end in enumerate(order):
            if name.endswith(end):
                return i, -len(getattr(c.config_class, "sub_configs", {}))
        if name.endswith("PreTrainedModel"):
            return 99, 0
        return (10 if name.endswith("Model") else 20), -len(getattr(c.config_class, "sub_configs", {}))

    wanted = hf_families.CLASSES.get(family, ())
    usable = [c for c in found if c.config_class is not None and rank(c)[0] < 99]
    return sorted(usable, key=lambda c: (c.__name__ not in wanted, rank(c)))


def build(family: str, cls: Any) -> torch.nn.Module:
    config = hf_families.config(family, cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
        except Exception:  # some models calculate while they are built
            size = 0
        if size > 40e6:
            raise ByItself(f"{size / 1e6:.0f} million parameters: the config did not get small")
        model = cls._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            if weight.dim() >= 2:
                weight.normal_(0, 1.2 * weight[0].numel() ** -0.5, generator=generator)
            elif "sink" in name:
                weight.normal_(0, 1.0, generator=generator)
            elif not torch.isfinite(weight).all():
                weight.zero_()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model.eval()


def outputs(value: Any, path: str = "") -> dict[str, Tensor]:
    """All float tensors of a model's output."""
    if isinstance(value, Tensor):
        return {path: value} if value.is_floating_point() else {}
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, item in items:
        if not str(key).startswith(("past_key_values", "attentions", "loss")):
            found.update(outputs(item, f"{path}.{key}"))
    return found


def run(model: Any, inputs: dict[str, Any], generate: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        if not generate:
            return outputs(dict(enumerate_output(model(**inputs))))
        out = model.generate(
            **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, num_beams=1, output_logits=True, return_dict_in_generate=True,
            disable_compile=True,
        )  # fmt: skip
        return {"logits": torch.stack(out.logits, 1)}


def run_repaired(model: Any, inputs: dict[str, Any], kind: str, generates: bool) -> dict[str, Tensor]:
    """`run`, with inputs that follow what the model complains about."""
    while True:
        try:
            return run(model, {k: v for k, v in inputs.items() if k != "_placed"}, generates)
        except Exception as error:
            if not repair(model, inputs, kind.removesuffix("+generate"), error):
                raise


def enumerate_output(out: Any) -> Any:
    return out.items() if isinstance(out, dict) else enumerate(out if isinstance(out, (list, tuple)) else [out])


def difference(got: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None) -> tuple[float, str]:
    """The largest difference, relative to the largest number of its tensor, outside of padding, and where it is."""
    worst, where = 0.0, ""
    if got.keys() != expected.keys():
        return float("inf"), f"outputs {sorted(got)} and {sorted(expected)}"
    for name, a in got.items():
        b = expected[name]
        if a.shape != b.shape:
            return float("inf"), f"{name}: shapes {list(a.shape)} and {list(b.shape)}"
        if mask is not None and a.shape[:2] == mask.shape:
            a, b = a[mask.bool()], b[mask.bool()]
        means = torch.isfinite(b)  # rows that see nothing are NaN in eager attention of some models
        if not torch.isfinite(a[means]).all():
            return float("inf"), f"{name}: not finite where eager attention is"
        a, b = a[means].double(), b[means].double()
        if a.numel() and float((a - b).abs().max()) > worst * max(float(b.abs().max()), 1e-6):
            worst, where = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-6), name
    return worst, where


def brief(error: BaseException) -> str:
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text}"[:400]


def compare(
    model: Any, kind: str, calls: list[int], verbose: bool, loaded: Any = None, lenient: Any = None
) -> dict[str, Any]:
    """One kind of inputs: eager attention against mmattn, set in the same model or in `loaded` from the start (in
    `lenient` with the fallback)."""
    generates = kind.endswith("+generate")
    model.set_attn_implementation("eager")
    try:
        inputs = hf_families.inputs(model, kind.removesuffix("+generate"))
        if generates:
            inputs.pop("decoder_input_ids", None)
        expected = run_repaired(model, inputs, kind, generates)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"verdict": "by itself", "why": brief(error)}
    inputs.pop("_placed", None)
    mask = inputs.get("attention_mask")
    calls[0] = 0
    try:
        if loaded is None:
            model.set_attn_implementation("mmattn")
        got = run(loaded or model, inputs, generates)
    except mmattn.UnsupportedError as error:
        return {
            "verdict": "refused",
            "why": brief(error),
            **with_fallback(model, lenient, inputs, generates, expected, mask),
        }
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"verdict": "CRASH", "why": brief(error)}
    error, where = difference(got, expected, None if generates else mask)
    if error > TOLERANCE:
        noise = noise_of(model, inputs, generates, expected, mask)
        if error > 30 * noise + TOLERANCE:
            return {"verdict": "WRONG", "why": f"{where} differs by {error:.1e} of its size (noise {noise:.1e})"}
    return {"verdict": "equal" if calls[0] else "unused", "error": error, "calls": calls[0]}


def with_fallback(
    model: Any, lenient: Any, inputs: dict[str, Any], generates: bool, expected: Any, mask: Any
) -> dict[str, Any]:
    """What `register(fallback="sdpa")` makes of a refused run."""
    try:
        if lenient is None:
            model.set_attn_implementation(LENIENT)
        got = run(lenient or model, inputs, generates)
    except mmattn.UnsupportedError as error:
        return {"fallback": "refused", "fallback_why": brief(error)}
    except Exception as error:  # loud, and the refusal stands: the model has a use for None, or cannot take elements
        return {"fallback": "fails", "fallback_why": brief(error)}
    error, where = difference(got, expected, None if generates else mask)
    if error > TOLERANCE:
        noise = noise_of(model, inputs, generates, expected, mask)
        if error > 30 * noise + TOLERANCE:
            return {
                "verdict": "WRONG",
                "why": f"with fallback: {where} differs by {error:.1e} of its size (noise {noise:.1e})",
            }
    return {"fallback": "equal"}


def from_the_start(
    family: str, cls: Any, model: Any, runs: dict[str, Any], calls: list[int], verbose: bool
) -> dict[str, Any]:
    """Again for a model that keeps its attention when mmattn is set later: loaded with mmattn from the start."""
    unused = [kind for kind, run in runs.items() if run["verdict"] == "unused"]

    def load(name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = cls._from_config(hf_families.config(family, cls), attn_implementation=name)
        other.load_state_dict(model.state_dict())
        return other.eval()

    try:
        loaded = load("mmattn")
    except mmattn.UnsupportedError as error:
        return {**runs, **{kind: {"verdict": "refused", "why": brief(error)} for kind in unused}}
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {**runs, **{kind: {"verdict": "CRASH", "why": brief(error)} for kind in unused}}
    lenient = load(LENIENT)
    return {**runs, **{kind: compare(model, kind, calls, verbose, loaded, lenient) for kind in unused}}


def noise_of(model: Any, inputs: dict[str, Any], generates: bool, expected: Any, mask: Any) -> float:
    """How far eager attention is from itself with weights off by one part in ten million."""
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    saved = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_floating_point():
                saved[name] = weight.clone()
                weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))
        got = run(model, inputs, generates)
        for name, weight in model.named_parameters():
            if name in saved:
                weight.copy_(saved[name])
    return difference(got, expected, None if generates else mask)[0]


def examine(family: str, verbose: bool = False) -> dict[str, Any]:
    """The verdict on a family: of each kind of inputs, and the worst of them."""
    mmattn.hf.register()
    mmattn.hf.register(LENIENT, fallback="sdpa")
    with counting() as calls:
        return _examine(family, calls, verbose)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts the calls of mmattn's attention."""
    calls = [0]
    real = hf_attention.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    hf_attention.attention = counted
    try:
        yield calls
    finally:
        hf_attention.attention = real


def _examine(family: str, calls: list[int], verbose: bool) -> dict[str, Any]:
    failures = []
    for cls in candidates(family)[:4]:
        try:
            model = build(family, cls)
            kinds = hf_families.kinds(model)
            runs = {kind: compare(model, kind, calls, verbose) for kind in kinds}
            if {r["verdict"] for r in runs.values()} <= {"unused", "by itself"}:
                runs = from_the_start(family, cls, model, runs, calls, verbose)
        except ByItself as error:
            failures.append(f"{cls.__name__}: {error}")
            continue
        except Exception as error:
            if verbose:
                traceback.print_exc()
            failures.append(f"{cls.__name__}: {brief(error)}")
            continue
        ran = {k: r for k, r in runs.items() if r["verdict"] != "by itself"}
        if ran:
            worst = next(
                v
                for v in ("CRASH", "WRONG", "refused", "equal", "unused")
                if any(r["verdict"] == v for r in ran.values())
            )
            return {"family": family, "class": cls.__name__, "verdict": worst, "runs": runs}
        failures.append(f"{cls.__name__}: " + "; ".join(f"{k}: {r['why']}" for k, r in runs.items()))
    return {"family": family, "verdict": "by itself", "why": failures}


# All families


def _worker(family: str, verbose: bool, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    torch.set_num_threads(1)
    if not verbose:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        pipe.send(examine(family, verbose))
    except BaseException as error:
        pipe.send({"family": family, "verdict": "by itself", "why": [brief(error)]})


def sweep(names: list[str], workers: int, seconds: float, verbose: bool = False) -> Any:
    """Rows as they come; every family in a process of its own, forked with everything imported."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(names)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            mine, theirs = context.Pipe(duplex=False)
            family = waiting.pop()
            process = context.Process(target=_worker, args=(family, verbose, theirs))
            process.start()
            theirs.close()
            running[family] = (process, mine, time.monotonic())
        for family, (process, pipe, began) in list(running.items()):
            row = None
            if pipe.poll(0):
                try:
                    row = pipe.recv()
                except EOFError:
                    process.join()
                    row = {
                        "family": family,
                        "verdict": "by itself",
                        "why": [f"the process ended with {process.exitcode}"],
                    }
            elif time.monotonic() - began > seconds:
                os.kill(process.pid, signal.SIGKILL)
                row = {"family": family, "verdict": "by itself", "why": [f"took longer than {seconds} s"]}
            if row is not None:
                process.join()
                pipe.close()
                del running[family]
                row["seconds"] = round(time.monotonic() - began, 1)
                yield row
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="folders of transformers.models; without any, all of them")
    parser.add_argument("--fast", action="store_true", help="the families that CI runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a family")
    parser.add_argument(
        "--out", type=Path, help="where the table goes (default: docs/models.jsonl if all families ran)"
    )
    parser.add_argument("--update", action="store_true", help="put the given families into docs/models.jsonl")
    parser.add_argument("-v", "--verbose", action="store_true", help="the traceback of every failure")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    names = args.families or (list(hf_table.FAST) if args.fast else families())
    out = args.out or (None if args.families or args.fast else hf_table.TABLE)
    rows = []
    for row in tqdm(sweep(names, args.workers, args.seconds, args.verbose), total=len(names), disable=args.verbose):
        rows.append(row)
        if args.families:
            tqdm.write(json.dumps(row, indent=1))
        elif row["verdict"] in ("WRONG", "CRASH"):
            tqdm.write(json.dumps(row))
    if args.update:
        hf_table.update(transformers.__version__, rows)
    elif out is not None:
        hf_table.write(transformers.__version__, rows, out)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in hf_table.VERDICTS}
    print(f"transformers {transformers.__version__}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return 1 if counts["WRONG"] or counts["CRASH"] else 0


if __name__ == "__main__":
    sys.exit(main())
