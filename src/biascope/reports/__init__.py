"""Figures for print and self-contained HTML pages. matplotlib is imported only when something is drawn."""

from biascope.reports.card import Card, make_card
from biascope.reports.compare import Comparison, make_compare
from biascope.reports.kept import Kept, keep
from biascope.reports.ledger import Row, ledger, ledger_markdown, ledger_page, summary
from biascope.reports.study_page import write_study_page

__all__ = [
    "Card",
    "Comparison",
    "Kept",
    "Row",
    "keep",
    "ledger",
    "ledger_markdown",
    "ledger_page",
    "make_card",
    "make_compare",
    "summary",
    "write_study_page",
]
