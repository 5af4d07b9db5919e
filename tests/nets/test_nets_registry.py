"""Names, seeds, and the errors of the registry."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from biascope import nets
from biascope.nets.lenet import LeNet
from biascope.support.errors import InputError

REQUIRED = [
    *("logreg", "mlp", "mlp-ntk", "lenet", "lenet-avg", "lenet-small", "vgg11", "vgg11-nobn", "vgg19"),
    *("resnet18", "resnet18-nobn", "resnet34", "densenet121", "vit", "vit-nonorm"),
    *("lenet-nopool", "vgg11-nopool", "resnet18-nopool", "densenet121-nopool"),
    *("linear-pooling", "siren", "ffn", "relu-coords", "autoencoder", "mobilenet-v2"),
]


def test_all_names_are_there_sorted():
    assert set(REQUIRED) <= set(nets.names())
    assert list(nets.names()) == sorted(nets.names())


def test_info_is_frozen_and_complete():
    entry = nets.info("lenet-small")
    assert entry.name == "lenet-small"
    assert entry.factory is LeNet
    assert entry.input_shape == (1, 32, 32)
    assert entry.defaults["hidden"] == (96, 67)
    assert entry.defaults["padding"] == "valid"
    assert entry.summary
    with pytest.raises(AttributeError):
        entry.name = "other"
    with pytest.raises(TypeError):
        entry.defaults["pool"] = "max"


@pytest.mark.parametrize("name", nets.names())
def test_input_shape_agrees_with_the_defaults(name):
    entry = nets.info(name)
    for option, value in entry.options_for(entry.input_shape).items():
        assert entry.defaults[option] == value


def test_options_for_another_shape():
    assert nets.info("vit").options_for((3, 64, 64)) == {"in_channels": 3, "image_size": 64}
    assert nets.info("mlp").options_for((3, 32, 32)) == {"in_features": 3072}
    with pytest.raises(InputError, match=r"square images.*\(3, 32, 16\)"):
        nets.info("lenet").options_for((3, 32, 16))
    with pytest.raises(InputError, match="is not the shape of one input"):
        nets.info("mlp").options_for(())


def test_seed_gives_the_same_net_and_leaves_the_global_state():
    before = torch.get_rng_state()
    a, b, c = (nets.build("ffn", seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key])
        assert not torch.equal(value, c.state_dict()[key])


def test_seed_does_not_depend_on_the_global_state():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        a = nets.build("lenet", seed=0)
        torch.manual_seed(2)
        b = nets.build("lenet", seed=0)
    assert torch.equal(a.features.conv1.weight, b.features.conv1.weight)


def test_without_seed_the_global_state_decides_as_for_any_module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = nets.build("lenet")
        torch.manual_seed(5)
        b = LeNet()
        assert torch.equal(a.features.conv1.weight, b.features.conv1.weight)
        assert not torch.equal(a.features.conv1.weight, nets.build("lenet").features.conv1.weight)


def test_global_state_is_left_alone_when_the_factory_fails():
    before = torch.get_rng_state()
    with pytest.raises(InputError):
        nets.build("vit", seed=0, heads=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_seed_leaves_cuda_alone():
    for devices in ((), (0,)):
        before = torch.cuda.get_rng_state(0)
        nets.build("lenet", seed=0, devices=devices)
        assert torch.equal(torch.cuda.get_rng_state(0), before)


def test_unknown_name_lists_near_ones():
    with pytest.raises(InputError, match=r"'resnet81'; did you mean resnet18.*package\.module:factory"):
        nets.build("resnet81")
    with pytest.raises(InputError, match=r"'qqqq'; there is autoencoder"):
        nets.info("qqqq")


def test_unknown_option_lists_the_valid_ones():
    with pytest.raises(InputError, match=r"lenet has no option 'pooling'; did you mean pool"):
        nets.build("lenet", pooling="avg")
    with pytest.raises(InputError, match="has no option 'xyz'; there is end_dim, start_dim"):
        nets.resolve("torch.nn:Flatten")(xyz=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"activation": "rely"}, "activation='rely' is not known; did you mean"),
        ("mlp", {"activation": lambda: torch.relu}, "it must return an nn.Module"),
        ("mlp", {"parametrization": "mup"}, "parametrization='mup' is not known; there is ntk, standard"),
        ("lenet", {"pool": "mean"}, "pool='mean' is not known"),
        ("lenet", {"padding": "full"}, "padding='full'"),
        ("lenet", {"image_size": 12}, "image_size=12 is too small"),
        ("vgg11", {"depth": 12}, "depth=12: 11 or 13 or 16 or 19 is needed"),
        ("vgg11", {"image_size": 16}, "image_size=16 is too small"),
        ("vgg11", {"init": "zero"}, "init='zero'"),
        ("resnet18", {"norm": "group"}, "norm='group' is not known; there is batch, none"),
        ("resnet18", {"pool": "max"}, "pool='max'"),
        ("resnet18", {"init": "he"}, "init='he'"),
        ("densenet121", {"image_size": 4}, "image_size=4 is too small for 3"),
        ("vit", {"patch": 7}, "image_size=32 is not a multiple of patch=7"),
        ("vit", {"heads": 7}, "width=192 is not a multiple of heads=7"),
        ("vit", {"norm": "batch"}, "norm='batch' is not known; there is layer, none"),
        ("vit", {"attention": "flash"}, "attention='flash'"),
        ("linear-pooling", {"stride": 5}, "in_features=128 is not a multiple of stride=5"),
        ("linear-pooling", {"prefilter": torch.ones(7)}, r"shape \(7,\), not \(128,\)"),
        ("ffn", {"mapping": "nerf"}, "mapping='nerf'"),
        ("ffn", {"frequencies": torch.ones(4, 3)}, r"shape \(4, 3\), it must be \(T, 2\)"),
    ],
)
def test_bad_options_are_refused_by_name(name, options, message):
    with pytest.raises(InputError, match=message):
        nets.build(name, **options)


SCRIPT = """
from torch import nn
from sibling import WIDTH

def build(width=WIDTH): return nn.Linear(2, width)
def wrong(): return 7
def fails(): raise KeyError("layer9")
ready = nn.Linear(2, 2)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "sibling.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(SCRIPT)
    yield tmp_path / "mine.py"
    sys.modules.pop("sibling", None)


def test_script_with_a_neighbour_module(script):
    path = list(sys.path)
    assert nets.resolve(f"{script}:build")().out_features == 3
    assert nets.build(f"{script}:build", seed=0, width=5).out_features == 5
    assert sys.path == path


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("biuld", r"mine\.py has no 'biuld'; did you mean build"),
        ("ready", "is a Linear, not a factory: write `def build"),
        ("", "is not complete"),
    ],
)
def test_script_without_a_factory(script, attribute, message):
    with pytest.raises(InputError, match=message):
        nets.resolve(f"{script}:{attribute}")


def test_factories_that_misbehave(script):
    with pytest.raises(InputError, match=r"mine\.py:wrong returned a int; it must return an nn\.Module"):
        nets.resolve(f"{script}:wrong")()
    with pytest.raises(InputError, match=r"mine\.py:fails raised KeyError: 'layer9'"):
        nets.build(f"{script}:fails", seed=0)
    with pytest.raises(InputError, match=r"has no option 'wdith'; did you mean width"):
        nets.build(f"{script}:build", wdith=4)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*absent\.py"):
        nets.resolve(f"{tmp_path}/absent.py:build")
    (tmp_path / "broken.py").write_text("def build(:\n")
    with pytest.raises(InputError, match=r"broken\.py raised SyntaxError"):
        nets.resolve(f"{tmp_path}/broken.py:build")


def test_module_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text("from torch import nn\ndef build(): return nn.Identity()\n")
    (tmp_path / "models_in_need.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert isinstance(nets.resolve("models_of_mine:build")(), nn.Identity)
    with pytest.raises(
        InputError, match=r"importing models_in_need raised ModuleNotFoundError: .*a_package_nobody_has"
    ):
        nets.resolve("models_in_need:build")
    assert sys.path == path
    sys.modules.pop("models_of_mine")


def test_module_that_is_not_there():
    with pytest.raises(InputError, match=r"importing no_such_package\.models raised ModuleNotFoundError"):
        nets.resolve("no_such_package.models:build")
    with pytest.raises(InputError, match=r"No module named 'torch\.absent'"):
        nets.resolve("torch.absent:build")
    with pytest.raises(InputError, match="is not complete"):
        nets.resolve(":build")


def test_registering_in_one_line_and_name_clash():
    @nets.register("tiny-test-net", summary="for this test", input_shape=(2,), width=4)
    def tiny(width: int = 1) -> nn.Module:
        return nn.Linear(2, width)

    try:
        assert nets.build("tiny-test-net").out_features == 4
        assert nets.build("tiny-test-net", width=6).out_features == 6
        with pytest.raises(InputError, match=r"'tiny-test-net' is taken by .*tiny"):
            nets.register("tiny-test-net", summary="", input_shape=(2,))(nn.Linear)
    finally:
        nets.unregister("tiny-test-net")
    assert "tiny-test-net" not in nets.names()


def test_import_is_light():
    code = "import torch, sys; old = set(sys.modules); import biascope.nets; print(*sorted(set(sys.modules) - old))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {name.split(".")[0] for name in new} - {"biascope"} - sys.stdlib_module_names - {"torch"}
    assert not foreign


def test_scale_and_sine_say_their_constants():
    assert "factor=0.5" in repr(nets.build("mlp-ntk", in_features=4, hidden=(4,)))
    assert "frequency=30" in repr(nets.build("siren", hidden=(4,)))


def test_factory_with_free_keywords(tmp_path):
    """`**options` in the user's factory: nothing is refused up front, its own error comes through."""
    (tmp_path / "free.py").write_text("from torch import nn\ndef build(**options): return nn.Linear(2, **options)\n")
    assert nets.build(f"{tmp_path}/free.py:build", out_features=3).out_features == 3
    with pytest.raises(InputError, match=r"free\.py:build raised TypeError: .*'wide'"):
        nets.build(f"{tmp_path}/free.py:build", wide=3)


def test_a_file_in_the_folder_is_all_it_takes(tmp_path):
    """A network is registered by its file alone; nothing else names it."""
    (tmp_path / "new_net.py").write_text(
        "from torch import nn\nfrom biascope.nets.registry import register\n"
        "@register('new-net', summary='', input_shape=(2,))\nclass NewNet(nn.Identity): pass\n"
    )
    code = (
        "import importlib.util, sys, biascope; folder = sys.argv[1]\n"
        "spec = importlib.util.find_spec('biascope.nets'); spec.submodule_search_locations.append(folder)\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['biascope.nets'] = module\n"
        "spec.loader.exec_module(module); print(module.build('new-net'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "NewNet()", done.stderr
