"""CLIP's loss and its zero-shot head: classes are texts, and a logit is the cosine of an image with a text.

    loss     -log softmax over texts of cos(f_img(x), f_txt(t)) / temperature                       (Eq. 2.14)
    head     logits = scale normalise(z) W^T, a row of W per class: its prompts averaged, length 1; frozen

The head is the classifier of all task-arithmetic methods; with scale = 1 / temperature its cross-entropy is the loss.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from biascope.support.arguments import check_number, check_tensor
from biascope.support.errors import InputError
from biascope.support.signatures import checked


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
    """
    check_number(temperature, "temperature", above=0)
    n, m = len(images), len(texts)
    if symmetric if target is not None else n != m:
        raise InputError(f"{n} images, {m} texts: give target= unless they are pairs, and not with symmetric=True")
    index = torch.arange(n, device=images.device) if target is None else target.to(images.device).long()
    logits = unit(images) @ unit(texts).T / temperature
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
    """
    check_number(scale, "scale", above=0)
    named = dict(prompts) if isinstance(prompts, Mapping) else {str(i): t for i, t in enumerate(prompts)}
    rows = [_averaged(t, name, unit_prompts) for name, t in named.items()]
    like = next(iter(named.values()))
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return ZeroShotHead(torch.stack(rows).to(dtype), float(scale), tuple(named))


def unit(z: Tensor) -> Tensor:
    """Rows [..., d] brought to length 1, also where their squares would leave the range of numbers; NaN of zero."""
    z = z / z.detach().abs().amax(-1, keepdim=True)  # a constant: the direction does not depend on it
    length: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / length


def _averaged(prompts: Tensor, name: str, unit_prompts: bool) -> Tensor:
    """One row of the head [d], float64."""
    each = check_tensor(prompts, f"prompts of {name!r}", dims=2).detach().double()
    each = unit(each) if unit_prompts else each
    mean = each.mean(0)
    rounding = 8 * torch.finfo(prompts.dtype if prompts.is_floating_point() else torch.float64).eps
    if not float(mean.norm()) > rounding * float(each.norm(dim=1).max()):
        raise InputError(f"prompts of {name!r} are zero, not finite, or cancel one another: they have no direction")
    return unit(mean)
