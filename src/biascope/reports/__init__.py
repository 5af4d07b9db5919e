"""Figures for print and self-contained HTML pages. matplotlib is imported only when something is drawn."""

from biascope.reports.card import Card, make_card
from biascope.reports.ledger import Claim, ledger, ledger_markdown, ledger_page
from biascope.reports.study_page import write_study_page

__all__ = ["Card", "Claim", "ledger", "ledger_markdown", "ledger_page", "make_card", "write_study_page"]
