"""Mutual information from samples: neural bounds, nearest neighbours, and problems with known answers."""

from biascope._moved import names_of_before
from biascope.information import bounds as bounds  # pages of theory, used by their own names
from biascope.information import neighbours as neighbours
from biascope.information import problems as problems
from biascope.information.bounds import MineObjective
from biascope.information.critics import JointCritic
from biascope.information.estimate import mutual_information as mutual_information
from biascope.information.problems import Problem, gaussian_problem, noisy_function_problem, sign_mixture_problem
from biascope.information.result import EstimateWarning
from biascope.information.result import MutualInformation as MutualInformation
from biascope.information.terms import MineTerm, adaptive_clip, discrete_bottleneck
from biascope.information.terms import clipped_backward as clipped_backward

__getattr__ = names_of_before(__name__)

__all__ = [
    "EstimateWarning",
    "JointCritic",
    "MineObjective",
    "MineTerm",
    "Problem",
    "adaptive_clip",
    "discrete_bottleneck",
    "gaussian_problem",
    "noisy_function_problem",
    "sign_mixture_problem",
]
