"""The studies of task arithmetic at smoke size, on one set of networks, and their building blocks."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from biascope import nets
from biascope.editing import TaskVector, disentanglement
from biascope.editing.zeroshot import contrastive_loss
from biascope.reports import write_study_page
from biascope.studies import HeatMap, Run, StudyResult, configure, execute
from biascope.studies.claims import claims
from biascope.studies.judging import judgements
from biascope.studies.rejudge import rejudge
from biascope.support.errors import CorruptError, InputError
from biascope_papers.editing.ingredients import SIZE, Counts, encoder, prompts, stored, task_images
from biascope_papers.editing.measures import (
    Accuracies,
    Maps,
    accuracies,
    contrast,
    contrasts,
    energies,
    heat_maps,
    maps,
    paired,
    share,
    share_kept,
    spoken,
)
from biascope_papers.editing.stand_in import METHODS, Aligned, Networks, Setting, networks, store

CONTROL = "share of the gain kept, pre-trained minus random, fine-tuned"
Results = dict[str, tuple[Run, StudyResult]]
NAMES = (
    "fig6.2", "fig6.7", "figD.1", "table6.1", "fig6.3", "table6.2", "fig6.4", "fig6.8", "fig6.5", "fig6.9", "table6.3",
    "fig6.10", "figD.3",
)  # fmt: skip
TINY = Setting(
    tasks=("digits", "digits/inverted"), control="digits/mirrored", beside=(), towers="drawn", side=32, shown=20,
    tune=100, held=60, test=60, pretrain_steps=20, pretrain_batch=32, pretrain_lr=2e-3, steps=8, lr=1e-3, batch=32,
    seeds=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of its own: nothing is taken from the user's, nothing is left there."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIASCOPE_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    return Run.create(home / "run", {"study": "x", "seed": 0})


@pytest.fixture(scope="module")
def results(home: Path) -> Results:
    made = {}
    for name in NAMES:
        run = Run.create(home / "runs" / name, configure(f"editing/{name}", "smoke", seed=0))
        made[name] = (run, execute(run))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    assert "Stand-in: not CLIP." in result.measured
    assert all(math.isfinite(number.value) for number in result.numbers.values())
    assert any(number.standard_error is not None for number in result.numbers.values())
    assert len({figure.name for figure in result.figures}) == len(result.figures) > 0
    assert execute(Run.resume(run.path)).to_json() == result.to_json()


@pytest.mark.slow
def test_a_run_can_be_judged_again_without_the_cache(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", "nowhere")
    for name in ("fig6.7", "table6.2", "fig6.10"):
        run, result = results[name]
        assert rejudge(run.path).to_json() == result.to_json()
    assert not Path("nowhere").exists()


@pytest.mark.slow
def test_studies_share_networks_and_agree(results: Results) -> None:
    one, two, three = (results[name][1].numbers for name in ("fig6.7", "figD.1", "table6.3"))
    tuned = "accuracy, fine-tuned"
    assert one[tuned] == two[f"{tuned}, 2 stages"] == three["single, fine-tuned, pre-trained"]
    assert one[tuned].value > 0.1 + one["accuracy, pre-trained"].value  # fine-tuning learns
    assert results["fig6.7"][0].metrics()[0]["from_cache"]
    assert not results["fig6.2"][0].metrics()[0]["from_cache"]
    page = write_study_page(results["fig6.7"][0].path, formats=("png",)).read_text()
    assert (
        "6 measurements taken from other studies" in page
    )  # plain and after the fact, plain from a random start; their time is not in that of this run
    gap = one["fine-tuned minus after the fact"].value
    assert gap == pytest.approx(one[tuned].value - one["accuracy, linearised after the fact"].value)


@pytest.mark.slow
def test_random_encoders_know_nothing_and_maps_are_zero_at_the_origin(results: Results) -> None:
    numbers = results["table6.3"][1].numbers
    assert numbers["accuracy before, random"].value < 0.2  # ten classes
    assert numbers["gain of fine-tuning, fine-tuned, random"].value > 0
    for name in ("fig6.4", "fig6.8", "fig6.5", "fig6.10"):
        shown = [figure for figure in results[name][1].figures if isinstance(figure, HeatMap)]
        assert shown
        for figure in shown:
            at = figure.x.index(0.0)
            assert figure.z[at][at] == 0.0  # no vector, no disturbance
            assert all(0 <= cell <= 2 for row in figure.z for cell in row)


@pytest.mark.slow
def test_a_stand_in_never_contradicts_and_pre_training_must_help_first(results: Results) -> None:
    for name, (run, result) in results.items():
        found = judgements(run, result.numbers)
        assert found, name
        assert all(each.level == "stand-in" and each.verdict != "contradicted" for each in found)
        control = result.numbers[CONTROL]
        if control.value < 0 and name != "table6.3":
            assert all(each.verdict == "undecided" for each in found)


def test_every_claim_of_a_run_here_is_behind_the_control() -> None:
    of = [claim for claim in claims() for name in claim.studies if name.removeprefix("editing/") in NAMES]
    assert {claim.studies[0].removeprefix("editing/") for claim in of} == set(NAMES)
    for claim in of:
        assert claim.why
        if claim.studies != ("editing/table6.3",):
            assert any(each.number == CONTROL and each.above == 0 for each in claim.gate), claim.id


def test_the_propositions_hold_to_rounding(home: Path) -> None:
    numbers = execute(Run.create(home / "propositions", configure("editing/propositions", "smoke"))).numbers
    assert numbers["interference of localised tasks, largest"].value == 0
    assert numbers["interference of Fourier tasks, smallest of all functions"].value > 1e-12
    assert numbers["dependent eigenfunctions: smallest interference of all functions"].value < 1e-20
    assert numbers["Fourier atoms independent on a domain"].value == numbers["Fourier atoms"].value


def test_parts_of_a_set_do_not_overlap_and_images_are_the_stored_ones(home: Path) -> None:
    parts = task_images("digits", Counts(300, 100, 90), 32, "drawn")
    assert [len(part[1]) for part in (parts.learn, parts.held, parts.test)] == [300, 100, 90]
    whole = torch.cat([parts.kept[f"{which}_x"].flatten(1) for which in ("learn", "held", "test")])
    assert len(torch.unique(whole, dim=0)) == len(whole)
    x, y = stored("digits", "train")
    assert int(x.max()) == 255
    same = (x.flatten(1)[:, None] == whole[None, :20]).all(-1)  # [n, 20]
    assert torch.equal(y[same.long().argmax(0)], parts.learn[1][:20])
    shown = task_images("digits", Counts(5, 1000, 90, per_class=True), 32, "drawn")
    assert shown.learn[1].bincount().tolist() == [5] * 10
    assert len(shown.held[1]) == 1000


def test_images_become_what_the_network_was_made_for(home: Path) -> None:
    parts = task_images("digits", Counts(30, 30, 30), 16, "drawn")
    raw = parts.kept["test_x"].float() / 255
    x = parts.test[0]
    assert x.shape == (30, 3, 16, 16)
    one = torch.nn.functional.interpolate(raw, size=(16, 16), mode="bilinear", align_corners=False)[:, 0]
    assert torch.allclose(x[:, 1], (one - 0.456) / 0.224, atol=1e-5)
    turned = task_images("digits/mirrored", Counts(30, 30, 30), 16, "drawn").test[0]
    assert torch.allclose(turned, x.flip(3), atol=1e-5)
    dark = task_images("digits/inverted", Counts(30, 30, 30), 16, "drawn").test[0][:, 1]
    assert torch.allclose(dark * 0.224 + 0.456, 1 - one, atol=1e-5)


def test_classes_and_their_sentences(home: Path) -> None:
    x, y = stored("digits", "test")
    some, classes = stored("digits:3-5", "test")
    assert torch.equal(some, x[(y == 3) | (y == 4)])
    assert torch.equal(classes, y[(y == 3) | (y == 4)] - 3)
    assert prompts("digits:3-5") == ("a photo of the number three", "a photo of the number four")
    texts, part = (task_images(name, Counts(5, 5, 5), 32, "drawn").texts for name in ("digits", "digits:3-5/inverted"))
    assert torch.equal(texts[3:5], part)
    assert torch.allclose(texts.norm(dim=1), torch.ones(10))
    with pytest.raises(InputError, match="the end left out"):
        stored("digits:3", "test")
    with pytest.raises(InputError, match="no classes 40-50"):
        stored("digits:40-50", "test")
    with pytest.raises(InputError, match="inverted"):
        stored("digits/invertd", "test")


def test_tasks_in_words() -> None:
    names = ("mnist", "quickdraw:0-30", "digits/inverted")
    assert [spoken(name) for name in names] == ["mnist", "quickdraw 0-29", "inverted digits"]


def test_maps_need_two_tasks(run: Run) -> None:
    with pytest.raises(InputError, match="name two tasks"):
        maps(run, dataclasses.replace(TINY, tasks=("digits",)), 2)


def test_networks_are_those_of_their_seed_and_trained_once(run: Run) -> None:
    one = networks(run, TINY, 2, 0)
    stamp = {file: file.stat().st_mtime_ns for file in store(run, TINY, 2, 0).path.rglob("*.safetensors")}
    assert len(stamp) == 5  # the encoder, two tasks in two ways
    again, other = networks(run, TINY, 2, 0), networks(run, TINY, 2, 1)
    assert stamp == {file: file.stat().st_mtime_ns for file in stamp}
    for a, b, c in zip(one.encoder.parameters(), again.encoder.parameters(), other.encoder.parameters()):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert store(run, TINY, 2, 0).path != store(run, dataclasses.replace(TINY, lr=2e-3), 2, 0).path
    assert store(run, TINY, 2, 0).path == store(run, dataclasses.replace(TINY, seeds=9), 2, 0).path
    assert (one.vectors[True]["digits"] - one.vectors[False]["digits"]).norm() != 0


def test_a_damaged_file_of_the_cache_is_named_and_made_again(run: Run) -> None:
    wanted = networks(run, TINY, 2, 2, methods=("non-linear",)).vectors[False]["digits"]
    file = next(store(run, TINY, 2, 2).path.rglob("*plain*digits.safetensors"))
    begun = file.read_bytes()[:100]
    file.unlink()  # tensors in use are maps of the old file
    file.write_bytes(begun)
    with pytest.raises(CorruptError, match="delete it"):
        networks(run, TINY, 2, 2, methods=("non-linear",))
    file.unlink()
    assert (networks(run, TINY, 2, 2, methods=("non-linear",)).vectors[False]["digits"] - wanted).norm() == 0


def test_random_start_keeps_the_heads_of_the_pre_trained(run: Run) -> None:
    trained, random = (networks(run, TINY, 2, 0, start, methods=()) for start in ("pre-trained", "random"))  # type: ignore[arg-type]
    assert trained.scale == random.scale != 1 / 0.07  # the temperature was learned
    assert torch.equal(trained.images["digits"].texts, random.images["digits"].texts)
    pairs = zip(trained.encoder.parameters(), random.encoder.parameters())
    assert not any(torch.equal(a, b) for a, b in pairs)
    out = trained.encoder(trained.images["digits"].test[0])
    assert torch.allclose(trained.head("digits")(out), trained.head("digits")(7 * out), atol=1e-4)  # cosines


def test_alignment_minimises_the_contrastive_loss_over_texts() -> None:
    g = torch.Generator().manual_seed(0)
    images, texts, y = torch.randn(6, 5, generator=g), torch.randn(4, 5, generator=g), torch.tensor([0, 1, 2, 3, 1, 1])
    texts = texts / texts.norm(dim=1, keepdim=True)
    logits = Aligned(torch.nn.Identity(), texts)(images)
    found = torch.nn.functional.cross_entropy(logits, y)
    assert float(found.detach()) == pytest.approx(float(contrastive_loss(images, texts, y, temperature=0.07)), rel=1e-5)


def test_share_of_the_gain_by_hand() -> None:
    before, single, multi = torch.tensor([[0.1, 0.2]]), torch.tensor([[0.9, 0.6]]), torch.tensor([[0.5, 0.4]])
    rest = torch.ones(1), torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    found = share_kept(Accuracies(before, single, multi, *rest))
    assert found.tolist() == pytest.approx(
        [0.6 / 1.2, 0.2 / 0.4, 0.4 / 0.8]
    )  # all; without the first; without the second
    three = share_kept(Accuracies(*(t.expand(3, 2) for t in (before, single, multi)), *rest))
    assert three.tolist() == pytest.approx([0.5] * 3)
    lone = share(torch.tensor([0.5, 0.4, 0.8]), 1)
    assert (lone.value, lone.standard_error, lone.n) == (
        0.5,
        pytest.approx(0.2),
        2,
    )  # sqrt((n - 1) / n sum (v - mean)^2)
    assert share(torch.tensor([0.4, 0.6]), 2).value == pytest.approx(0.5)


def test_accuracies_by_hand(run: Run) -> None:
    found = accuracies(run, TINY, 2)
    made = networks(run, TINY, 2, 1)
    x, y = made.images["digits"].test
    tuned = made.vectors[False]["digits"].apply_to(made.encoder)
    with torch.no_grad():
        by_hand = float((made.head("digits")(tuned(x)).argmax(1) == y).double().mean())
        before = float((made.head("digits")(made.encoder(x)).argmax(1) == y).double().mean())
        merged = (made.vectors[False]["digits"] + made.vectors[False]["digits/inverted"]).apply_to(
            made.encoder, float(found["non-linear"].alpha[1])
        )
        both = float((made.head("digits")(merged(x)).argmax(1) == y).double().mean())
    assert float(found["non-linear"].single[1, 0]) == pytest.approx(by_hand)
    assert float(found["non-linear"].before[1, 0]) == pytest.approx(before)
    assert float(found["non-linear"].multi[1, 0]) == pytest.approx(both)


def test_differences_are_paired_over_images_of_one_seed_and_over_several_seeds() -> None:
    one = torch.tensor([[[1.0, 1, 0, 1], [1, 0, math.nan, math.nan]]])
    other = torch.tensor([[[0.0, 1, 0, 0], [1, 1, math.nan, math.nan]]])
    first, second = paired(one, other)
    assert (first.value, first.n) == (0.5, 4)
    assert first.standard_error == pytest.approx(math.sqrt(1 / 3 / 4))  # of 1, 0, 0, 1
    assert (second.value, second.n) == (-0.5, 2)
    both = paired(torch.cat([one, other]), torch.cat([other, other]))
    assert (both[0].value, both[0].n) == (0.25, 2)  # of 0.5 and 0


def test_contrast_of_one_seed_has_the_error_of_its_points() -> None:
    energy = torch.tensor(
        [[[0.9, 0.7, 0.1, 0.3], [0.7, 0.7, 0.3, 0.3]]]
    )  # one seed, two outputs, two points of each set
    found = contrast(energy)  # of 0.8, 0.7 and 0.2, 0.3
    assert found.value == pytest.approx(0.5)
    assert found.standard_error == pytest.approx(math.sqrt(2) * 0.05)
    assert contrast(energy.expand(3, 2, 4)).n == 3


def test_maps_are_those_of_the_definition(run: Run) -> None:
    found = maps(run, TINY, 2, pairs=1, points=30, grid=7)
    assert found.pairs == (("digits", "digits/inverted"),)
    made = networks(run, TINY, 2, 1)
    one, two = (made.vectors[False][task] for task in found.pairs[0])
    expected = 0.0
    for task, alone in ((found.pairs[0][0], one * 2.0), (found.pairs[0][1], two * -1.0)):
        x = made.images[task].test[0][:30]
        with torch.no_grad():
            a = made.head(task)(alone.apply_to(made.encoder)(x)).argmax(1)
            b = made.head(task)((one * 2.0 - two).apply_to(made.encoder)(x)).argmax(1)
        expected += float((a != b).double().mean())
    assert found.alphas[5] == 2.0
    assert found.alphas[2] == -1.0
    assert float(found.xi["non-linear"][1, 0, 5, 2]) == pytest.approx(expected)
    rms = (one.rms() + two.rms()) / 2
    assert float(found.rms["non-linear"][1, 0]) == pytest.approx(rms)


def test_box_of_a_known_map_and_what_lies_beyond() -> None:
    alphas = (-1.0, 0.0, 1.0, 1.5)
    rows = [[1.0, 0.2, 1.0, 0.0], [0.2, 0.0, 0.3, 0.0], [2.0, 0.1, 1.0, 0.0], [0.0, 0.0, 0.0, 1.7]]
    xi = torch.tensor(rows, dtype=torch.float64)[None, None]
    found = Maps(alphas, (("a", "b"),), {"linear": xi}, {"linear": torch.zeros(1, 1)})
    assert float(found.box("linear")) == pytest.approx((0.0 + 0.3 + 0.1 + 1.0) / 4)
    assert float(found.beyond("linear")) == 1.7
    assert float(found.everywhere("linear")) == pytest.approx(float(xi.mean()))
    shown = heat_maps(found, ("linear",))[0]
    assert shown.z[0][2] == 2.0  # first task to the right: z[row of the second][column of the first]


def test_disjoint_vectors_are_disentangled_everywhere() -> None:
    """A network whose two tasks read different pixels: no error anywhere; swapped inputs leave some."""
    net = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.zeros_(net.weight)
    rows = {"a": torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]), "b": torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, 1.0]])}
    vectors = {task: TaskVector.from_tensors({"weight": row}) for task, row in rows.items()}
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 40, 2, generator=g)
    x = {"a": torch.cat([u, 0 * u], 1), "b": torch.cat([0 * v, v], 1)}
    alphas = (-1.0, 0.5, 1.0)
    for inputs, whole in ((x, True), ({"a": x["b"], "b": x["a"]}, False)):
        xi = disentanglement(net, vectors, inputs, alphas).xi[None, None]
        found = Maps(alphas, (("a", "b"),), {"linear": xi}, {})
        assert (float(found.everywhere("linear")) == 0.0) is whole


def test_energies_share_the_rank(run: Run) -> None:
    found = energies(run, TINY, 2, points=20, outputs=2)
    for values in found.values():
        assert values.shape == (2, 2, 40)
        assert float(values.min()) >= -1e-9
        assert float(values.max()) <= 1 + 1e-9
        ranks = values.sum(-1)
        assert torch.allclose(ranks, ranks.round(), atol=1e-4)
        assert float(ranks.max()) <= 20 + 1e-4
        assert bool((contrasts(values) > 0).all())
    with pytest.raises(InputError, match="61 images were asked for, digits has 60"):  # halves would not be halves
        energies(run, TINY, 2, points=61, outputs=1)


def test_tasks_keep_their_order(run: Run) -> None:
    """Arrays are stored by name, charts are numbered by task."""
    setting = dataclasses.replace(TINY, tasks=("digits/inverted", "digits"), seeds=1)
    assert tuple(energies(run, setting, 2, points=5, outputs=1)) == setting.tasks


def test_towers_are_folded_and_see_a_signal() -> None:
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    net = encoder(2, 32, "drawn", 0, x)
    assert not net.training
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in net.modules())
    assert all(p.requires_grad for p in net.parameters())
    whole = nets.build("mobilenet-v2", seed=0, image_size=32, stages=2, outputs=SIZE)
    for part in whole.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    with torch.no_grad():
        whole.train()(x)
        assert torch.allclose(net(x), whole.eval()(x), atol=1e-6)
        assert float(net(x).std(0).mean()) > 0.01  # without statistics of its own the network would be constant


def test_predictors_use_the_vectors_of_their_own_training(run: Run) -> None:
    made: Networks = networks(run, TINY, 2, 0)
    assert [made.predictor(m)[1] is made.vectors[m == "linear"] for m in METHODS] == [True] * 3
    x = made.images["digits"].test[0][:4]
    for method in METHODS:
        assert torch.allclose(made.predictor(method)[0](x), made.encoder(x), atol=1e-5)  # all start at theta_0
