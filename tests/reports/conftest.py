"""A strict reader of pages, shared by the tests of this folder."""

from collections.abc import Callable
from html.parser import HTMLParser

import pytest


class Checker(HTMLParser):
    """Every tag closed in order, ids unique, pictures with words, nothing loaded from outside."""

    VOID = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "img" and not values.get("alt"):
            self.problems.append("img without alt")
        for key in ("src", "href", "xlink:href"):
            link = values.get(key)
            follows = tag == "a" and key == "href"  # a link loads nothing until a reader follows it
            if link and not follows and not link.startswith(("data:", "#")) and "://" in link:
                self.problems.append(f"loads {link}")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.problems.append(f"closes {tag}")


@pytest.fixture
def check_page() -> Callable[[str], None]:
    """A function that fails on a page that is not sound."""
    return _check


def _check(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.problems == []
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
