"""Thousands of networks at once: drawn as stacks, evaluated and trained together."""

from biascope.ensembles.engines import Plan
from biascope.ensembles.evaluate import Evaluator, choose_plan, input_gradients, outputs, scalar_of
from biascope.ensembles.initialisers import Factory, Initialiser, record
from biascope.ensembles.networks import Networks
from biascope.ensembles.sweep import finished, sweep
from biascope.ensembles.train import SGD, TrainedEnsemble, accuracy, data_order, train_ensemble

__all__ = [
    "SGD",
    "Evaluator",
    "Factory",
    "Initialiser",
    "Networks",
    "Plan",
    "TrainedEnsemble",
    "accuracy",
    "choose_plan",
    "data_order",
    "finished",
    "input_gradients",
    "outputs",
    "record",
    "scalar_of",
    "sweep",
    "train_ensemble",
]
