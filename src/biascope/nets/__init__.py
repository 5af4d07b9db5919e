"""The architectures of the papers, each small and readable, and a registry that builds them by name.

To add one: write a file with a decorated class (`@register(...)`), and import it here.
"""

from .autoencoder import Autoencoder
from .densenet import DenseNet
from .fourier import FFN, FourierFeatures
from .lenet import LeNet
from .linear_pooling import LinearPooling, box_prefilter
from .logreg import LogReg
from .mlp import MLP
from .registry import NetInfo, build, info, names, register, resolve, unregister
from .resnet import ResNet
from .siren import SIREN
from .vgg import VGG
from .vit import ViT

__all__ = [
    "FFN",
    "MLP",
    "SIREN",
    "VGG",
    "Autoencoder",
    "DenseNet",
    "FourierFeatures",
    "LeNet",
    "LinearPooling",
    "LogReg",
    "NetInfo",
    "ResNet",
    "ViT",
    "box_prefilter",
    "build",
    "info",
    "names",
    "register",
    "resolve",
    "unregister",
]
