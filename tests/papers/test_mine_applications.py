"""GANs, ALI and the bottleneck with MINE: the building blocks exactly, the studies at smoke size."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, binary_cross_entropy_with_logits, cross_entropy, leaky_relu

from biascope.data import load
from biascope.information import MineTerm, adaptive_clip
from biascope.studies import Chart, Run, configure, execute
from biascope.studies.claims import claims_of
from biascope.studies.judging import judgements
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope_papers.mine import bottleneck, digit_ali, planar_gans, stacked_digits
from biascope_papers.mine.ali import nearest_centre
from biascope_papers.mine.bottleneck import METHODS, Classifier
from biascope_papers.mine.digit_ali import C1, WEIGHTS, ms_ssim
from biascope_papers.mine.stacks import BETAS, PairCritic, SingleMine, Stack, StackedMine, descend
from studies.smoke_runs import Results, smoke_runs

NAMES = ("mine/fig5.3", "mine/fig5.4", "mine/fig5.6", "mine/table5.1", "mine/table5.2", "mine/table5.3")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return smoke_runs(tmp_path_factory, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    judged = judgements(run, result.numbers)
    assert judged
    assert {each.verdict for each in judged} == {"undecided"}  # a few steps learn nothing
    assert all(math.isfinite(number.value) for number in result.numbers.values())
    assert all(isinstance(chart, Chart) for chart in result.figures)
    lines = len(run.metrics())
    assert execute(Run.resume(run.path)).to_json() == result.to_json()
    assert len(run.metrics()) == lines  # nothing was trained again


@pytest.mark.slow
def test_models_that_are_asked_to_reconstruct_do(results: Results) -> None:
    numbers = results["mine/fig5.6"][1].numbers
    assert numbers["reconstruction error, ALICE (l2)"].value < numbers["reconstruction error, ALI"].value - 0.2
    gap = numbers["reconstruction error, ALI"].value - numbers["reconstruction error, ALI + MINE"].value
    assert numbers["reconstruction error, ALI - ALI + MINE"].value == pytest.approx(gap)


@pytest.mark.slow
def test_every_row_of_the_table_learns(results: Results) -> None:
    numbers = results["mine/table5.3"][1].numbers
    published = {each.number for claim in claims_of("mine/table5.3") for each in claim.published}
    assert {f"error (%), {name}" for name in METHODS} <= published <= set(numbers)
    for name in METHODS:
        assert numbers[f"error (%), {name}"].value < 60  # 90 by chance
        assert (f"estimate of I(x; z), last batch (nats), {name}" in numbers) == name.startswith("MINE")


def test_without_the_rivals_nothing_is_tested(tmp_path: Path) -> None:
    few = {"methods": ("baseline",), "n": 100, "n_test": 50, "epochs": 1}
    run = Run.create(tmp_path / "r", configure("mine/table5.3", "smoke", overrides=few))
    assert judgements(run, execute(run).numbers) == ()
    run = Run.create(tmp_path / "s", configure("mine/table5.3", "smoke", overrides=few | {"methods": ("prayer",)}))
    with pytest.raises(InputError, match="prayer"):
        execute(run)
    run = Run.create(tmp_path / "t", configure("mine/table5.3", "smoke", overrides=few | {"batch": 101}))
    with pytest.raises(InputError, match="batch=101 is more than the 100"):
        execute(run)


def test_few_images_make_a_smaller_picture() -> None:
    images = torch.linspace(-1, 1, 5)[:, None, None, None].expand(5, 1, 28, 28)
    made = stacked_digits.sheet(images)
    assert made.shape == (56, 56, 1)
    assert [float(made[y, x, 0]) for y in (0, 28) for x in (0, 28)] == [0.0, 0.25, 0.5, 0.75]  # row by row


# ---------------------------------------------------------------- data and measures


def test_true_points_score_full_marks_and_strewn_ones_do_not() -> None:
    found, near = planar_gans.modes(planar_gans.grid(2500, 1)[None])
    assert float(found) == 25
    assert float(near) == pytest.approx(1 - math.exp(-4.5), abs=0.01)  # three deviations in the plane
    covered, on = planar_gans.coverage(planar_gans.spiral(2500, 1)[None])
    assert float(covered) == 1
    assert float(on) > 0.98
    strewn = 4 * torch.rand(1, 2500, 2, generator=torch.Generator().manual_seed(0)) - 2
    assert float(planar_gans.modes(strewn)[0]) <= 1
    assert float(planar_gans.coverage(strewn)[0]) < 0.3
    assert float(planar_gans.touched(strewn)) == 25  # the lenient count cannot tell them


def test_measures_of_a_collapsed_generator() -> None:
    centres = planar_gans.centres()
    assert [float(v) for v in planar_gans.modes(centres[None, :7])] == [7.0, 1.0]
    assert float(planar_gans.touched(torch.cat([torch.zeros(99, 2), centres[:2]])[None])) == 3
    assert nearest_centre(centres[None, 3:5] + 0.1).tolist() == [[3, 4]]
    assert float(planar_gans.on_spiral(torch.tensor([1.0])).norm()) == planar_gans.RADIUS
    one = planar_gans.centres()[7].expand(1, 100, 2)
    assert float(planar_gans.modes(one)[0]) == 1
    half = planar_gans.on_spiral(torch.linspace(0.001, 0.499, 1000))[None]
    assert float(planar_gans.coverage(half)[0]) == pytest.approx(0.5, abs=0.03)


# ---------------------------------------------------------------- stacks


def alone(stack: Stack, member: int, x: Tensor) -> Tensor:
    """The same network by plain functions."""
    for i, (w, b) in enumerate(zip(stack.weights, stack.biases)):
        h = x @ w[member]
        if i + 1 == len(stack.weights):
            out: Tensor = h + b[member]
            return out
        if stack.batch_norm:
            h = batch_norm(h, None, None, stack.gains[i][member, 0], b[member, 0], training=True)
        else:
            h = h + b[member]
        x = leaky_relu(h, 0.2)
    raise AssertionError


@pytest.mark.parametrize("normed", [False, True])
def test_a_stack_is_its_networks(normed: bool) -> None:
    x = torch.randn(2, 30, 3, generator=generator(0, "x"))
    stack = Stack([3, 8, 8, 2], "leaky", [5, 6], "net", batch_norm=normed)
    for i, seed in enumerate((5, 6)):
        torch.testing.assert_close(stack(x)[i], alone(stack, i, x[i]), atol=1e-5, rtol=1e-5)
        single = Stack([3, 8, 8, 2], "leaky", [seed], "net", batch_norm=normed)
        assert torch.equal(single.weights[0][0], stack.weights[0][i])  # a member is drawn from its own seed
    assert float(stack.weights[0].detach().abs().max()) <= 1 / math.sqrt(3)


class One(nn.Module):
    """The first member of a stack of critics, as a critic of its own."""

    def __init__(self, critic: PairCritic) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.critic(x[None], y[None])
        return scores[0]


def test_stacked_mine_is_mine() -> None:
    seeds, x, y = [5, 6], *torch.randn(2, 2, 40, 2, generator=generator(1, "xy"))
    stacked = StackedMine(PairCritic(Stack([4, 8, 1], "elu", seeds, "t")), 1e-2, (0.9, 0.999), rate=0.1)
    singles = [MineTerm(One(PairCritic(Stack([4, 8, 1], "elu", [s], "t"))), lr=1e-2, rate=0.1) for s in seeds]
    for step in range(4):
        shifted = y + step * x
        values = stacked.fit(x, shifted)
        for i, term in enumerate(singles):
            assert float(values[i]) == pytest.approx(term.fit(x[i], shifted[i]), abs=1e-5)
    for i, term in enumerate(singles):
        assert float(stacked(x, y)[i].detach()) == pytest.approx(float(term(x[i], y[i]).detach()), abs=1e-5)


def test_a_single_mine_is_mine() -> None:
    x, y = torch.randn(2, 40, 1, generator=generator(1, "xy"))
    nets = [stacked_digits.StatisticsNetwork((1, 2), 1, (), "elu", generator(3, "t")) for _ in range(2)]
    images = x[:, :, None, None].expand(-1, 1, 7, 7)
    for net in nets:  # 7 x 7 images after one convolution
        net.head = nn.Sequential(nn.Flatten(), nn.Linear(32, 1))
        nn.init.constant_(net.head[1].weight, 0.1)
        nn.init.zeros_(net.head[1].bias)
    single, term = SingleMine(nets[0], 1e-2), MineTerm(nets[1], lr=1e-2)
    for step in range(4):
        assert float(single.fit(images, y + step * x)) == pytest.approx(term.fit(images, y + step * x), abs=1e-5)
    z = y.clone().requires_grad_()
    values = single(images, z), term(images, z)
    assert float(values[0].detach()) == pytest.approx(float(values[1].detach()), abs=1e-5)
    slopes = [torch.autograd.grad(value, z)[0] for value in values]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-4)


def test_information_is_clipped_member_by_member() -> None:
    stack = Stack([3, 4, 2], "elu", [1, 2], "net")
    parameters = list(stack.parameters())
    x = torch.randn(2, 10, 3, generator=generator(2, "x"))
    loss, information = stack(x).square().mean((1, 2)), torch.tensor([100.0, 1e-3]) * stack(x).sum((1, 2))
    own = torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
    mine = torch.autograd.grad(-information.sum(), parameters, retain_graph=True)
    descend(torch.optim.SGD(parameters, lr=0.0), parameters, loss, information, 0.7)
    for i in range(2):
        clipped = adaptive_clip([m[i] for m in mine], [o[i] for o in own])
        for p, o, c in zip(parameters, own, clipped):
            assert p.grad is not None
            torch.testing.assert_close(p.grad[i], o[i] + 0.7 * c)


# ---------------------------------------------------------------- GANs


def test_without_information_it_is_the_plain_gan() -> None:
    """Written again with torch's own losses, networks and gradients; nothing of MINE is there."""
    points = planar_gans.grid(500, 0)
    setting = planar_gans.Setting(steps=5, batch=20, lr=1e-3, generator_width=8, width=8, noise=2, code=2, samples=50)
    made = planar_gans.train(points, 0.0, setting, [3], 0, planar_gans.modes)
    g = Stack([4, 8, 8, 2], "leaky", [3], "generator", batch_norm=True)
    d = Stack([2, 8, 8, 8, 1], "leaky", [3], "discriminator")
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=BETAS) for net in (d, g)]
    rows, draws = generator(0, "batches"), generator(0, "latent")
    final = torch.randn(1, 50, 4, generator=generator(0, "samples"))[0]
    for _ in range(5):
        real = points[torch.randint(500, (1, 20), generator=rows)][0]
        z = torch.randn(1, 20, 4, generator=draws)[0]
        ones = torch.ones(20, 1)
        for net, optimizer in zip((d, g), optimizers):
            fake = alone(d, 0, alone(g, 0, z))
            loss = binary_cross_entropy_with_logits(fake, ones)
            if net is d:
                loss = binary_cross_entropy_with_logits(alone(d, 0, real), ones)
                loss = loss + binary_cross_entropy_with_logits(fake, 0 * ones)
            optimizer.zero_grad()
            net.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    torch.testing.assert_close(made["samples"][0], alone(g, 0, final), atol=2e-4, rtol=1e-3)
    assert float(made["nats"].abs().max()) == 0


@pytest.mark.parametrize("steps", [7, 45])
def test_the_last_measure_is_that_of_the_last_iteration(steps: int) -> None:
    setting = planar_gans.Setting(
        steps=steps, batch=10, lr=1e-3, generator_width=4, width=4, noise=1, code=1, samples=30
    )
    made = planar_gans.train(
        planar_gans.grid(100, 0), 0.0, setting, [3, 4], 0, lambda x: (x.mean((1, 2)), x.std((1, 2)))
    )
    assert made["at"][-1] == steps
    assert torch.equal(made["first"][:, -1], made["samples"].mean((1, 2)))
    assert len(set(made["at"].tolist())) == len(made["at"]) == made["nats"].shape[1]


def test_the_statistics_network_moves_the_generator_and_not_the_discriminator() -> None:
    points = planar_gans.spiral(500, 0)
    setting = planar_gans.Setting(steps=1, batch=20, lr=1e-3, generator_width=8, width=8, noise=2, code=2, samples=50)
    plain, with_mine = (
        planar_gans.train(points, beta, setting, [3, 4], 0, planar_gans.coverage) for beta in (0.0, 1.0)
    )
    assert not torch.equal(plain["samples"], with_mine["samples"])
    critic = PairCritic(Stack([4, 8, 1], "elu", [3], "t"))
    d = Stack([2, 8, 1], "leaky", [3], "d")
    fake = torch.randn(1, 10, 2, generator=generator(0, "f")).requires_grad_()
    value = StackedMine(critic, 1e-3, BETAS)(fake, torch.randn(1, 10, 2, generator=generator(0, "c")))
    assert all(g is None for g in torch.autograd.grad(value.sum(), list(d.parameters()), allow_unused=True))


# ---------------------------------------------------------------- the bottleneck


def small(**changes: float) -> bottleneck.Setting:
    values = {"epochs": 12, "batch": 50, "lr": 3e-3, "width": 32, "bottleneck": 4, "beta": 1e-3, "sigma": 0.3}
    values |= {"average": 0.9, "critic_width": 32, "critic_steps": 2, "critic_lr": 2e-3, "draws": 4}
    return bottleneck.Setting(**(values | changes))  # type: ignore[arg-type]


def test_penalties_and_divergences_are_torchs() -> None:
    x = torch.randn(2, 30, 6, generator=generator(0, "x"))
    y = torch.randint(5, (2, 30), generator=generator(0, "y"))
    for name in ("baseline", "label smoothing", "confidence penalty"):
        net = Classifier(6, 5, METHODS[name], small(), [1, 2])
        logits = net.head(net.code(x, generator(0, "e"), True)[0])
        for i in range(2):
            expected = cross_entropy(logits[i], y[i], label_smoothing=0.1 if name == "label smoothing" else 0.0)
            if name == "confidence penalty":
                expected = expected - 0.1 * torch.distributions.Categorical(logits=logits[i]).entropy().mean()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(net.penalised(logits, y)[i], expected)
    net = Classifier(6, 5, METHODS["DVB"], small(), [1, 2])
    z, kl = net.code(x, generator(0, "e"), True)
    out = net.encoder(x)
    q = torch.distributions.Normal(out[..., :4], torch.nn.functional.softplus(out[..., 4:] - 5))
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(q, prior).sum(2).mean(1))
    assert z.shape == (2, 30, 4)


def test_noise_and_dropout_are_where_they_belong() -> None:
    x = torch.randn(1, 30, 6, generator=generator(0, "x"))
    for name, method in METHODS.items():
        net = Classifier(6, 5, method, small(), [1])
        first, second = (net.code(x, generator(i, "e"), False)[0] for i in (0, 1))
        assert torch.equal(first, second) != method.stochastic, name
        trained = net.code(x, generator(0, "e"), True)[0]
        assert torch.equal(first, trained) == (name != "dropout")


def test_errors_count_the_wrong_ones() -> None:
    net = Classifier(3, 2, METHODS["baseline"], small(), [1, 2])
    x = torch.randn(40, 3, generator=generator(0, "x"))
    predicted = net.head(net.code(x.expand(2, -1, -1), generator(0, "e"), False)[0]).argmax(2)
    found = net.errors(x, predicted[0], generator(0, "e"), chunk=7)
    assert float(found[0]) == 0
    assert float(found[1]) == pytest.approx(100 * float((predicted[0] != predicted[1]).float().mean()))


@pytest.mark.slow
def test_a_higher_price_leaves_less_information() -> None:
    whole = load("digits", "train")
    some, test = whole.subset(torch.arange(600)), load("digits", "test")
    found = [
        bottleneck.train(some, test, METHODS["MINE (additive)"], small(beta=beta), [1, 2], 0) for beta in (0.0, 1.0)
    ]
    assert float(found[1]["nats"].mean()) < float(found[0]["nats"].mean()) - 0.3
    assert float(found[0]["errors"].mean()) < float(found[1]["errors"].mean())  # too high a price


def test_the_order_of_pixels_does_not_matter_to_the_baseline_at_all() -> None:
    """Permutation-invariant: with the first layer's rows moved along, nothing changes."""
    x = torch.rand(20, 9, generator=generator(0, "x"))
    order = torch.randperm(9, generator=generator(0, "p"))
    net = Classifier(9, 2, METHODS["baseline"], small(), [1])
    before = net.code(x[None], generator(0, "e"), False)[0]
    with torch.no_grad():
        net.encoder.weights[0].copy_(net.encoder.weights[0][:, order])
    torch.testing.assert_close(net.code(x[None][..., order], generator(0, "e"), False)[0], before)


# ---------------------------------------------------------------- the bound on reconstructions


@pytest.mark.parametrize("seed", range(3))
def test_reconstruction_identity_has_the_entropy_of_the_data(seed: int) -> None:
    """R = KL(q | p) - KL(q(z) | p(z)) - I_q + H_q(x); the text prints H_q(z). On tables, to rounding."""
    q, p = torch.rand(2, 3, 4, generator=generator(seed, "tables"), dtype=torch.float64)
    q, p = q / q.sum(), p / p.sum()

    def kl(a: Tensor, b: Tensor) -> float:
        return float((a * (a / b).log()).sum())

    def entropy(a: Tensor) -> float:
        return -float((a * a.log()).sum())

    q_x, q_z, p_z = q.sum(1), q.sum(0), p.sum(0)
    information = kl(q, q_x[:, None] * q_z)
    reconstruction = -float((q * (p / p_z).log()).sum())
    assert reconstruction == pytest.approx(kl(q, p) - kl(q_z, p_z) - information + entropy(q_x), abs=1e-12)
    assert reconstruction <= kl(q, p) - information + entropy(q_x)
    assert abs(reconstruction - (kl(q, p) - kl(q_z, p_z) - information + entropy(q_z))) > 1e-3


# ---------------------------------------------------------------- stacked digits


def sizes(net: nn.Module, x: Tensor, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> list[tuple[int, ...]]:
    """Shapes of what the layers of a kind give, without the batch."""
    seen: list[tuple[int, ...]] = []
    hooks = [
        m.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[1:])))
        for m in net.modules()
        if isinstance(m, kind)
    ]
    net(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_tables_c1_to_c3_shape_by_shape() -> None:
    before = torch.random.get_rng_state()
    g = stacked_digits.generator_network(64, generator(0, "g"))
    d = stacked_digits.discriminator_network(64, generator(0, "d"))
    t = stacked_digits.statistics_network(16, generator(0, "t"))
    z = torch.rand(2, 100, generator=generator(0, "z"))
    assert torch.equal(before, torch.random.get_rng_state())  # drawn from the generators given
    assert sizes(g, z, (nn.Linear, nn.ConvTranspose2d)) == [
        (2 * 2 * 512,), (256, 4, 4), (128, 7, 7), (64, 14, 14), (3, 28, 28),
    ]  # fmt: skip
    x = g(z)
    assert sizes(d, x, (nn.Conv2d, nn.Linear)) == [(64, 14, 14), (128, 7, 7), (256, 4, 4), (512, 2, 2), (1,)]
    seen: list[tuple[int, ...]] = []
    for layer in t.convolutions:
        layer.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape[1:])))
    assert t(x, z).shape == (2,)
    assert seen == [(16, 14, 14), (32, 7, 7), (64, 4, 4)]
    assert [m.out_features for m in t.head if isinstance(m, nn.Linear)] == [1024, 1]
    assert not torch.equal(t(x, z), t(x, z.flip(0)))  # z is heard


def test_modes_of_perfect_samples_are_at_the_noise_floor() -> None:
    found = [
        stacked_digits.modes_and_divergence(torch.randint(1000, (26_000,), generator=generator(i, "perfect")))
        for i in range(50)
    ]
    assert all(modes == 1000 for modes, _ in found)
    mean = sum(kl for _, kl in found) / 50
    assert mean == pytest.approx(999 / 52_000, abs=4e-4)  # 2 n KL is chi-squared, about: each is off by 0.00086
    half = torch.randint(500, (26_000,), generator=generator(9, "half"))
    modes, kl = stacked_digits.modes_and_divergence(half)
    assert modes == 500
    assert kl == pytest.approx(math.log(2) + 499 / 52_000, abs=2e-3)


@pytest.mark.slow
def test_the_classifier_reads_every_channel() -> None:
    x, y = stacked_digits.digit_images("digits", "train", "cpu")
    assert x.shape[1:] == (28, 28)
    assert -1 <= float(x.min()) < float(x.max()) <= 1
    net = stacked_digits.train_classifier(x, y, 150, 0)
    x_test, y_test = stacked_digits.digit_images("digits", "test", "cpu")
    n = len(x_test) // 3
    stacks = x_test[: 3 * n].reshape(n, 3, 28, 28)
    right = stacked_digits.classify(net, stacks) == y_test[: 3 * n].reshape(n, 3)
    assert float(right.float().mean()) > 0.9
    assert torch.equal(stacked_digits.triples(y_test[:3][None]), (y_test[:3] * torch.tensor([100, 10, 1])).sum()[None])


# ---------------------------------------------------------------- ALI on digits


def test_tables_c4_to_c7_shape_by_shape() -> None:
    before = torch.random.get_rng_state()
    f = digit_ali.Encoder(64, generator(0, "f"))
    g = digit_ali.decoder(64, generator(0, "g"))
    d = digit_ali.Discriminator(64, generator(0, "d"))
    t = digit_ali.statistics_network(64, generator(0, "t"))
    z = torch.randn(2, 128, generator=generator(0, "z"))
    x = torch.randn(2, 1, 28, 28, generator=generator(0, "x"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert sizes(g, z, (nn.Linear, nn.ConvTranspose2d)) == [(4 * 4 * 256,), (128, 7, 7), (64, 14, 14), (1, 28, 28)]
    assert f.layers[0].weight.shape == (64, 129, 5, 5)
    assert [m.out_channels for m in f.layers if isinstance(m, nn.Conv2d)] == [64, 128, 256, 256]
    assert f(x, z).shape == (2, 128)
    for net in (d, t):
        assert [m.out_channels for m in net.convolutions if isinstance(m, nn.Conv2d)] == [64, 128, 256]
        assert not torch.equal(net(x, z), net(x, z.flip(0)))
    assert d.head[0].weight.shape == (1024, 4 * 4 * 256 + 128)
    assert t.head[1].weight.shape == (1, 4 * 4 * 256)


def test_noise_in_the_encoder_is_tiled_as_maps() -> None:
    f = digit_ali.Encoder(2, generator(0, "f")).double()
    x = torch.randn(3, 1, 28, 28, generator=generator(0, "x"), dtype=torch.float64)
    noise = torch.randn(3, 128, generator=generator(0, "e"), dtype=torch.float64)
    plain = f.layers(torch.cat([x, noise[:, :, None, None].expand(-1, -1, 28, 28)], 1))
    torch.testing.assert_close(f(x, noise), plain, rtol=1e-9, atol=1e-10)


def test_structural_similarity_in_closed_form() -> None:
    x = torch.rand(4, 1, 28, 28, generator=generator(0, "x"), dtype=torch.float64)
    assert ms_ssim(x, x).tolist() == pytest.approx([1.0] * 4)
    a, b = (torch.full((1, 1, 28, 28), v, dtype=torch.float64) for v in (0.3, 0.7))
    brightness = (2 * 0.3 * 0.7 + C1) / (0.3**2 + 0.7**2 + C1)  # flat images have no structure; two scales
    assert float(ms_ssim(a, b)) == pytest.approx(brightness ** (WEIGHTS[1] / (WEIGHTS[0] + WEIGHTS[1])), rel=1e-6)
    noisy = [float(ms_ssim(x, (x + s * x.flip(0)) / (1 + s)).mean()) for s in (0.1, 0.5, 2.0)]
    assert noisy == sorted(noisy, reverse=True)
    assert len(WEIGHTS) == 5
