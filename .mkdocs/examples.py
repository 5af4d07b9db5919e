"""What the site would misread: the heading `Example:` (it knows `Examples:`), and <K, L>, which is no HTML tag."""

import re
from typing import Any

import griffe


def as_meant(text: str) -> str:
    """The docstring with `Examples:` for `Example:` and, outside code, `&lt;` before letters."""
    text = re.sub(r"(?m)^(\s*)Example:\s*$", r"\1Examples:", text)
    prose, heading, examples = text.partition("Examples:\n")
    prose = re.sub(r"(`[^`]*`)|<(?=[A-Za-z/])", lambda found: found[1] or "&lt;", prose)
    return prose + heading + examples


class ExampleSections(griffe.Extension):
    """Every docstring as it is meant, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every function, class, module and attribute."""
        if obj.docstring:
            obj.docstring.value = as_meant(obj.docstring.value)
