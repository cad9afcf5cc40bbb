"""The operators of the namespace `mmattn`: opcheck, torch.compile, fake tensors, export, autograd, autocast."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mmattn
from mmattn import Mask, MaskError, UnsupportedError, attention, dispatch, merge_states, operator, plan, reference
from mmattn.plan import TorchLowering

MASK = Mask.sliding_window(9)
HEADS = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ints(*values: Any, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Case:
    """Tensors and arguments of one call of `attention()`, of two sequences, with lengths around `n`."""

    def __init__(self, layout: str, device: torch.device, n: int = 20, dtype: torch.dtype = torch.float32) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

        self.mask, self.args, self.options = MASK, {}, {}  # type: Mask, dict[str, Any], dict[str, Any]
        spans = torch.full((2, n, 2), -1, dtype=torch.int32, device=device)
        spans[:, 0] = ints(2, 6, device=device)
        if layout == "batched":
            self.q, self.k, self.v = random(2, n, HEADS, 16), random(2, n + 3, 2, 16), random(2, n + 3, 2, 16)
            self.args = dict(mm_prefix_range=spans)
        elif layout == "packed":
            self.q, self.k, self.v = random(n, HEADS, 16), random(n + 4, 2, 16), random(n + 4, 2, 24)
            starts = ints(0, 5, n, device=device), ints(0, 7, n + 4, device=device)
            causal = ints(1, 0, device=device)
            self.args = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], causal=causal, mm_prefix_range=spans)
        elif layout == "paged":
            self.q, self.k, self.v = random(n, HEADS, 16), random(2 * n, 4, 2, 16), random(2 * n, 4, 2, 16)
            table = torch.arange(2 * n, dtype=torch.int32, device=device).view(2, n)
            self.args = dict(
                cu_seqlens_q=ints(0, n - 1, n, device=device), seqused_k=ints(n + 1, n, device=device), page_table=table,
            )  # fmt: skip
        elif layout == "options":
            self.q, self.k, self.v = random(n, HEADS, 16), random(n, 2, 16), random(n, 2, 16)
            self.options = dict(
                sinks=torch.randn(HEADS, device=device), softcap=3.0, scale=0.3, k_scale=torch.full((1, 2), 1.5, device=device),
                v_scale=torch.full((1,), 0.5, device=device), return_lse=True,
            )  # fmt: skip
        elif layout == "float8":
            self.q = random(n, HEADS, 16).half()
            self.k, self.v = (random(n, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
            self.options = dict(k_scale=torch.full((1, 2), 1.5, device=device), v_scale=2.0)
        else:
            raise AssertionError(layout)

    def narrowed(self, head_dim: int) -> Case:
        """With fewer columns a head, for what takes time by the element."""
        self.q, self.k, self.v = (x[..., :head_dim].contiguous() for x in (self.q, self.k, self.v))
        return self

    def __call__(self, **options: Any) -> Any:
        return attention(self.q, self.k, self.v, self.mask, **self.args, **{**self.options, **options})

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.options.get("sinks")) if x is not None]


LAYOUTS = ["batched", "packed", "paged", "options", "float8"]
DIFFERENTIABLE = ["batched", "packed", "paged", "options"]


def recorded(monkeypatch: pytest.MonkeyPatch, case: Case, **options: Any) -> list[tuple[Any, tuple[Any, ...], dict]]:
    """The operators that a call goes through, with their arguments."""
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "mmattn":
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        case(**options)
    return calls


# The operators as such.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(layout, device)
    calls = recorded(monkeypatch, case)
    names = [func.name() for func, _, _ in calls]
    assert names[-1] == "mmattn::attend" and "mmattn::row_intervals" in names
    if layout in DIFFERENTIABLE:
        case = Case(layout, device)
        for x in case.tensors():
            x.requires_grad_()
        calls += recorded(monkeypatch, case)
    case = Case(layout, device)
    calls += recorded(monkeypatch, case, out=case.q.new_empty(*case.q.shape[:-1], case.v.shape[-1]))
    assert calls[-1][0].name() == "mmattn::attend_out"
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if layout == "float8":  # torch's own schema test multiplies the inputs, which float8 cannot
        utilities = utilities[1:]
    for func, args, kwargs in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(func, args, kwargs, test_utils=utilities)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_the_operator_and_past_it_the_same_kernel_runs(
    layout: str, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(layout, device, dtype=torch.float16)
    against = mmattn.supported(
        case.q, case.k, case.v, case.mask, **case.args, **{k: v for k, v in case.options.items() if k != "return_lse"}
    )[backend]
    if against:
        pytest.skip(f"{backend}: {'; '.join(against)}")
    plain = case(backend=backend, return_lse=True)
    monkeypatch.setattr(operator, "seen", lambda *_: True)
    through = case(backend=backend, return_lse=True)
    out = torch.full_like(plain[0], 7.0)
    written = case(backend=backend, return_lse=True, out=out)
    for a, b, c in zip(plain, through, written):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert written[0] is out


def test_a_call_without_gradients_does_not_pass_the_dispatcher(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("batched", device)
    monkeypatch.setattr(operator, "attend", lambda *_, **__: pytest.fail("went through the operator"))
    case()
    with torch.no_grad():
        case.q.requires_grad_()
        case()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_meta_tensors(layout: str, device: torch.device) -> None:
    case = Case(layout, device)
    real = case(return_lse=True)
    with FakeTensorMode() as mode:
        fake = Case.__new__(Case)
        fake.mask = case.mask
        fake.q, fake.k, fake.v = (mode.from_tensor(x) for x in (case.q, case.k, case.v))
        fake.args = {name: mode.from_tensor(x) for name, x in case.args.items()}
        fake.options = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in case.options.items()}
        answers = [fake(return_lse=True)]
    on_meta = Case(layout, torch.device("meta"))
    answers.append(on_meta(return_lse=True))
    for answer in answers:
        for got, want in zip(answer, real):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def test_kernels_are_refused_with_all_reasons_on_fake_tensors(device: torch.device) -> None:
    with FakeTensorMode():
        x = torch.empty(5, 2, 16, dtype=torch.float64, device=device)
        with pytest.raises(UnsupportedError) as error:
            attention(x, x, x, Mask(), backend="triton")
    assert "dtype float64" in str(error.value) and "torch: can run this call" in str(error.value)


# torch.compile.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(layout: str, dynamic: bool, device: torch.device) -> None:
    case = Case(layout, device)
    want = case(return_lse=True)
    run = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got = run(case.q, case.k, case.v, case.mask, **case.args, **{**case.options, "return_lse": True})
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def attend_three_layers(q: Tensor, k: Tensor, v: Tensor, args: dict[str, Any]) -> Tensor:
    the_plan = plan(MASK, q=q, k=k, **args)
    for _ in range(3):
        q = torch.tanh(attention(q, k, v, the_plan)[..., : q.shape[-1]])
    return q


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batched", "packed", "paged"])
def test_twenty_batches_compile_two_graphs(layout: str, device: torch.device) -> None:
    compiled = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    run = torch.compile(attend_three_layers, fullgraph=True, backend=compiled)
    for i in range(20):
        case = Case(layout, device, n=14 + 3 * i)
        want = attend_three_layers(case.q, case.k, case.v, case.args)
        assert torch.allclose(run(case.q, case.k, case.v, case.args), want, atol=1e-5)
    assert compiled.frame_count <= 2


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("training", [False, True])
def test_layers_of_one_kind_plan_once_a_step(
    compiler: str, training: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row table and tile table are made once, however many layers use them."""
    made: dict[str, int] = {"row_intervals": 0, "tile_table": 0}
    lowering = dispatch.lowering(device.type)
    for name in made:
        original = getattr(lowering, name)
        monkeypatch.setattr(
            lowering, name, lambda *a, name=name, f=original: (made.update({name: made[name] + 1}), f(*a))[1]
        )
    case = Case("packed", device, dtype=torch.float16)
    if not training:
        backend = "triton"  # (torch takes no tile tables)
        if mmattn.supported(case.q, case.k, case.v, case.mask, **case.args)["triton"]:
            pytest.skip("no Triton here")
    else:
        backend = "auto"
        case.q.requires_grad_()

    def layers(q: Tensor, k: Tensor, v: Tensor, args: dict[str, Any]) -> Tensor:
        the_plan = plan(MASK, q=q, k=k, **args)
        for _ in range(3):
            q = torch.tanh(attention(q, k, v, the_plan, backend=backend)[..., :16])
        return q

    run = torch.compile(layers, fullgraph=True, backend=compiler)
    for step in (1, 2):
        out = run(case.q, case.k, case.v, case.args)
        if training:
            out.sum().backward()
        assert made["row_intervals"] == step
        if not training:
            assert made["tile_table"] == step
    gc.collect()
    assert not len(operator._plans), "a plan outlives the graph that made it"


def test_two_plans_in_one_graph_are_told_apart(device: torch.device) -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        windows = [plan(Mask.sliding_window(w), q=q, k=k) for w in (3, 9)]
        return sum(attention(q, k, v, windows[i % 2]) for i in range(4))

    case = Case("options", device)
    case.q.requires_grad_()
    want = both(case.q, case.k, case.v)
    for compiler in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        got = torch.compile(both, fullgraph=True, backend=compiler)(case.q, case.k, case.v)
        assert torch.allclose(got, want, atol=1e-6)


def test_a_plan_from_outside_the_graph(device: torch.device) -> None:
    case = Case("packed", device)
    run = torch.compile(attention, fullgraph=True, backend="inductor")
    for _ in range(3):
        ready = plan(case.mask, q=case.q, k=case.k, **case.args)
        assert torch.allclose(run(case.q, case.k, case.v, ready), case(), atol=1e-6)


def test_span_lists_in_a_graph(device: torch.device) -> None:
    """Their numbers may change without another graph, and are checked as ever."""
    x = torch.randn(2, 30, 2, 16, device=device)
    compiled = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda q, spans: attention(q, q, q, Mask(), mm_prefix_range=spans), fullgraph=True, backend=compiled
    )
    for i in range(6):
        spans = [[(2 + i, 5 + 2 * i), (20 + i, 22 + i)], [(0, 3 + i)]]
        assert torch.equal(run(x, spans), attention(x, x, x, Mask(), mm_prefix_range=spans))
    assert compiled.frame_count <= 2
    assert torch.equal(run(x, [[], []]), attention(x, x, x, Mask()))
    with pytest.raises(MaskError, match="overlap"):
        run(x, [[(2, 9), (9, 12)], [(0, 3)]])


def test_bad_input_in_a_graph(device: torch.device) -> None:
    x = torch.randn(8, 4, 16, device=device)

    def call(fullgraph: bool, *args: Any, **kw: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(attention, fullgraph=fullgraph, backend="eager")(*args, **kw)

    for fullgraph in (False, True):
        with pytest.raises(Exception, match="the 3 heads of k and v must divide the 4 heads of q") as error:
            call(fullgraph, x, x[:, :3], x[:, :3], Mask())
        assert fullgraph or isinstance(error.value, ValueError)
        with pytest.raises(Exception, match="dtype float64 is not float16, bfloat16 or float32") as error:
            call(fullgraph, x.double(), x.double(), x.double(), Mask(), backend="triton")
        assert "torch: can run this call" in str(error.value)
        assert isinstance(error.value.__cause__ if fullgraph else error.value, UnsupportedError)
        with pytest.raises(Exception, match="is not one interval per row") as error:
            call(
                fullgraph, x, x, x, Mask(chunk_size=4, mm_prefix_clamp=True), mm_prefix_range=ints((0, 0), (1, 2))[None]
            )
        assert fullgraph or isinstance(error.value, MaskError)


# Export.


def test_export_runs_in_another_process(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 3 * 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
            the_plan = mmattn.plan(Mask.sliding_window(5), q=q, k=k)
            return attention(attention(q, k, v, the_plan), k, v, the_plan).flatten(2)

    model, x = Model(), torch.randn(2, 11, 32)
    with torch.no_grad():
        length = torch.export.Dim("length", min=4, max=512)
        program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
        other = torch.randn(2, 37, 32)
        torch.save((other, model(other)), tmp_path / "want.pt")
    torch.export.save(program, tmp_path / "model.pt2")
    script = f"""
        import torch, mmattn
        program = torch.export.load({str(tmp_path / "model.pt2")!r})
        x, want = torch.load({str(tmp_path / "want.pt")!r})
        assert torch.allclose(program.module()(x), want, atol=1e-6)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


# autograd.


@pytest.mark.parametrize("layout", ["batched", "packed", "options"])
def test_gradcheck(layout: str, device: torch.device) -> None:
    case = Case(layout, device, n=7, dtype=torch.float64).narrowed(4)
    inputs = case.tensors()[:3]
    if "sinks" in case.options:
        inputs.append(case.options["sinks"].double())
    for x in inputs:
        x.requires_grad_()
    options = {name: x for name, x in case.options.items() if name not in ("sinks", "return_lse")}

    def run(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        more = dict(sinks=sinks[0]) if sinks else {}
        return attention(q, k, v, case.mask, **case.args, **options, **more)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("layout", DIFFERENTIABLE)
def test_gradients_through_out_and_lse(layout: str, device: torch.device) -> None:
    """(gradcheck cannot look at lse, which is float32.)"""
    case = Case(layout, device, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in case.tensors()]
    grads = []
    for call in (attention, reference):
        options = {name: x for name, x in case.options.items() if name != "return_lse" or call is attention}
        if call is attention:
            options["return_lse"] = True
        torch.manual_seed(0)
        out, lse = call(case.q, case.k, case.v, case.mask, **case.args, **options)
        loss = (out * torch.randn(out.shape, dtype=torch.float64, device=device)).sum() + lse.double().square().sum()
        grads.append(torch.autograd.grad(loss, inputs))
    for got, want in zip(*grads):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_expanded_and_strided_gradients(device: torch.device) -> None:
    case = Case("batched", device, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in case.tensors()]
    want = torch.autograd.grad(reference(*inputs, case.mask, **case.args)[0].sum(), inputs)
    for grad in (
        torch.ones((), dtype=torch.float64),
        torch.ones(16, HEADS, 20, 2, dtype=torch.float64).permute(3, 2, 1, 0),
    ):
        out = case()
        got = torch.autograd.grad(out, inputs, grad.to(device).expand_as(out))
        for a, b in zip(got, want):
            assert torch.allclose(a, b)


def test_rows_without_keys_have_no_gradient_and_no_nan(device: torch.device) -> None:
    q = torch.randn(9, 2, 16, device=device, requires_grad=True)
    k, v = (torch.randn(4, 2, 16, device=device, requires_grad=True) for _ in range(2))
    # 7 of the 9 rows belong to the sequence; its first 3 come before key 0.
    out, lse = attention(q, k, v, Mask(), cu_seqlens_q=ints(0, 7, device=device), cu_seqlens_k=ints(0, 4, device=device),
                         return_lse=True)  # fmt: skip
    grads = torch.autograd.grad((out * torch.randn_like(out)).sum() + lse.pow(2).sum(), (q, k, v))
    for grad in grads:
        assert grad.isfinite().all()
    assert (grads[0][:3] == 0).all() and (grads[0][7:] == 0).all() and grads[0][3:7].abs().sum() > 0
    assert grads[1].abs().sum() > 0


def test_merge_states_is_differentiable(device: torch.device) -> None:
    q, k, v = (torch.randn(6, 2, 16, device=device, dtype=torch.float32, requires_grad=True) for _ in range(3))
    weight = torch.randn(6, 2, 16, device=device)

    def parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        halves = [
            attention(q, k[i], v[i], Mask(), q_start=ints(0, device=device), kv_start=ints(start, device=device), return_lse=True)
            for i, start in ((slice(0, 3), 0), (slice(3, 6), 3))
        ]  # fmt: skip
        out, lse = merge_states(*map(list, zip(*halves)))
        return (out * weight).sum() + lse.sum()

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, Mask(), return_lse=True)
        return (out * weight).sum() + lse.sum()

    for got, want in zip(*(torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (parts, whole))):
        assert torch.allclose(got, want, atol=1e-5)


def test_one_key_tensor_in_two_calls(device: torch.device) -> None:
    q, k = (torch.randn(6, 2, 16, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def twice(run: Any) -> Tensor:
        return run(run(q, k, k), k, k).square().sum()

    got = torch.autograd.grad(twice(lambda q, k, v: attention(q, k, v, MASK)), (q, k))
    want = torch.autograd.grad(twice(lambda q, k, v: reference(q, k, v, MASK)[0]), (q, k))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, MASK), fullgraph=True, backend="aot_eager")
    graph = torch.autograd.grad(twice(compiled), (q, k))
    for a, b, c in zip(got, want, graph):
        assert torch.allclose(a, b) and torch.allclose(a, c)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(compiled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain checkpointing runs the operator twice; selective checkpointing that saves it, once."""
    x = torch.randn(2, 8, 2, 16, device=device, requires_grad=True)
    runs = []
    original = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *a, **kw: (runs.append(1), original(*a, **kw))[1])

    def layer(x: Tensor) -> Tensor:
        return attention(x.sin(), x, x, MASK).cos()

    def keep(ctx: Any, op: Any, *args: Any, **kw: Any) -> CheckpointPolicy:
        saved = op is torch.ops.mmattn.attend.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    want = torch.autograd.grad(layer(x).sum(), x)[0]
    for context, expected in ((None, 2), (lambda: create_selective_checkpoint_contexts(keep), 1)):
        more = {} if context is None else dict(context_fn=context)

        def step(x: Tensor, more: Any = more) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False, **more).sum()

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        loss = run(x)
        runs.clear()
        got = torch.autograd.grad(loss, x)[0]
        assert torch.allclose(got, want, atol=1e-6)
        assert len(runs) == expected - 1


def test_gradients_of_gradients_are_refused(device: torch.device) -> None:
    x = torch.randn(6, 2, 16, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(x, x, x, Mask()).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no gradients of gradients"):
        grad.sum().backward()


def test_memory_of_the_torch_backward_does_not_follow_the_visible_area() -> None:
    """Saved for backward are inputs and outputs, not probabilities."""
    saved = []
    x = torch.randn(1, 600, 2, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        attention(x, x, x, Mask(), backend="torch")
    assert sum(saved) <= 4 * x.numel() + 600 * 4


# autocast.


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast_casts_as_for_sdpa(requires_grad: bool, device: torch.device) -> None:
    q = torch.randn(1, 8, 2, 16, device=device, requires_grad=requires_grad)
    k, v = q.detach().bfloat16(), q.detach().clone()
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(q, k, v, Mask())
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2)
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v, Mask())
    assert out.dtype == theirs.dtype == torch.bfloat16 and torch.equal(out, compiled)
    assert (out.float() - theirs.float()).abs().max() < 0.05
    if requires_grad:
        out.float().sum().backward()
        assert q.grad is not None and q.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="k must have q's dtype"):
        attention(q, k, v, Mask())
    with torch.autocast(device.type, torch.bfloat16):
        assert attention(q.double(), k.double(), v.double(), Mask()).dtype == torch.float64


def test_numbers_of_a_mask_show_the_same_keys() -> None:
    masks = [
        Mask(), Mask.full(), Mask.sliding_window(4), Mask.sliding_window(4, causal=False), Mask(causal=False, window_right=2),
        Mask(causal=False, window_left=3, symmetrize=False), Mask.chunked(4, 1), Mask.sliding_window(3, mm_prefix_clamp=True),
    ]  # fmt: skip
    at = torch.arange(30)
    for mask in masks:
        other = Mask.of_numbers(*mask.numbers)
        assert other.numbers == mask.numbers
        for a, b in zip(mask.bounds(at, span=(3, 9)), other.bounds(at, span=(3, 9))):
            assert torch.equal(a, b)


def test_lowerings_agree_on_where_to_compute() -> None:
    assert isinstance(dispatch.lowering("cpu"), TorchLowering)
