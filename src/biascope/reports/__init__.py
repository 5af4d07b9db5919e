"""Figures for print and self-contained HTML pages. matplotlib is imported only when something is drawn."""

from biascope.reports.card import Card as Card
from biascope.reports.card import make_card
from biascope.reports.compare import Comparison as Comparison
from biascope.reports.compare import make_compare
from biascope.reports.kept import Kept as Kept
from biascope.reports.kept import keep
from biascope.reports.kept import write_pages as write_pages
from biascope.reports.ledger_page import ledger_json as ledger_json
from biascope.reports.ledger_page import ledger_page as ledger_page
from biascope.reports.ledger_rows import Row as Row
from biascope.reports.ledger_rows import ledger
from biascope.reports.ledger_rows import summary as summary
from biascope.reports.study_page import write_study_page as write_study_page

__all__ = ["keep", "ledger", "make_card", "make_compare"]
