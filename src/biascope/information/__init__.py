"""Mutual information from samples: neural bounds, nearest neighbours, and problems with known answers."""

from biascope.information.bottleneck import Bottleneck, discrete_bottleneck
from biascope.information.bounds import (
    MineObjective,
    donsker_varadhan,
    info_nce,
    jensen_shannon,
    log_mean_exp,
    mine_f,
    nwj,
    sample_size,
    smile,
)
from biascope.information.critics import EncodedCritic, Encoder, JointCritic, SeparableCritic
from biascope.information.estimate import mutual_information
from biascope.information.neighbours import ksg, local_information
from biascope.information.problems import (
    Problem,
    discrete_problem,
    gaussian_problem,
    mixture_problem,
    noisy_function_problem,
    sign_mixture_problem,
)
from biascope.information.result import EstimateWarning, MutualInformation
from biascope.information.terms import MineTerm, adaptive_clip, clipped_backward

__all__ = [
    "Bottleneck",
    "EncodedCritic",
    "Encoder",
    "EstimateWarning",
    "JointCritic",
    "MineObjective",
    "MineTerm",
    "MutualInformation",
    "Problem",
    "SeparableCritic",
    "adaptive_clip",
    "clipped_backward",
    "discrete_bottleneck",
    "discrete_problem",
    "donsker_varadhan",
    "gaussian_problem",
    "info_nce",
    "jensen_shannon",
    "ksg",
    "local_information",
    "log_mean_exp",
    "mine_f",
    "mixture_problem",
    "mutual_information",
    "noisy_function_problem",
    "nwj",
    "sample_size",
    "sign_mixture_problem",
    "smile",
]
