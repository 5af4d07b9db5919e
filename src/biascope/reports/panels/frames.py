"""Pictures that a slider goes through."""

from typing import Any

from biascope.reports.html import Html, join, tag


def frame(name: str, i: int) -> dict[str, Any]:
    """Attributes of picture i of those that the slider `name` goes through."""
    return {"data_set": name, "data_frame": i + 1, "hidden": None if i == 0 else ""}


def slider(name: str, count: int) -> Html:
    """A slider over directions, and which one is shown."""
    handle = tag(
        "input", type="range", min=1, max=count, value=1, step=1, data_frames=name, aria_label="index of the direction"
    )
    label = tag("p", "Direction ", tag("output", "1", id=f"{name}-out"), f" of {count}", class_="note")
    return join([handle, label])
