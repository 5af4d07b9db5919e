"""What the rule and the gate of a claim give for some numbers."""

from collections.abc import Mapping

from biascope.studies.claims import claims
from biascope.studies.conditions import all_hold
from biascope.studies.result import Estimate


def outcome(name: str, numbers: Mapping[str, Estimate], network: str = "") -> str:
    """ "holds", "fails" or "open" by the rule of a claim, or "gate" where what has to hold first does not.

    `network`: of a claim that is judged for each network apart.
    """
    claim = next(claim for claim in claims() if claim.id == name)
    found = claim.conditions(network, numbers)
    assert found is not None, f"{name}: numbers are missing"
    rule, gate = found
    if gate and all_hold(gate, numbers)[0] is not True:
        return "gate"
    return {True: "holds", False: "fails", None: "open"}[all_hold(rule, numbers)[0]]
