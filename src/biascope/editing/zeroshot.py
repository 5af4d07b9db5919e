"""CLIP's loss and its zero-shot head: classes are texts, and a logit is the cosine of an image with a text.

    loss     -log softmax over texts of cos(f_img(x), f_txt(t)) / temperature                       (Eq. 2.14)
    head     logits = scale normalise(z) W^T, a row of W per class: its prompts averaged, length 1; frozen

The head is the classifier of all task-arithmetic methods; with scale = 1 / temperature its cross-entropy is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from biascope.arguments import as_number, check_tensor
from biascope.errors import InputError
from biascope.signatures import checked


@checked
def contrastive_loss(
    images: Tensor,
    texts: Tensor,
    target: Tensor | None = None,
    *,
    temperature: Tensor | float = 0.07,
    symmetric: bool = False,
) -> Tensor:
    """Mean over images of -log softmax over texts of cos(image, text) / temperature, at the text that belongs to it.

    Lengths do not matter. NaN where an embedding is zero: it has no direction.

    Args:
        images: f_img(x), [n, d].
        texts: f_txt(t), [m, d].
        target: which text belongs to every image, whole numbers [n]; None: the i-th to the i-th, m = n.
        temperature: positive; 0.07 is where CLIP begins, a tensor where it is learned.
        symmetric: also the softmax over images for every text, and the mean of both, as CLIP is trained. Eq. 2.14 has
            the one over texts alone.

    Example:
        >>> pairs = torch.eye(2)  # cosines 1 and 0
        >>> round(float(contrastive_loss(pairs, 5 * pairs, temperature=1.0)), 4)  # log(1 + exp(-1))
        0.3133
    """
    if images.dim() != 2 or texts.dim() != 2 or images.shape[1] != texts.shape[1] or 0 in (*images.shape, *texts.shape):
        raise InputError(
            f"images [n, d] and texts [m, d] must have embeddings of one length, not {list(images.shape)} and "
            f"{list(texts.shape)}"
        )
    for name, t in (("images", images), ("texts", texts)):
        if check_tensor(t, name, floating=True).dtype != images.dtype:
            raise InputError(f"images are {images.dtype}, texts {texts.dtype}: they must agree")
    if not as_number(temperature, "temperature") > 0:
        raise InputError(f"temperature={float(temperature):g} must be positive")
    n, m = len(images), len(texts)
    if target is None and n != m:
        raise InputError(f"{n} images and {m} texts: say in target= which text belongs to every image")
    if target is not None and symmetric:
        raise InputError("symmetric=True takes pairs, the i-th text with the i-th image: leave target out")
    index = torch.arange(n, device=images.device) if target is None else target.to(images.device)
    if (
        index.shape != (n,)
        or index.is_floating_point()
        or index.dtype == torch.bool
        or not bool(((index >= 0) & (index < m)).all())
    ):
        raise InputError(f"target must be {n} whole numbers between 0 and {m - 1}")
    logits = unit(images) @ unit(texts).T / temperature
    index = index.long()
    loss = nn.functional.cross_entropy(logits, index)
    return (loss + nn.functional.cross_entropy(logits.T, index)) / 2 if symmetric else loss


class ZeroShotHead(nn.Module):
    """z [n, d] -> scale normalise(z) weight^T [n, classes]; weight [classes, d], rows of length 1, is not trained.

    Make one with `zero_shot_head`. NaN where z is zero: it has no direction.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, scale: float, classes: tuple[str, ...]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.scale, self.classes = scale, classes

    def forward(self, z: Tensor) -> Tensor:
        """Logits [n, classes] of embeddings [n, d], in their type and on their device."""
        if check_tensor(z, "z", floating=True).shape[-1:] != self.weight.shape[1:]:
            got = z.shape[-1] if z.dim() else 1
            raise InputError(f"embeddings have {got} entries, the texts of this head {self.weight.shape[1]}")
        return self.scale * unit(z) @ self.weight.to(z).T

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"classes={len(self.weight)}, features={self.weight.shape[1]}, scale={self.scale:g}"


@checked
def zero_shot_head(
    prompts: Mapping[str, Tensor] | Sequence[Tensor] | Tensor, *, scale: float = 100.0, unit_prompts: bool = True
) -> ZeroShotHead:
    """A classifier from texts: the embeddings of every class's prompts averaged and brought to length 1.

    It goes as `head=` to `fine_tune` and in `heads=` to `disentanglement`, `task_addition` and `task_negation`.

    Args:
        prompts: {class: f_txt of its prompt templates [p, d]}, or one [p, d] per class in their order, such as a tensor
            [classes, p, d]; p may differ from class to class.
        scale: 1 / temperature; 100 is where CLIP's ends.
        unit_prompts: bring every prompt to length 1 before the average, as the paper's code does; False averages them
            as they are. The same where the text encoder gives unit vectors.

    Example:
        >>> head = zero_shot_head({"x": torch.tensor([[2.0, 0.0]]), "y": torch.tensor([[0.0, 1.0], [0.0, 3.0]])})
        >>> head(torch.tensor([[5.0, 0.0]])), head.classes
        (tensor([[100.,   0.]]), ('x', 'y'))
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise InputError(f"scale={scale:g} must be positive and finite")
    named = dict(prompts) if isinstance(prompts, Mapping) else {str(i): t for i, t in enumerate(prompts)}
    if not named:
        raise InputError("prompts: at least one class is needed")
    d = {t.shape[-1] if check_tensor(t, f"prompts of {name!r}").dim() == 2 else 0 for name, t in named.items()}
    if len(d) != 1 or 0 in d or any(len(t) == 0 for t in named.values()):
        shapes = {name: list(t.shape) for name, t in named.items()}
        raise InputError(f"prompts: expected embeddings [p, d] with one d for every class, got {shapes}")
    if any(t.is_complex() for t in named.values()):
        raise InputError("prompts: expected real embeddings, got complex ones")
    rows = [_averaged(t, name, unit_prompts) for name, t in named.items()]
    like = next(iter(named.values()))
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return ZeroShotHead(torch.stack(rows).to(dtype), float(scale), tuple(named))


def unit(z: Tensor) -> Tensor:
    """Rows [..., d] brought to length 1, also where their squares would leave the range of numbers; NaN of zero.

    Example:
        >>> unit(torch.tensor([[3e30, 4e30]]))
        tensor([[0.6000, 0.8000]])
    """
    z = z / z.detach().abs().amax(-1, keepdim=True)  # a constant: the direction does not depend on it
    length: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / length


def _averaged(prompts: Tensor, name: str, unit_prompts: bool) -> Tensor:
    """One row of the head [d], float64."""
    each = prompts.detach().double()
    if not bool(each.isfinite().all()) or (unit_prompts and not bool(each.any(1).all())):
        raise InputError(f"prompts of {name!r}: an embedding is zero or not finite, so it has no direction")
    each = unit(each) if unit_prompts else each
    mean = each.mean(0)
    rounding = 8 * torch.finfo(prompts.dtype if prompts.is_floating_point() else torch.float64).eps
    if not float(mean.norm()) > rounding * float(each.norm(dim=1).max()):
        raise InputError(f"prompts of {name!r}: they cancel one another, so their average has no direction")
    return unit(mean)
