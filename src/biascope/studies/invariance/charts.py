"""How the claims of this paper are judged, part by part, and how that is said."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from biascope.studies.result import Estimate, Verdict


def negligible(estimate: Estimate, bound: float) -> bool | None:
    """Whether |value| lies below the bound even two standard errors up; None where the error is too wide to tell.

    Too wide: two standard errors alone reach the bound. Then noise would decide, unless |value| is above the bound by
    two standard errors.

    Example:
        >>> [negligible(Estimate(1.0, error), 5.0) for error in (1.0, 2.2, 3.0, None)]
        [True, False, None, None]
    """
    if estimate.standard_error is None:
        return None
    size, doubt = abs(estimate.value), 2 * estimate.standard_error
    return None if doubt >= bound > size - doubt else size + doubt < bound


def together(parts: Iterable[bool | None]) -> bool | None:
    """Whether all parts are as claimed: False if one is not, else None if one cannot be told.

    Example:
        >>> together([True, None]), together([True, None, False]), together([True])
        (None, False, True)
    """
    found = list(parts)
    return False if False in found else None if None in found else True


def decide(as_claimed: bool | None, repeats: int) -> Verdict:
    """The verdict; None tests nothing, nor do fewer than three repeats, whose errors are not worth the name.

    Example:
        >>> decide(True, 5), decide(False, 5), decide(None, 5), decide(True, 2)
        ('confirmed', 'not confirmed', 'not tested', 'not tested')
    """
    if repeats < 3 or as_claimed is None:
        return "not tested"
    return "confirmed" if as_claimed else "not confirmed"


def restricted(claim: str, **parts: tuple[Sequence[object], Sequence[object]]) -> tuple[str, str]:
    """The claim as far as a run has judged it, and a sentence naming what it has not; parts: (judged, the paper's).

    A verdict is about what ran. Where the paper speaks of more networks, boundaries or rates than that, the claim is
    said for those of the run alone, and so it is where a run has judged own networks (`module:factory`) as well.

    Example:
        >>> restricted("A > B.", networks=(["mlp"], ["mlp", "vit"]))
        ('For networks mlp only: A > B.', ' Not tested: networks vit.')
        >>> restricted("A > B.", networks=(["mlp", "vit"], ["mlp", "vit"]))
        ('A > B.', '')
        >>> restricted("A > B.", networks=(["mlp", "my.py:net"], ["mlp"]))
        ('For networks mlp, my.py:net: A > B.', '')
    """
    judged, missing = list[str](), list[str]()
    for name, (ran, wanted) in parts.items():
        absent = [str(each) for each in wanted if each not in ran]
        if absent or any(":" in str(each) for each in ran):
            judged.append(f"{name} {', '.join(map(str, ran))}")
        if absent:
            missing.append(f"{name} {', '.join(absent)}")
    if not missing:
        return (f"For {'; '.join(judged)}: {claim}", "") if judged else (claim, "")
    return f"For {'; '.join(judged)} only: {claim}", f" Not tested: {'; '.join(missing)}."


def remark(as_claimed: bool | None) -> str:
    """What the text says after the numbers of a part.

    Example:
        >>> remark(False), remark(None), remark(True)
        (' (not as claimed)', ' (cannot be told)', '')
    """
    return {True: "", False: " (not as claimed)", None: " (cannot be told)"}[as_claimed]


def percent(values: Tensor) -> Tensor:
    """Accuracies in percent."""
    return 100.0 * torch.as_tensor(values).double()
