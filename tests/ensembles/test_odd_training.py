"""Training of networks and data that are a little out of the ordinary: the same as by torch, or refused by name."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from biascope.ensembles import outputs, record, train_ensemble
from biascope.ensembles.engines import takes_channels_last
from biascope.geometry import average_geometry, nads
from biascope.geometry.dipole import dipole_derivatives
from biascope.support.errors import InputError, UnsupportedError

RNG = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=RNG)
Y = (X[:, 0] > 0).long()
IMAGES = torch.randn(20, 3, 4, 4, generator=RNG)
CLASSES = torch.arange(20) % 2
WORDS = torch.randint(0, 9, (20, 5), generator=RNG)


class Skip(nn.Module):
    """The ReLU in place changes what the skip sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(40, 2)
        self.down = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        down = self.down(h)
        out: Tensor = self.head(torch.cat([down.flatten(1), h.flatten(1)], 1))
        return out


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.layer(x)
        return out


def trained(factory: Any, tasks: Any, **options: Any) -> dict[str, Tensor]:
    """Losses [T, steps] of both engines."""
    return {e: train_ensemble(factory, tasks, epochs=2, batch_size=8, engine=e, **options).losses  # type: ignore[arg-type]
            for e in ("loop", "vmap")}  # fmt: skip


def padded() -> nn.Module:
    """Word 0 is padding, whose vector is never trained."""
    return nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 2))


@pytest.mark.parametrize(("factory", "data"), [(Skip, (IMAGES, CLASSES)), (Scaled, (X, Y)), (padded, (WORDS, CLASSES))])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_both_engines_train_alike(factory: Any, data: tuple[Tensor, Tensor], clip: float | None) -> None:
    found = trained(factory, [data] * 3, dtype=torch.float64, clip_norm=clip)
    assert torch.allclose(found["loop"], found["vmap"], rtol=1e-5)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_padding_is_never_trained(engine: Literal["loop", "vmap"]) -> None:
    """Under vmap torch keeps the padding row of the first table alone; those of all other networks were trained."""
    done = train_ensemble(padded, [(WORDS, CLASSES)] * 3, epochs=2, batch_size=8, engine=engine, momentum=0.9)
    assert done.networks is not None
    vectors = done.networks.params["0.weight"]
    assert float(vectors[:, 0].abs().max()) == 0
    assert float((vectors - record(padded).draw(0, 0, 3).params["0.weight"])[:, 1:].abs().amin(dim=(1, 2)).min()) > 0


class Asking(nn.Module):
    """Goes another way where gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return 2 * out if out.requires_grad else out


class Reversed(Asking):
    """The gradient of what is below its last layer is turned round, by a hook."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.below = by, nn.Linear(3, 3)
        if by == "layer":
            self.layer.register_full_backward_hook(lambda part, given, got: (-given[0],))  # type: ignore[index, operator]
        elif by == "parameter":
            self.below.weight.register_hook(torch.neg)
        elif by == "parameter, after":
            self.below.weight.register_post_accumulate_grad_hook(lambda p: p.grad.neg_())

    def forward(self, x: Tensor) -> Tensor:
        below: Tensor = self.below(x)
        if self.by == "activation" and below.requires_grad:
            below.register_hook(torch.neg)
        return super().forward(below)


def test_layers_that_ask_for_gradients_get_the_same_answer_under_vmap() -> None:
    found = trained(Asking, [(X, Y)] * 3, dtype=torch.float64)
    assert torch.allclose(found["loop"], found["vmap"], rtol=1e-5)


@pytest.mark.parametrize("by", ["layer", "activation"])
def test_hooks_that_change_gradients_are_not_skipped_by_vmap(by: str) -> None:
    """torch skips them there; trained by vmap, such networks went the other way."""
    options: dict[str, Any] = {"epochs": 1, "batch_size": 40, "clip_norm": None}
    done = train_ensemble(lambda: Reversed(by), [(X, Y)], engine="loop", **options)
    start, net = record(lambda: Reversed(by)).draw(0, 0, 1), record(lambda: Reversed("nothing")).draw(0, 0, 1).module(0)
    assert done.networks is not None
    nn.functional.cross_entropy(net(X), Y).backward()
    moved = (done.networks.params["below.weight"] - start.params["below.weight"])[0]
    assert torch.allclose(moved, 0.5 * net.below.weight.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr, operator]
    with pytest.raises(UnsupportedError, match=r"vmap cannot train Reversed .*; use engine='loop'"):
        train_ensemble(lambda: Reversed(by), [(X, Y)] * 2, engine="vmap", **options)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("by", ["parameter", "parameter, after"])
def test_hooks_of_parameters_are_refused(by: str, engine: Literal["loop", "vmap"]) -> None:
    with pytest.raises(UnsupportedError, match=r"'below\.weight' has a hook on its gradient"):
        train_ensemble(lambda: Reversed(by), [(X, Y)], engine=engine)


class Classic(nn.Module):
    """`view` asks for the plain order of images."""

    def __init__(self, outputs_count: int = 2) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(16, outputs_count)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu()
        out: Tensor = self.head(h.view(h.size(0), -1))
        return out


def test_networks_that_need_the_plain_order_of_images() -> None:
    assert not takes_channels_last(Classic(), IMAGES)
    assert takes_channels_last(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)), IMAGES)
    done = train_ensemble(Classic, [(IMAGES, CLASSES)] * 2, test=[(IMAGES, CLASSES)] * 2, epochs=1)
    assert torch.equal(done.train_accuracy, done.test_accuracy)
    drawn = record(Classic).draw(0, 0, 3)
    expected = torch.stack([drawn.module(i)(IMAGES) for i in range(3)])
    assert torch.allclose(outputs(drawn, IMAGES), expected, atol=1e-5)
    assert len(nads(lambda: Classic(1), (3, 4, 4), 4).eigenvalues) == 48


def test_labels_keep_their_kind() -> None:
    """Shares that follow classes were cut to whole numbers in the tensors of the group before."""
    rng = torch.Generator().manual_seed(0)
    tasks = [(X, Y), (X, torch.rand(40, generator=rng))]
    losses = {
        name: train_ensemble(lambda: nn.Linear(3, 1), tasks, loss="bce", epochs=1, **options).losses  # type: ignore[arg-type]
        for name, options in {"loop": {"engine": "loop"}, "vmap": {"engine": "vmap", "together": 1}}.items()
    }
    assert torch.allclose(losses["loop"], losses["vmap"], rtol=1e-4)
    with pytest.raises(InputError, match="tasks trained together must be of one"):
        train_ensemble(lambda: nn.Linear(3, 1), tasks, loss="bce", epochs=1, engine="vmap", together=2)


def test_bce_is_for_one_logit_in_any_shape() -> None:
    with pytest.raises(InputError, match="one logit, not 2"):
        train_ensemble(lambda: nn.Linear(3, 2), [(X, Y)], loss="bce")

    class Flat(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).squeeze(-1)

    flat, column = (trained(lambda kind=kind: kind(3, 1), [(X, Y)] * 2, loss="bce") for kind in (Flat, nn.Linear))
    for engine in ("loop", "vmap"):
        assert torch.allclose(flat[engine], column[engine], rtol=1e-5)


def test_outputs_that_hold_logits() -> None:
    class Holding(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(input))

    held, plain = (trained(lambda kind=kind: kind(3, 2), [(X, Y)] * 2) for kind in (Holding, nn.Linear))
    assert torch.allclose(held["loop"], plain["loop"], rtol=1e-5)


def test_a_loss_of_many_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="the loss of a batch of 40 gave a tensor"):
        train_ensemble(lambda: nn.Linear(3, 1), [(X, Y)], loss=lambda out, y: (out[:, 0] - y) ** 2)


def test_what_vmap_cannot_train_names_the_engine_that_can() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.memory(x[..., None])[0][:, -1])
            return out

    with pytest.raises(UnsupportedError, match=r"vmap cannot train Recurrent .*; use engine='loop'"):
        train_ensemble(Recurrent, [(X, Y)] * 2, epochs=1, engine="vmap")
    assert train_ensemble(Recurrent, [(X, Y)] * 2, epochs=1).engine == "loop"


def test_images_of_outputs_keep_their_shape_for_the_loss() -> None:
    pixels = (IMAGES[:, 0] > 0).long()
    found = trained(lambda: nn.Conv2d(3, 2, 3, padding=1), [(IMAGES, pixels)] * 2)
    assert torch.allclose(found["loop"], found["vmap"], rtol=1e-4)
    assert float(found["loop"][:, -1].mean()) < float(found["loop"][:, 0].mean())
    with pytest.raises(InputError, match="labels from 0 to 5, but the network has 2 outputs"):
        train_ensemble(lambda: nn.Conv2d(3, 2, 3, padding=1), [(IMAGES, 5 * pixels)])


def test_scripted_networks_and_scalars_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="TorchScript"):
        record(lambda: torch.jit.script(nn.Linear(3, 1)))
    with pytest.raises(InputError, match=r"scalarise failed on outputs \[\d+, 2\], .*IndexError"):
        nads(lambda: nn.Linear(3, 2), (3,), 4, scalarise=lambda out: out[:, 0, 4])
    with pytest.raises(InputError, match=r"give a dict \{'x': ..., 'z': ...\}"):
        nads(Two, (3,), 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * z
        return out


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_gradients_that_are_off_outside_are_on_in_training(engine: Literal["loop", "vmap"]) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    tasks = [(x, (x[:, 0] > 0).long())] * 2

    def losses() -> Tensor:
        return train_ensemble(lambda: nn.Linear(3, 2), tasks, epochs=2, batch_size=4, engine=engine).losses

    with torch.no_grad():
        assert torch.equal(losses(), losses())
        without = losses()
    assert torch.equal(without, losses())
    with torch.inference_mode(), pytest.raises(InputError, match=r"Use torch\.no_grad instead"):
        losses()


def test_inference_mode_is_refused_by_name() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    for use in (
        lambda: nads(build, (3,), 4, "autograd"),
        lambda: nads(build, (3,), 4, head="marginal"),
        lambda: average_geometry(build, (3,), 4),
        lambda: dipole_derivatives(build, torch.ones(3), torch.ones(3), n_networks=2),
    ):
        with torch.inference_mode(), pytest.raises(InputError, match=r"Use torch\.no_grad instead"):
            use()
