"""`mutual_information`: closed forms, what is and what is not a bound, seeds, refusals and notes."""

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.information import EstimateWarning, MutualInformation, mutual_information
from biascope.information.critics import Encoder, JointCritic, SeparableCritic, all_scores, block_scores
from biascope.information.pairs import Training, split_pairs
from biascope.information.problems import (
    Problem,
    discrete_problem,
    gaussian_problem,
    mixture_problem,
    noisy_function_problem,
    sign_mixture_problem,
)
from biascope.support.errors import BiascopeError, InputError

pytestmark = pytest.mark.filterwarnings("ignore::biascope.information.EstimateWarning")  # short trainings say so

NEURAL = ("mine", "mine-f", "nwj", "infonce", "smile")
BOUNDS = {"mine", "mine-f", "nwj", "infonce"}


class Optimal(nn.Module):
    """The log density ratio of a problem, moved by a constant."""

    def __init__(self, problem: Problem, shift: float = 0.0) -> None:
        super().__init__()
        self.problem, self.shift = problem, shift

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.problem.log_ratio(x, y) + self.shift


def estimate(problem: Problem, n: int, estimator: str = "mine", seed: int = 0, **options: object) -> MutualInformation:
    return mutual_information(*problem.sample(n, 1), estimator, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", NEURAL)
@pytest.mark.parametrize("problem", [gaussian_problem(1, 0.8), gaussian_problem(3, 0.5)], ids=lambda p: p.name)
def test_the_optimal_critic_without_training(problem: Problem, estimator: str) -> None:
    shift = 1.0 if estimator == "mine-f" else 0.0
    wide = {"clip": 20.0} if estimator == "smile" else {}
    found = estimate(problem, 20_000, estimator, critic=Optimal(problem, shift), steps=0, **wide)
    assert abs(found.nats - problem.nats) < 3 * found.standard_error
    assert found.standard_error < 0.03
    assert found.is_lower_bound == (estimator in BOUNDS)
    assert len(found.curve) == 0
    if estimator == "mine":  # the constant does not matter; the plug-in is never below the tangent
        moved = estimate(problem, 20_000, estimator, critic=Optimal(problem, 5.0), steps=0)
        assert moved.nats == pytest.approx(found.nats, abs=1e-9)
        assert found.plug_in is not None
        assert found.plug_in >= found.nats


@pytest.mark.parametrize("estimator", ["mine", "infonce"])
def test_standard_errors_are_the_spread_over_data_sets(estimator: str) -> None:
    problem = gaussian_problem(2, 0.7)
    given = {"critic": Optimal(problem), "steps": 0, "batch_size": 50}
    found = [mutual_information(*problem.sample(1200, seed), estimator, **given) for seed in range(60)]  # type: ignore[arg-type]
    nats = torch.tensor([f.nats for f in found])
    told = torch.tensor([f.standard_error for f in found]).square().mean().sqrt()
    assert 0.7 < float(told / nats.std()) < 1.4  # the spread itself is known to 9 %
    assert float(nats.mean()) < problem.nats + 3 * float(nats.std()) / math.sqrt(60)  # a lower bound in expectation


@pytest.mark.parametrize("estimator", ["mine", "nwj", "infonce", "smile"])
def test_standard_errors_are_the_spread_for_few_pairs_too(estimator: str) -> None:
    """50 held-out pairs in blocks of two: logarithms of the blocks' own means made smile's error twice too large."""
    problem = gaussian_problem(1, 0.8)
    critic = Optimal(problem)
    found = [
        mutual_information(*problem.sample(200, seed), estimator, seed=seed, critic=critic, steps=0)  # type: ignore[arg-type]
        for seed in range(150)
    ]
    told = torch.tensor([f.standard_error for f in found]).square().mean().sqrt()
    spread = torch.tensor([f.nats for f in found]).std()
    assert 0.75 < float(told / spread) < 1.3  # the spread itself is known to 6 %, and e^T has a long tail


@pytest.mark.parametrize("estimator", NEURAL)
def test_trained_on_correlated_gaussians(estimator: str) -> None:
    problem = gaussian_problem(1, 0.8)
    found = estimate(problem, 8000, estimator, steps=300)
    assert abs(found.nats - problem.nats) < 3 * found.standard_error + 0.02
    assert 30 <= len(found.curve) == len(found.steps) <= 50
    assert int(found.steps[-1]) == 300
    assert found.n == 8000
    assert found.n_held_out <= 2000
    assert found.bits == pytest.approx(found.nats / math.log(2))


@pytest.mark.parametrize("estimator", [*NEURAL, "ksg"])
def test_independence_gives_zero(estimator: str) -> None:
    x, y = torch.randn(2, 10_000, 1, generator=torch.Generator().manual_seed(0))
    options = {} if estimator == "ksg" else {"steps": 100}
    found = mutual_information(x, y, estimator, **options)  # type: ignore[arg-type]
    assert abs(found.nats) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "rho"), [(1, 0.3), (1, -0.9), (2, 0.5), (2, 0.9)])
def test_mine_in_few_dimensions_to_five_per_cent(dim: int, rho: float) -> None:
    problem = gaussian_problem(dim, rho)
    found = estimate(problem, 40_000, "mine", steps=500)
    assert abs(found.nats - problem.nats) < max(0.05 * problem.nats, 0.02)


@pytest.mark.slow
def test_mine_in_twenty_dimensions_is_below_the_truth_and_above_neighbours() -> None:
    problem = gaussian_problem(20, 0.5)
    found = estimate(problem, 60_000, "mine", steps=1800, batch_size=512)
    assert 2.3 <= found.nats <= 2.95
    with pytest.warns(EstimateWarning, match="columns"):
        neighbours = estimate(problem, 3000, "ksg")
    assert neighbours.nats < 1.2


@pytest.mark.slow
def test_increasing_maps_of_a_column_do_not_matter() -> None:
    values = [
        estimate(gaussian_problem(1, 0.9, transform), 4000, steps=150).nats  # type: ignore[arg-type]
        for transform in ("identity", "cubic", "tanh")
    ]
    assert values[1:] == pytest.approx([values[0]] * 2, rel=0.05)


@pytest.mark.slow
def test_symmetry_and_noise() -> None:
    values = []
    for sigma in (0.9, 0.3):
        x, y = noisy_function_problem("sine", sigma).sample(4000, 0)
        one, two = mutual_information(x, y, steps=150), mutual_information(y, x, steps=150)
        assert abs(one.nats - two.nats) < 3 * (one.standard_error + two.standard_error)
        values.append(one.nats)
    assert values[1] > values[0] + 0.3


@pytest.mark.parametrize("estimator", ["mine", "infonce"])
def test_labels(estimator: str) -> None:
    mixture, table = mixture_problem(3, 2.0), discrete_problem(torch.tensor([[0.4, 0.1], [0.05, 0.45]]))
    for problem in (mixture, table):
        found = estimate(problem, 4000, estimator, steps=150)
        assert abs(found.nats - problem.nats) < 3 * found.standard_error + 0.03, problem.name
    x, y = mixture.sample(2000, 0)
    flags = estimate(Problem("flags", 0.0, lambda n, seed: (x, y > 0), mixture.log_ratio), 0, estimator, steps=60)
    assert 0 < flags.nats < math.log(2)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["mine", "infonce"])
def test_dependence_without_correlation(estimator: str) -> None:
    problem = sign_mixture_problem(0.9)
    found = estimate(problem, 6000, estimator, steps=500, lr=2e-3)
    assert abs(found.nats - problem.nats) < 3 * found.standard_error + 0.02


def test_any_shape() -> None:
    x, y = gaussian_problem(4, 0.5).sample(1000, 0)
    flat = mutual_information(x, y, steps=40)
    assert mutual_information(x.view(1000, 1, 2, 2), y.view(1000, 4, 1), steps=40).nats == flat.nats
    one = mutual_information(x[:, 0].float(), y[:, 0].half(), steps=40)
    assert math.isfinite(one.nats)


class Noisy(nn.Module):
    """A critic of images with dropout, which draws from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[1:] == (1, 2, 2)  # as given
        scores: Tensor = self.head(torch.cat([self.body(x), y], 1))
        return scores


def test_a_given_critic_is_not_touched_and_seeds_decide_everything() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(1000, 1, 2, 2, generator=rng), torch.randn(1000, 1, generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = Noisy()
    weights = copy.deepcopy(critic.state_dict())
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EstimateWarning)
        first = mutual_information(x, y, "nwj", critic=critic, steps=30, seed=5)
        with torch.no_grad():  # trains all the same
            again = mutual_information(x, y, "nwj", critic=critic, steps=30, seed=5)
        other = mutual_information(x, y, "nwj", critic=critic, steps=30, seed=6)
    assert torch.equal(state, torch.get_rng_state())
    assert critic.training
    assert all(torch.equal(weights[name], value) for name, value in critic.state_dict().items())
    assert all(p.grad is None for p in critic.parameters())
    assert first.nats == again.nats
    assert torch.equal(first.curve, again.curve)
    assert first.nats != other.nats
    assert first.critic is not critic


@pytest.mark.parametrize("estimator", NEURAL)
def test_seeds_and_the_global_generator(estimator: str) -> None:
    problem, state = gaussian_problem(2, 0.6), torch.get_rng_state()
    runs = [estimate(problem, 600, estimator, seed, steps=20) for seed in (0, 0, 1)]
    assert runs[0].nats == runs[1].nats
    assert runs[0].nats != runs[2].nats
    assert torch.equal(state, torch.get_rng_state())


def test_the_trained_critic_can_be_used_and_inputs_keep_no_gradients() -> None:
    x, y = gaussian_problem(1, 0.8).sample(4000, 0)
    x = x.requires_grad_()
    with torch.inference_mode():
        found = mutual_information(x, y, "nwj", steps=300)
    assert x.grad is None
    assert found.critic is not None
    T = found.critic(x.detach(), y)
    truth = gaussian_problem(1, 0.8).log_ratio(x.detach(), y)
    assert T.shape == (4000,)
    assert float(torch.corrcoef(torch.stack([T.double().detach(), truth]))[0, 1]) > 0.9


def test_the_cap_of_infonce_is_said() -> None:
    with pytest.warns(EstimateWarning, match=r"cap log K = 2.773, K = 16"):
        found = estimate(gaussian_problem(5, 0.95), 4000, "infonce", batch_size=16, steps=300)
    assert found.cap == pytest.approx(math.log(16))
    assert 0.9 * math.log(16) < found.nats <= math.log(16)
    assert "cap" in str(found)


def test_exploding_variance_is_said() -> None:
    problem = gaussian_problem(20, 0.9)
    with pytest.warns(EstimateWarning, match="variance explodes"):
        found = estimate(problem, 1000, "nwj", critic=Optimal(problem), steps=0)
    assert any("exceed log(250)" in note for note in found.notes)


def curve_of(values: Tensor) -> Training:
    return Training(nn.Identity(), values.double(), torch.arange(len(values)), 0)


def test_a_rising_curve_is_seen_and_a_flat_or_noisy_one_is_not() -> None:
    t = torch.arange(50)
    noise = 0.01 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert curve_of(0.02 * t + noise).still_rising()
    assert not curve_of(1 - torch.exp(-t / 3.0) + noise).still_rising()
    assert not curve_of(5 * noise).still_rising()
    assert not curve_of(t[:5]).still_rising()
    assert curve_of(torch.where(t < 25, 0.1 * t, 5 - 0.1 * t) + noise).fell() > 1
    assert curve_of(1 - torch.exp(-t / 3.0) + noise).fell() < 0.02
    with pytest.warns(EstimateWarning, match="not converged"):
        estimate(gaussian_problem(2, 0.9), 4000, steps=50, lr=2e-4)


def test_overfitting_is_said_and_stays_below_the_truth() -> None:
    problem = gaussian_problem(20, 0.5)
    with pytest.warns(EstimateWarning, match="overfitted"):
        found = estimate(problem, 400, "infonce", steps=150)
    assert found.nats < problem.nats


def test_refusals_name_the_culprit() -> None:
    x, y = torch.randn(2, 200, 2, generator=torch.Generator().manual_seed(0))
    nan = y.clone()
    nan[3] = math.inf
    for given, match in (
        ((x[:99], y[:99]), "99 pairs are too few"),
        ((x, y[:100]), r"x is \[200, 2\] on cpu, y is \[100, 2\] on cpu: need \[n, ...\] with one n"),
        ((x, nan), "y has NaN or infinite values in 1 rows, first in row 3"),
        ((x, y.to(torch.complex64)), "y is complex"),
        ((x, (10 * y).long()), r"integers are read as labels.*y.float\(\)"),
        ((torch.arange(200), y), r"read as labels.*many are equal; pass x.float\(\)"),
        ((x, torch.empty(200, 0)), "at least one feature"),
        ((x, y.to("meta")), "one device"),
    ):
        with pytest.raises(InputError, match=match):
            mutual_information(*given)  # type: ignore[arg-type]
    for options, match in (
        ({"estimator": "kde"}, "estimator='kde' is not known; there is infonce, ksg, mine, mine-f"),
        ({"estimator": "ksg", "critic": nn.Identity()}, "ksg does not use critic"),
        ({"steps": -1}, "steps"),
        ({"steps": 0}, "pass critic="),
        ({"critic": lambda a, b: a}, "critic: expected an nn.Module, got function"),
        ({"critic": nn.Bilinear(2, 2, 3)}, r"Bilinear gave \[512, 3\]|Bilinear gave \[\d+, 3\]"),
        ({"held_out": 0.9}, "held_out"),
        ({"ema_rate": 0.0}, "rate"),
        ({"ema_rate": 7.0}, "rate"),
        ({"lr": math.nan}, "lr > 0"),
        ({"lr": math.inf}, "lr > 0"),
        ({"batch_size": 1}, "batch_size >= 2"),
        ({"estimator": "smile", "clip": -3.0}, "clip=-3.0: a finite number above 0"),
        ({"estimator": "smile", "clip": math.nan}, "clip=nan"),
        ({"estimator": "ksg", "k": 0}, "k must be at least 1"),
        ({"k": -1}, "mine does not use k; leave it out, or choose one that does: ksg"),
        ({"clip": -3.0}, "mine does not use clip.*: smile"),
        ({"estimator": "infonce", "ema_rate": 7.0}, "infonce does not use ema_rate"),
        ({"estimator": "nwj", "ema_rate": math.nan}, "nwj does not use ema_rate"),
        ({"estimator": "ksg", "steps": -5}, "ksg does not use steps"),
        ({"estimator": "ksg", "batch_size": 0}, "ksg does not use batch_size"),
        ({"estimator": "ksg", "lr": 0.1}, "ksg does not use lr"),
        ({"estimator": "ksg", "held_out": 0.5}, "ksg does not use held_out"),
    ):
        with pytest.raises(InputError, match=match):
            mutual_information(x, y, **options)  # type: ignore[arg-type]


def test_options_at_their_defaults_are_never_refused() -> None:
    x, y = gaussian_problem(1, 0.5).sample(200, 0)
    plain = mutual_information(x, y, "ksg").nats
    assert mutual_information(x, y, "ksg", steps=0, batch_size=256, lr=1e-3, clip=5.0, ema_rate=0.01).nats == plain
    assert mutual_information(x, y, "ksg", k=5).nats != plain


def test_divergence_is_an_error() -> None:
    with pytest.raises(BiascopeError, match="diverged"):
        estimate(gaussian_problem(2, 0.5), 200, "nwj", steps=50, lr=1e4)


def test_split_shares_nothing() -> None:
    parts = split_pairs(1000, 0.2, 0, torch.device("cpu"))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    assert [len(part) for part in parts] == [700, 100, 200]


def test_no_pair_meets_itself() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x == y).double()[:, 0]

    x = torch.arange(23.0)[:, None]
    joint, marginal = block_scores(Same(), x, x, 5, 4)
    assert joint.shape == (4, 5)
    assert marginal.shape == (4, 5, 4)
    assert bool((joint == 1).all())
    assert bool((marginal == 0).all())
    index = torch.arange(20.0).view(4, 5)

    class Second(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y[:, 0]

    drawn = block_scores(Second(), x, x, 5, 4)[1]
    assert torch.equal(drawn.sort(-1).values[0, 0], torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    assert torch.equal(drawn.sum((1, 2)), 4 * index.sum(1).double())  # every partner equally often


def test_all_pairs_by_either_way() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=rng), torch.randn(20, 2, generator=rng)
    joint, separable = JointCritic(3, 2), SeparableCritic(3, 2)
    for critic in (joint.requires_grad_(False), separable.requires_grad_(False)):
        grid = all_scores(critic, x, y)
        assert grid.shape == (30, 20)
        assert float(grid[7, 11]) == pytest.approx(float(critic(x[7:8], y[11:12])), abs=1e-5)


def test_normal_scores() -> None:
    assert Encoder(torch.arange(101.0) ** 3)(torch.tensor([50.0**3])).abs().item() < 1e-6  # the median
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=rng, dtype=torch.float64)
    encode = Encoder(x)
    assert float((encode(x)[:, 0] - x).abs().median()) < 0.02  # already normal
    assert torch.allclose(encode(x)[:, 0].double(), Encoder(x**3)(x**3)[:, 0].double(), atol=0.05)
    assert bool((encode(torch.tensor([-99.0, -1.0, 0.0, 1.0, 99.0]))[:, 0].diff() > 0).all())
    two = torch.stack([torch.full((100,), 3.0), (torch.arange(100) % 4 == 0).float()], 1)
    scores = Encoder(two)(two)
    assert float(scores[:, 0].abs().max()) < 1e-12  # a constant says nothing
    assert len(scores[:, 1].unique()) == 2
    assert Encoder(torch.tensor([2, 5]))(torch.tensor([5, 3])).tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_result_shows_itself() -> None:
    found = bs.mutual_information(*gaussian_problem(1, 0.5).sample(500, 0), estimator="mine", seed=0, steps=50)
    assert isinstance(found, bs.information.MutualInformation)
    assert "nats" in str(found)
    assert "lower bound in expectation" in str(found)
    assert "Donsker-Varadhan, plug-in" in found._repr_html_()
    assert "curve" not in repr(found)
    figure = found.plot()
    assert figure.axes[0].get_ylabel() == "mutual information (nats)"
    lines = figure.axes[0].get_lines()
    assert list(lines[0].get_ydata()) == found.curve.tolist()
    assert mutual_information(*gaussian_problem(1, 0.5).sample(500, 0), "ksg").plot() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("estimator", [*NEURAL, "ksg"])
def test_on_a_gpu(estimator: str) -> None:
    problem = gaussian_problem(1, 0.8)
    x, y = (v.cuda() for v in problem.sample(8000, 1))
    state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    options = {} if estimator == "ksg" else {"steps": 300}
    found = mutual_information(x, y, estimator, **options)  # type: ignore[arg-type]
    assert abs(found.nats - problem.nats) < 3 * found.standard_error + 0.03
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(cuda, torch.cuda.get_rng_state())


def test_warnings_point_at_the_caller():
    x = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    with pytest.warns(EstimateWarning) as said:
        bs.mutual_information(x, x, steps=20)
    assert {w.filename for w in said if issubclass(w.category, EstimateWarning)} == {__file__}
