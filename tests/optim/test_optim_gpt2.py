"""GPT-2's Conv1D, a linear layer whose weight is stored as [inputs, outputs], is stepped as a linear layer is."""

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.optim.layers import Leading, Whole
from optim.optim_oracle import backward, error, rng, seeded

Conv1D = pytest.importorskip("transformers").pytorch_utils.Conv1D
KINDS = [bs.optim.KFAC, bs.optim.EKFAC, bs.optim.SuperNat]


class Tokens(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.inner, self.out, self.head = nn.Linear(4, wide), nn.Linear(wide, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.out(torch.tanh(self.inner(x)))).mean(1))


def twins(wide):
    """The same function twice; in the second one two layers are Conv1D."""
    one, two = seeded(lambda: Tokens(wide)), seeded(lambda: Tokens(wide))
    for name in ("inner", "out"):
        old = getattr(one, name)
        new = Conv1D(old.out_features, old.in_features).double()
        new.weight.data, new.bias.data = old.weight.detach().T.clone(), old.bias.detach().clone()
        setattr(two, name, new)
    return one, two


def batch(seed):
    return torch.randn(6, 3, 4, generator=rng(seed), dtype=torch.float64), torch.randint(3, (6,), generator=rng(seed))


def apart(one, two):
    """The largest relative difference of a parameter."""
    pairs = zip(one.named_parameters(), two.parameters(), strict=True)
    return max(error(q.T if name in {"inner.weight", "out.weight"} else q, p) for (name, p), q in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wide", "made"), [(5, Whole), (60, Leading)])
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "damping": 0.05, "refresh_every": 2}])
def test_the_steps_of_a_linear_layer(kind, wide, made, options):
    if kind is bs.optim.SuperNat and options:
        pytest.skip("SuperNat takes no damping")
    one, two = twins(wide)
    start = twins(wide)[0]
    opts = [kind(net, **options) for net in (one, two)]
    for i in range(6):
        for net, opt in zip((one, two), opts, strict=True):
            opt.zero_grad()
            backward(net, *batch(i))
            opt.step()
        if i == 2:  # resumed in the middle
            state, opts[1] = opts[1].state_dict(), kind(two, **options)
            opts[1].load_state_dict(state)
    assert apart(one, two) < 1e-9  # eigenvectors of products summed in another order
    assert apart(start, two) > 1e-3
    assert {opts[1].coverage()[name] for name, _ in two.named_parameters()} == {kind.__name__.lower()}
    if not options:
        assert isinstance(opts[1].preconditioner.layers["out.weight"], made)


@pytest.mark.parametrize("widest", [3, 5])
def test_a_wide_one_is_known_by_its_inputs(widest):
    """60 outputs of 4 inputs are not wide, with a diagonal factor, but 60 inputs are."""
    one, two = twins(60)
    opts = [bs.optim.KFAC(net, lr=0.1, damping=0.05, widest=widest) for net in (one, two)]
    for net, opt in zip((one, two), opts, strict=True):
        backward(net, *batch(0))
        opt.step()
    assert apart(one, two) < 1e-9
    assert [unit.diagonal for unit in opts[1].preconditioner.units] == [widest == 3, True, widest == 3]


def test_gpt2_is_covered():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, bos_token_id=0, eos_token_id=0))

    opt, ids = bs.optim.EKFAC(net), torch.randint(20, (4, 8), generator=rng())
    net(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    ways = opt.coverage()
    assert {ways[f"transformer.h.0.{name}.weight"] for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")} == {"ekfac"}
    names = [name for name, _ in net.named_parameters()]
    assert {name for name in names if ways[name] == "adam"} == {
        name for name in names if ".ln_" in name or name == "transformer.wte.weight"
    }
