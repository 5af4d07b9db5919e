"""Natural-gradient training: KFAC, EKFAC and SuperNat as torch optimisers, KFAC and EKFAC as preconditioners."""

from biascope.optim.kfac import EKFAC, KFAC, EKFACPreconditioner, KFACPreconditioner
from biascope.optim.supernat import SuperNat

__all__ = ["EKFAC", "KFAC", "EKFACPreconditioner", "KFACPreconditioner", "SuperNat"]
