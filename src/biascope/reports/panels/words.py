"""A language model seen from its tokens: which positions, words, parts and heads gradient descent moves together.

Every position has one output here, the log-probability that the model gives to the next word of the text (of a model
that sees both sides, to the word itself). Its kernel over (text, position) pairs says how a step on one place changes
the others; its trace is a sum over parameters, and so over parts of the network and attention heads.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import biascope
from biascope.ensembles.redraw import from_transformers
from biascope.reports import figures
from biascope.reports.html import Html, figure, table, tag
from biascope.reports.panels.adapter import caches, plain
from biascope.reports.panels.base import Panel, Subject, card_panel
from biascope.reports.panels.pace import largest_within
from biascope.reports.study_page import fact_list
from biascope.studies import HeatMap
from biascope.support.errors import UnsupportedError

TITLE = "Positions and heads"
READ = (
    "The tangent kernel of the log-probability of the next word, with an entry for every pair of positions. The curve "
    "says how strongly a step on one position moves that position itself; the first map, how much a step on one "
    "position moves another of the same text (cosine of their gradients). The second map is the share of the trace "
    "that lies in the weights of each attention head."
)
SIZES = (2, 4, 8, 16, 32)  # texts
PARTS = {  # by the names of parameters, first match
    "normalisation": r"norm|\bln_?\w*\b|layer_?scale",
    "attention": r"att|\bmixer\b",
    "MLP and experts": r"mlp|ffn|feed_forward|\bfc\d?\b|intermediate|expert|dense|\blin\d\b|\bff\b",
    "embedding": r"embed|\bwte\b|\bwpe\b|shared",
    "head": r"head|cls|classifier|score|decoder",
}
QUERIES = {"q_proj", "query", "q", "q_lin"}
KEYS_AND_VALUES = {"k_proj", "key", "k", "k_lin", "v_proj", "value", "v", "v_lin"}
OUTPUTS = {"o_proj", "out_proj", "o", "out_lin"}


class WordScores(nn.Module):
    """Tokens to log-probabilities: of the next token, or of every token itself where both sides count.

    The network's parameters keep their names.
    """

    def __init__(self, network: nn.Module, causal: bool) -> None:
        super().__init__()
        # under names that no child has, or it would be hidden from those who ask for it by its own
        vars(self)["_scored"], vars(self)["_causal"] = network, causal
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[shared] = vars(network)[shared]
        self.training = network.training

    def forward(self, input_ids: Tensor) -> Tensor:
        """[n, T] to [n, T - 1] or [n, T]."""
        scores = every_logit(vars(self)["_scored"], input_ids).log_softmax(-1)
        if vars(self)["_causal"]:
            scores, input_ids = scores[:, :-1], input_ids[:, 1:]
        return scores.gather(-1, input_ids[..., None])[..., 0]


def every_logit(network: nn.Module, tokens: Tensor) -> Tensor:
    """[n, T, words]; refused for networks that score whole texts."""
    given = {"use_cache": False} if caches(network) else {}
    out = network(input_ids=tokens, **given) if from_transformers(network) else network(tokens)
    out = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != tokens.shape:
        raise UnsupportedError("this panel is about networks that score words at every position, and this one does not")
    if out.shape[2] <= int(tokens.max()):
        raise UnsupportedError(f"its {out.shape[2]} scores per position do not belong to the tokens it takes")
    return out


def is_causal(network: nn.Module, tokens: Tensor) -> bool:
    """Does the score at the first position not depend on the last token?"""
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % (int(tokens.max()) + 1)
    with torch.no_grad():
        return torch.equal(every_logit(network, tokens)[:, 0], every_logit(network, other)[:, 0])


@dataclass(frozen=True)
class WordFacts:
    """Numbers of one network on n texts of T positions.

    `strength` [T] is the mean of K[(i, t), (i, t)], `within` [T, T] the mean cosine of two positions of one text,
    `same` and `other` the mean cosine between places of different texts with the same and with different words.
    """

    strength: np.ndarray[Any, Any]
    within: np.ndarray[Any, Any]
    same: float
    other: float
    parts: dict[str, float]
    heads: np.ndarray[Any, Any] | None  # [layers, heads], shares of the trace


def word_facts(network: nn.Module, tokens: Tensor) -> WordFacts:
    """The kernel over all positions of some texts [n, T], and where its trace lies."""
    inner = plain(network)
    causal = is_causal(inner, tokens[:2])
    scores, words = WordScores(inner, causal), tokens[:, 1:] if causal else tokens
    K = biascope.ntk(scores, tokens).tensor.double().cpu()  # [n, T, n, T]
    n = len(K)
    strength = torch.einsum("itit->it", K)
    scale = strength.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    cosine = (K / scale[:, :, None, None] / scale).clamp(-1, 1)
    within = torch.einsum("itis->ts", cosine) / n
    across = cosine.permute(0, 2, 1, 3)[~torch.eye(n, dtype=torch.bool)]  # [pairs of texts, T, T]
    alike = (words[:, None, :, None] == words[None, :, None, :]).cpu()[~torch.eye(n, dtype=torch.bool)]
    same = float(across[alike].mean()) if bool(alike.any()) else float("nan")
    other = float(across[~alike].mean()) if bool((~alike).any()) else float("nan")
    metric = biascope.fisher(scores, tokens, "diagonal", likelihood="gaussian")
    diagonal = metric.diagonal().double().cpu()
    shares = {k: diagonal[at].view(metric.space.shapes[k]) / diagonal.sum() for k, at in metric.space.ranges.items()}
    heads = head_shares(inner, shares)
    return WordFacts(strength.mean(0).numpy(), within.numpy(), same, other, part_shares(shares), heads)


def part_shares(shares: dict[str, Tensor]) -> dict[str, float]:
    """Of parts of the network, by the names of their parameters."""
    found: dict[str, float] = {}
    for name, share in shares.items():
        part = next((part for part, known in PARTS.items() if re.search(known, name.lower())), "other")
        found[part] = found.get(part, 0.0) + float(share.sum())
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def head_shares(network: nn.Module, shares: dict[str, Tensor]) -> "np.ndarray[Any, Any] | None":
    """[layers, heads]: queries, keys, values and outputs of every head; None where the names do not tell them.

    Keys and values that several heads share are divided equally among these.
    """
    config = getattr(network, "config", None)
    heads = next((getattr(config, k) for k in ("num_attention_heads", "n_head", "num_heads") if hasattr(config, k)), 0)
    if not isinstance(heads, int) or heads < 1:
        return None
    found: dict[int, Tensor] = {}
    kinds = {name: type(module).__name__ for name, module in network.named_modules()}
    for name, share in shares.items():
        path, _, what = name.rpartition(".")
        layer, leaf = next((int(p) for p in path.split(".") if p.isdigit()), None), path.rpartition(".")[2]
        if layer is None or not re.search(PARTS["attention"], path.lower()):
            continue
        if kinds.get(path) == "Conv1D" and what == "weight":
            share = share.T  # GPT-2 keeps [inputs, outputs]
        groups = heads if leaf in QUERIES else int(getattr(config, "num_key_value_heads", None) or heads)
        rows: Tensor | None = None
        if leaf in QUERIES | KEYS_AND_VALUES and len(share) % groups == 0:
            rows = share.reshape(groups, -1).sum(1).repeat_interleave(heads // groups) / (heads // groups)
        elif leaf == "c_attn" and len(share) % (3 * heads) == 0:
            rows = share.reshape(3, heads, -1).sum((0, 2))
        elif (leaf in OUTPUTS or leaf == "c_proj") and share.dim() == 2 and share.shape[1] % heads == 0:
            rows = share.reshape(len(share), heads, -1).sum((0, 2))
        if rows is not None:
            found[layer] = found.get(layer, torch.zeros(heads, dtype=share.dtype)) + rows
    return torch.stack([found[layer] for layer in sorted(found)]).numpy() if found else None


@card_panel(order=45, applies=lambda subject: subject.words > 0)
def panel(subject: Subject) -> Panel:
    """Positions, words, parts and heads of a language model, at the given weights or at initialisation."""
    subject.check_memory()
    network = subject.network if subject.trained is None else subject.trained
    when = "the given weights" if subject.trained is not None or subject.single else "initialisation"
    length = subject.examples(1).shape[1]
    every_logit(plain(network), subject.examples(2))
    seconds = subject.seconds("Tangent kernel") / 2
    tokens = subject.examples(largest_within(seconds, 6 * length * subject.pace().train, SIZES))
    found = word_facts(network, tokens)
    facts: list[tuple[str, object]] = [
        ("Texts", f"{len(tokens)} of {length} tokens, {subject.inputs_name}"),
        ("Network at", when),
        ("Cosine of places with the same word in different texts", f"{found.same:.3f}"),
        ("Cosine of places with different words in different texts", f"{found.other:.3f}"),
        *((f"Share of the trace, {part}", f"{share:.1%}") for part, share in found.parts.items()),
    ]
    maps = [_positions(found), _within(found)] + ([] if found.heads is None else [_heads(found.heads)])
    rows = [(t + 1, float(s)) for t, s in enumerate(found.strength)]
    blocks = [fact_list(facts), tag("div", *[tag("div", m) for m in maps], class_="columns")]
    blocks.append(table(["position", "strength"], rows, "positions", fold=True))
    if found.heads is not None:
        cells = [(i, j, float(v)) for i, line in enumerate(found.heads) for j, v in enumerate(line)]
        blocks.append(table(["layer", "head", "share of the trace"], cells, "heads", fold=True))
    return Panel(TITLE, READ, _meaning(found, when), blocks, headline=_headline(found))


def _meaning(found: WordFacts, when: str) -> str:
    part, share = next(iter(found.parts.items()))
    text = f"At {when} {share:.0%} of the trace lies in the {part}. "
    if np.isfinite(found.same) and np.isfinite(found.other):
        text += (
            f"A step on one place moves the same word in another text with cosine {found.same:.2f}, other words with "
            f"{found.other:.2f}. "
        )
    first, last = found.strength[0], found.strength[-1]
    text += f"The last position has {last / first:.2f} times the strength of the first."
    if found.heads is not None:
        layer, head = np.unravel_index(int(found.heads.argmax()), found.heads.shape)
        text += (
            f" The attention heads hold {found.heads.sum():.0%} of the trace, most of it head {head} of layer {layer} "
            f"({found.heads[layer, head]:.1%}; equal shares: {found.heads.mean():.1%})."
        )
    return text


def _headline(found: WordFacts) -> str:
    if not (np.isfinite(found.same) and np.isfinite(found.other)):
        return ""
    return (
        f"A gradient step on one occurrence of a word moves the same word in other texts with cosine {found.same:.2f}, "
        f"different words with {found.other:.2f}."
    )


def _positions(found: WordFacts) -> Html:
    places = np.arange(1, len(found.strength) + 1)
    with figures.style():
        drawing, axes = figures.new_figure(3.9, 2.6)
        axes.plot(places, found.strength, "o-", color="C0")
        axes.set(xlabel="position", ylabel="strength", ylim=(0, None))
    caption = "Mean over the texts of the squared gradient norm of each position's log-probability."
    alt = f"Strength by position, from {found.strength[0]:.3g} at the first to {found.strength[-1]:.3g} at the last."
    svg = figures.inline_svg(drawing, "positions")
    return figure(svg, alt, caption, figures.hover(axes, [("strength", places, found.strength)]))


def _map(values: "np.ndarray[Any, Any]", names: tuple[str, str, str], first: int, alt: str, caption: str) -> Html:
    rows, columns = values.shape
    x, y = (tuple(float(i + first) for i in range(size)) for size in (columns, rows))
    cells = HeatMap(names[2], "", *names, x, y, tuple(map(tuple, values.tolist())), alt, diverging=values.min() < 0)
    with figures.style():
        drawing = figures.draw(cells, 3.9, 3.0)
    return figure(figures.inline_svg(drawing, names[2]), alt, caption, figures.hover(drawing.axes[0], cells=cells))


def _within(found: WordFacts) -> Html:
    off = found.within[~np.eye(len(found.within), dtype=bool)]
    alt = f"Cosine of the gradients of two positions of one text; {off.mean():.2f} on average off the diagonal."
    caption = "Cosine of the gradients of two positions of one text, mean over the texts."
    return _map(found.within, ("position", "position", "cosine"), 1, alt, caption)


def _heads(heads: "np.ndarray[Any, Any]") -> Html:
    alt = f"Share of the kernel's trace by layer and head, between {heads.min():.2%} and {heads.max():.2%}."
    caption = "Share of the trace in the weights of each head; keys and values shared by heads are divided among them."
    return _map(heads, ("head", "layer", "share"), 0, alt, caption)
