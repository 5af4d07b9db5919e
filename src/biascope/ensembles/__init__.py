"""Thousands of networks at once: drawn as stacks, evaluated and trained together."""

from biascope._moved import names_of_before
from biascope.ensembles.evaluate import Evaluator as Evaluator
from biascope.ensembles.evaluate import input_gradients, outputs
from biascope.ensembles.graphs import capture
from biascope.ensembles.initialisers import Factory, Initialiser, record
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import Precision, arithmetic
from biascope.ensembles.train import accuracy, train_ensemble
from biascope.ensembles.train import training_epochs as training_epochs
from biascope.ensembles.work import SGD, data_order

__getattr__ = names_of_before(__name__)

__all__ = [
    "SGD",
    "Factory",
    "Initialiser",
    "Networks",
    "Precision",
    "accuracy",
    "arithmetic",
    "capture",
    "data_order",
    "input_gradients",
    "outputs",
    "record",
    "train_ensemble",
]
