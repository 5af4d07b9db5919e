"""Docstrings here say `Example:`; the site's parser knows `Examples:`. This makes the one read as the other."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Turn every `Example:` heading into `Examples:` before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every function, class, module and attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:\s*$", r"\1Examples:", obj.docstring.value)
