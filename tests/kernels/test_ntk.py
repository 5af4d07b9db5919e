"""The ntk call: budgets, plans, precision, selections, loaders, errors."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.support.errors import InputError, UnsupportedError
from zoo import brute_force


def mlp(c: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, c))


def cnn(c: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, c),
    ).eval()  # fmt: skip


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("outputs", ["full", "trace", "diagonal", "sum", 1])
@pytest.mark.parametrize("cross", [False, True])
def test_small_budgets_give_the_same_kernel(outputs: str | int, cross: bool) -> None:
    """Tiles, layer groups, chunks and workspace slices change nothing but rounding."""
    net, x = cnn(), torch.randn(23, 1, 8, 8)
    x2 = torch.randn(11, 1, 8, 8) if cross else None
    free = bs.ntk(net, x, x2, outputs=outputs, precision="float64")
    assert free.plan.tile == 23
    cut = set()
    sizes = (
        ("2MB", "700KB", "450KB", "300KB")
        if isinstance(outputs, str) and outputs != "sum"
        else ("2MB", "110KB", "85KB")
    )
    for budget in sizes:
        K = bs.ntk(net, x, x2, outputs=outputs, precision="float64", max_memory=budget)
        cut.add((K.plan.tile, len(K.plan.groups), K.plan.chunk))
        assert relative(K.tensor, free.tensor) < 1e-13
    assert len(cut) > 1
    assert any(tile < 23 for tile, _, _ in cut)


def test_layers_under_a_small_budget() -> None:
    net, x = cnn(), torch.randn(23, 1, 8, 8)
    K = bs.ntk(net, x, precision="float64", max_memory="300KB", by_layer=True)
    assert K.plan.tile < 23
    assert relative(torch.stack([k.tensor for k in K.by_layer().values()]).sum(0), K.tensor) < 1e-13
    assert relative(K.tensor, bs.ntk(net, x, precision="float64").tensor) < 1e-13


MEMORY = """
import resource, sys, torch
import biascope as bs
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(),
                    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                    nn.Linear(1024, 10))
x = torch.randn(int(sys.argv[2]), 3, 32, 32)
bs.ntk(net, x[:2])  # warm up: allocator, kernels, certificate
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
K = bs.ntk(net, x, max_memory=int(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print((peak - before) / int(sys.argv[1]), K.plan.passes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [150, 400])
def test_the_memory_budget_is_honoured(megabytes: int) -> None:
    """Peak resident memory above the start, in a fresh process, is at most 15 % over the budget.

    Large blocks come from and go back to the system one by one: what glibc keeps of freed ones (20 to 60 MB, as it
    happens) is not what the budget is about.
    """
    command = [sys.executable, "-c", MEMORY, str(megabytes * 2**20), "96"]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()
    assert float(out[0]) < 1.15, f"used {float(out[0]):.2f} of the budget"
    assert int(out[1]) > 1, "the budget was meant to bite"


def test_a_hopeless_budget_says_what_is_needed() -> None:
    with pytest.raises(InputError, match=r"give at least .* or keep the kernel on disk"):
        bs.ntk(mlp(), torch.randn(50, 6), max_memory="50KB")


@pytest.mark.parametrize(("text", "value"), [("1KB", 1024), ("1.5 MiB", 1572864), (7, 7), ("2g", 2**31)])
def test_sizes_are_read(text: str | int, value: int) -> None:
    from biascope.support.memory import parse_bytes

    assert parse_bytes(text) == value


@pytest.mark.parametrize("bad", ["four", "0", "-1GB", "4 giga"])
def test_bad_sizes_are_refused(bad: str) -> None:
    with pytest.raises(InputError, match="max_memory"):
        bs.ntk(mlp(), torch.randn(3, 6), max_memory=bad)


def test_the_plan_reads_well() -> None:
    K = bs.ntk(cnn(), torch.randn(5, 1, 8, 8))
    text = str(K.plan)
    assert "0.weight +bias" in text
    assert "would cost" in text
    assert "FLOP" in text
    assert K.plan.flops > 0
    methods = {b.block.names[0]: b.method for b in K.plan.blocks}
    assert methods["7.weight"] == "gram"  # one position: the Hadamard product always wins
    assert methods["0.weight"] == "contract"  # 64 positions, 9 x 4 weights


def test_strategy_overrules() -> None:
    for strategy in ("gram", "contract"):
        K = bs.ntk(cnn(), torch.randn(4, 1, 8, 8), strategy=strategy)
        assert {b.method for b in K.plan.blocks if b.block.kind == "matrix"} == {strategy}
    with pytest.raises(InputError, match="strategy='quick'"):
        bs.ntk(mlp(), torch.randn(2, 6), strategy="quick")


def test_float32_is_accurate_on_long_thin_products() -> None:
    """A plain float32 product over 2 million parameters at n = 4 loses three digits; ours does not."""
    net = nn.Sequential(
        nn.Conv2d(256, 512, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )
    x = torch.randn(4, 256, 6, 6)
    for outputs in ("trace", "full"):
        exact = bs.ntk(net, x, outputs=outputs, precision="float64", strategy="contract").tensor
        for strategy in ("auto", "contract", "gram"):
            assert relative(bs.ntk(net, x, outputs=outputs, strategy=strategy).tensor, exact) < 1e-5
    J = bs.Jacobian(net, x).to_dense().flatten(1)
    naive = (J @ J.T).double()
    ours = bs.ntk(net, x, outputs="trace", strategy="contract").tensor
    exact = bs.ntk(net, x, outputs="trace", precision="float64").tensor
    assert relative(ours, exact) < relative(naive, exact) + 1e-7


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 3e-2), ("tf32", 2e-3), ("float32", 1e-5)])
def test_low_precision_reports_its_error(precision: str, bound: float) -> None:
    net, x = cnn(), torch.randn(12, 1, 8, 8)
    K = bs.ntk(net, x, precision=precision, check=True)
    exact = bs.ntk(net, x, precision="float64")
    assert K.error is not None
    assert K.error < bound
    measured = relative(K.tensor, exact.tensor)
    assert measured < 3 * K.error + 1e-9
    assert K.error < 10 * measured + 1e-9
    assert K.tensor.dtype == torch.float32
    assert "against float64" in repr(K)


def test_model_precisions() -> None:
    x = torch.randn(4, 6)
    net = mlp()
    exact = brute_force(net, x)
    full = torch.einsum("iap,jbp->iajb", exact, exact)
    import copy

    assert bs.ntk(copy.deepcopy(net).double(), x).tensor.dtype == torch.float64
    half = copy.deepcopy(net).half()
    K = bs.ntk(half, x.half())
    assert K.tensor.dtype == torch.float32  # computed in float32 from the rounded weights
    assert relative(K.tensor, full) < 5e-3


@pytest.mark.parametrize("params", ["4", "4.weight", ["0.bias", "4"], "*.bias", lambda n, p: p.dim() == 1])
def test_subsets_of_parameters(params: object) -> None:
    net, x = mlp(), torch.randn(5, 6)
    J = bs.Jacobian(net, x, params=params, precision="float64")  # type: ignore[arg-type]
    exact = brute_force(net, x, params=list(J.f.params))
    assert relative(J.to_dense(), exact) < 1e-12
    K = bs.ntk(net, x, params=params, precision="float64")  # type: ignore[arg-type]
    assert relative(K.tensor, torch.einsum("iap,jbp->iajb", exact, exact)) < 1e-12


def test_frozen_parameters_are_left_out_unless_asked() -> None:
    net, x = mlp(), torch.randn(5, 6)
    net[0].requires_grad_(False)
    assert set(bs.Jacobian(net, x).f.params) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    assert len(bs.Jacobian(net, x, params="all").f.params) == 6
    net.requires_grad_(False)
    with pytest.raises(InputError, match='params="all"'):
        bs.ntk(net, x)


def test_low_rank_adapters_only() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 4)
            self.A, self.B = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.base(x) + x @ self.A @ self.B).tanh()

    net, x = LoRA(), torch.randn(5, 6)
    K = bs.ntk(net, x, params=["A", "B"], precision="float64")
    J = brute_force(net, x, params=["A", "B"])
    assert relative(K.tensor, torch.einsum("iap,jbp->iajb", J, J)) < 1e-12
    assert {b.method for b in K.plan.blocks} <= {"gram", "contract"}  # layer rules, no fallback


def test_loaders_and_labelled_batches() -> None:
    net, x = mlp(), torch.randn(10, 6)
    y = torch.arange(10)
    whole = bs.ntk(net, x).tensor
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    for data in (loader, [x[:3], x[3:]], [(x[:5], y[:5]), (x[5:], y[5:])], (x, y)):
        assert torch.equal(bs.ntk(net, data).tensor, whole)


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.what = nn.Linear(6, 3), what

    def forward(self, x: torch.Tensor) -> object:
        h = self.a(x)
        return {
            "tuple": lambda: (h, h), "scalar": lambda: h.mean(), "dict": lambda: {"score": h, "size": h},
            "indices": lambda: (h.argmax(1), None),
            "int": lambda: h.argmax(1), "short": lambda: h[:-1], "mixed": lambda: h - h.mean(0),
            "random": lambda: h + torch.randn_like(h), "nan": lambda: h / 0 * 0,
        }[self.what]()  # fmt: skip


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("indices", r"returned a tuple of 2.*output=lambda out: out\[0\]"),
        ("scalar", "returned a scalar"),
        ("dict", "'score'.*output="),
        ("int", "torch.int64"),
        ("short", r"returned shape \[2, 3\] for 3 examples"),
        ("mixed", "when the batch changes"),
        ("random", "different outputs for the same inputs"),
        ("nan", "NaN"),
    ],
)
def test_outputs_that_cannot_be_differentiated(what: str, message: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=message):
        bs.ntk(Returns(what), torch.randn(7, 6))


def test_output_says_which_part() -> None:
    net, x = Returns("tuple"), torch.randn(4, 6)
    K = bs.ntk(net, x, output=lambda out: out[1], precision="float64")
    J = brute_force(net, x, output=lambda out: out[1])
    assert relative(K.tensor, torch.einsum("iap,jbp->iajb", J, J)) < 1e-12


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((3, 6), float("nan")), "NaN or infinity, first in example 0"),
        (torch.randn(0, 6), "empty"),
        ([], "gave no batch"),
        (torch.tensor(1.0), "scalar"),
        (torch.randn(3, 6).to(torch.complex64), "complex"),
        (3, "expected a tensor"),
        (["a"], "x holds <U1 values, not numbers"),
        ({"a": torch.randn(3), "b": torch.randn(4)}, "disagree"),
    ],
)
def test_bad_inputs_are_named(x: object, message: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=message):
        bs.ntk(mlp(), x)


def test_nan_deep_in_a_loader_names_the_batch() -> None:
    bad = torch.randn(4, 6)
    bad[2, 3] = float("inf")
    with pytest.raises(InputError, match="batch 1 of x has a NaN or infinity, first in example 2"):
        bs.ntk(mlp(), [torch.randn(4, 6), bad])


def test_other_bad_arguments() -> None:
    x = torch.randn(3, 6)
    with pytest.raises(InputError, match=r"x2 has examples of shape \(5,\), x of shape \(6,\)"):
        bs.ntk(mlp(), x, torch.randn(3, 5))
    with pytest.raises(InputError, match=r"no parameter or layer is called '3\.wieght'"):
        bs.ntk(mlp(), x, params="3.wieght")
    with pytest.raises(InputError, match="outputs='all'"):
        bs.ntk(mlp(), x, outputs="all")
    with pytest.raises(InputError, match="the model has 3 outputs"):
        bs.ntk(mlp(), x, outputs=3)
    with pytest.raises(InputError, match="precision='fp8'"):
        bs.ntk(mlp(), x, precision="fp8")
    with pytest.raises(InputError, match="no parameters"):
        bs.ntk(nn.ReLU(), x)
    with pytest.raises(InputError, match=r"expected an nn\.Module"):
        bs.ntk(torch.tanh, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one-shot iterator"):
        bs.Jacobian(mlp(), iter([x]))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "BatchNorm1d '1' is in train mode"),
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval(),
            "track_running_stats=False",
        ),
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), "Dropout '1' is active"),
    ],
)
def test_batch_dependence_is_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        bs.ntk(module, torch.randn(4, 6))


def test_coverage_explains_itself() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.t, self.spare = nn.Linear(6, 3), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) / self.t

    J = bs.Jacobian(Odd(), torch.randn(4, 6))
    rows = {r.parameter: r for r in J.coverage().rows}
    assert rows["a.weight"].handled_by == "layer rule"
    assert rows["t"].handled_by == "autograd fallback"
    assert "div" in rows["t"].why
    assert rows["spare"].handled_by == "zero"
    assert J.coverage().fallback == ("t",)
    assert "autograd fallback" in str(J.coverage())


def test_a_lying_backward_is_found_out() -> None:
    """A rule that misreads a layer would be wrong; the certificate sends the parameter to the fallback."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return 2 * g

    class Folded(nn.Module):
        """Folds time into the batch in the order the rule does not expect."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, t, d = x.shape
            return self.a(x.transpose(0, 1).reshape(t * n, d)).view(t, n, 3).tanh().sum(0)

    J = bs.Jacobian(Folded(), torch.randn(4, 5, 6))
    assert "disagrees" in {r.why.split(" with")[0].split(" ")[-1] for r in J.coverage().rows}

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(self.a(x)).tanh()

    net, x = Straight(), torch.randn(4, 6)
    J = bs.Jacobian(net, x, precision="float64")
    dense = brute_force(net, x)
    assert relative(J.to_dense(), dense) < 1e-12
    v = torch.randn(J.p, dtype=torch.float64)
    assert relative(J @ v, dense @ v) < 1e-12  # the reverse Jacobian, as training sees it


def test_hugging_face_models() -> None:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(1, 50, (3, 6))
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertForSequenceClassification(
        BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **small)
    ).eval()
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    pick = lambda out: out.logits[:, -1, :2]  # noqa: E731
    for model, output, pull in ((bert, None, lambda out: out.logits), (gpt, pick, pick)):
        J = brute_force(model, inputs, output=pull)
        K = bs.ntk(model, inputs, output=output, precision="float64")
        assert relative(K.tensor, torch.einsum("iap,jbp->iajb", J, J)) < 1e-10
        with_labels = dict(inputs, labels=torch.zeros(3, dtype=torch.long))
        assert torch.equal(bs.ntk(model, with_labels, output=output, precision="float64").tensor, K.tensor)
    with pytest.raises(InputError, match=r"returned a .*last_hidden_state.*output=lambda out"):
        bs.ntk(bert.bert, inputs)


def test_same_module_different_shapes_and_modes() -> None:
    """The pilot's findings are kept per input shape, not per module alone."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2))
    for s in (6, 9, 6):
        x = torch.randn(3, 1, s, s)
        J = brute_force(net, x)
        assert relative(bs.ntk(net, x, precision="float64").tensor, torch.einsum("iap,jbp->iajb", J, J)) < 1e-12


def test_kernels_of_trained_weights_follow_the_weights() -> None:
    """The cache of the pilot never keeps parameter values."""
    net, x = mlp(), torch.randn(4, 6)
    before = bs.ntk(net, x).tensor
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    J = brute_force(net, x)
    after = bs.ntk(net, x, precision="float64").tensor
    assert relative(after, torch.einsum("iap,jbp->iajb", J, J)) < 1e-12
    assert relative(before, after) > 0.1


def test_script_prints_a_kernel() -> None:
    code = """
        import torch, biascope as bs
        net = torch.nn.Linear(3, 2)
        print(bs.ntk(net, torch.ones(2, 3), outputs="trace").tensor)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout
    assert "8." in out  # (3 ones + 1 for the bias) * 2 outputs


def test_products_on_tensor_cores_keep_float32_accuracy() -> None:
    """Where Triton is: its interpreter computes what the kernel does, in float32. The GPU's digits: test_ntk_gpu.py."""
    pytest.importorskip("triton")
    code = """
    import torch
    from biascope.linalg import tensor_cores
    from biascope.linalg.tensor_core_kernel import products

    tensor_cores._compiled = lambda: products
    gen = torch.Generator().manual_seed(0)
    for m, n, p in ((200, 150, 700), (70, 300, 1500), (64, 64, 3000)):
        X, Y = torch.randn(m, p, generator=gen), torch.randn(n, p, generator=gen)
        for Z in (X, Y):
            exact = X.double() @ Z.double().T
            print(float((tensor_cores.product(X, Z) - exact).abs().max() / exact.abs().max()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    there = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=there)
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 6
    assert max(errors) < 1e-6
