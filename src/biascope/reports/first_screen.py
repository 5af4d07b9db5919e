"""The first screen of a card: its findings in three sentences, each with a link to its panel, and one picture."""

import re
from collections.abc import Sequence

from biascope.reports.html import Html, join, tag
from biascope.reports.panels.base import Panel

FIGURE = re.compile(r"<figure>.*?</figure>", re.DOTALL)


def first_screen(name: str, sentences: Sequence[tuple[str, str, str]], panels: Sequence[Panel]) -> Html:
    """Sentences as (text, panel, anchor) beside a picture; nothing where no panel has a finding."""
    if not sentences:
        return Html("")
    lines = [
        tag("li", tag("p", text), tag("a", f"See: {panel}", href=f"#{anchor}", class_="note"))
        for text, panel, anchor in sentences
    ]
    shown = tag("div", tag("h2", f"{name} in short"), tag("ul", join(lines)))
    return tag("section", shown, picture([anchor for _, _, anchor in sentences], panels), class_="first")


def picture(anchors: Sequence[str], panels: Sequence[Panel]) -> Html:
    """What a panel offers as its picture; else the first drawing of the panel of the first sentence that has one."""
    found = {panel.anchor: panel for panel in panels}
    told = [found[anchor] for anchor in anchors]
    for panel in told:
        if panel.picture:
            return panel.picture
    for panel in told:
        drawing = FIGURE.search("".join(panel.blocks))
        if drawing:
            return Html(_renamed(drawing[0]))
    return Html("")


def _renamed(markup: str) -> str:
    """Ids of a drawing that is on the page a second time."""
    markup = re.sub(r'\bid="', 'id="first-', markup)
    return re.sub(r'(href="#|url\(#)', r"\1first-", markup)
