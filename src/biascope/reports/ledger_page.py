"""The ledger as a page and as JSON: a card per claim with published and measured numbers side by side."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from biascope.reports.html import Html, csv_link, join, page, tag
from biascope.reports.ledger_rows import LEVELS, REPLICATIONS, VERDICTS, Row, provenance, summary, without_error
from biascope.reports.published import citation
from biascope.reports.study_page import finished
from biascope.studies.claims import Document, Published, documents
from biascope.studies.judging import Compared, Judgement
from biascope.studies.result import Estimate
from biascope.support.signatures import checked
from biascope.support.tables import number

HEADER = (
    "Id",
    "Figure",
    "Statement",
    "Claim",
    "Size",
    "Replication",
    "Published",
    "Measured",
    "Scope",
    "Rule set",
    "Why",
)
READ = (
    "A claim is supported, contradicted or undecided by a rule on the numbers of the largest run. Only a run of the "
    "published size can contradict. Beside it stands whether the published numbers came out again."
)
SHOWN = 8  # numbers on a card; all of them are in ledger.json


@checked
def ledger_page(rows: Sequence[Row], relative_to: Path | None = None, look: str = "") -> str:
    """The ledger as a page of cards, to be narrowed by verdict, size, replication, document and words.

    `look` is the folder of page.css and page.js, as in `page`.
    """
    known = {key: each for key, each in documents().items() if any(row.claim.paper == key for row in rows)}
    picks = [
        _pick("Claim", "verdict", VERDICTS, "all verdicts"),
        _pick("Size", "level", LEVELS[:3], "all sizes"),
        _pick("Numbers", "replication", REPLICATIONS, "all"),
        _pick("Document", "paper", tuple(known), "all documents", [each.title for each in known.values()]),
        tag("label", "Words ", tag("input", type="search", data_filter="words", placeholder="e.g. resnet")),
        csv_link(HEADER, [_flat(row) for row in rows], "ledger"),
    ]
    body: list[Html] = [tag("p", READ, class_="read"), tag("div", join(picks), class_="controls")]
    for key, document in known.items():
        mine = [row for row in rows if row.claim.paper == key]
        cards = join(_card(row, relative_to) for row in mine)
        head = [tag("h2", document.title), tag("p", citation(document, titled=False), class_="note")]
        body.append(tag("section", *head, *outcome(mine, document), tag("div", cards, class_="claims")))
    subtitle = f"What the papers say, what was measured, and the runs that show it. {summary(rows)}"
    return page("Ledger of claims", body, subtitle, "Written by `biascope ledger` from run folders.", look)


def _pick(name: str, key: str, values: Sequence[str], everything: str, words: Sequence[str] = ()) -> Html:
    options = [tag("option", everything, value="")]
    options += [tag("option", word, value=value) for value, word in zip(values, words or values)]
    return tag("label", f"{name} ", tag("select", join(options), data_filter=key))


def outcome(rows: Sequence[Row], document: Document) -> list[Html]:
    """What holds of a document's main claims, what does not hold as printed, and what is open: a sentence each."""
    main = [row for row in rows if row.claim.id in document.main]
    holds, open_ = ([_said(row) for row in main if row.verdict == verdict] for verdict in ("supported", "undecided"))
    fails = [_place(row) for row in rows if row.verdict == "contradicted"]
    parts = (("Holds", holds, "; "), ("Does not hold as printed", fails, ", "), ("Open", open_, "; "))
    found = [tag("p", summary(rows), class_="read")]
    for lead, some, between in parts:
        listed = [x for each in some for x in (between, each)][1:]
        found += [tag("p", tag("strong", f"{lead}: "), *listed, ".", class_="note")] if some else []
    return found


def _said(row: Row) -> Html:
    how = [_place(row), *filter(None, [_level(row), row.partly])]
    listed = [x for each in how for x in (", ", each)][1:]
    return join([f"{row.claim.statement.rstrip('.')} (", *listed, ")"])


def _level(row: Row) -> str:
    """At which size a claim is supported, where not at the published one."""
    return row.level if row.verdict == "supported" and row.level != LEVELS[0] else ""


def _place(row: Row) -> Html:
    return tag("a", _figure(row.claim.figure), href=f"#{_anchor(row)}")


def _anchor(row: Row) -> str:
    return row.claim.id.replace(" ", "-").replace(",", "")


def _card(row: Row, relative_to: Path | None) -> Html:
    claim = row.claim
    verdict = ", ".join(filter(None, [row.verdict, _level(row), row.partly]))
    badges: list[object] = [tag("span", verdict, class_=f"badge {row.verdict}")]
    words = {"agree": "numbers agree", "differ": "numbers differ", "in part": "numbers agree in part"}
    if row.replication in words:
        badges.append(tag("span", words[row.replication], class_=f"badge {row.replication.replace(' ', '-')}"))
    if row.fails_as_far_as_printed:
        badges.append(tag("span", "fails as far as the setting is printed", class_="badge differ"))
    if row.at_odds:
        badges.append(tag("span", "numbers agree, our rule fails", class_="badge at-odds"))
    also = f" (also {claim.also})" if claim.also else ""
    text = [
        tag("p", join(badges), class_="badges"),
        tag("h3", f"{_figure(claim.figure)}{also}"),
        tag("p", claim.statement, class_="statement"),
        _numbers(row),
        _bar(row),
        tag("p", row.sentence, class_="why"),
        _details(row, relative_to),
    ]
    picture = _thumbnail(row, relative_to)
    return tag(
        "article",
        picture,
        tag("div", join(text)),
        class_="claim" if picture else "claim plain",
        id=_anchor(row),
        data_verdict=row.verdict,
        data_level=row.level,
        data_replication=row.replication,
        data_paper=claim.paper,
    )


def _figure(figure: str) -> str:
    return (
        figure if figure[:1].isalpha() and not figure[1:2].isdigit() and "." not in figure[:2] else f"Figure {figure}"
    )


def _numbers(row: Row) -> Html:
    """Published and measured numbers side by side; without published ones, what the rule looks at."""
    ours = {each.published.number: each for each in row.compared}
    published = sorted(row.claim.published, key=lambda each: each.number not in ours)  # what was measured comes first
    if published:
        head = tag("tr", join(tag("th", name) for name in ("", "published", "measured", "")))
        lines = [_printed(each, ours.get(each.number)) for each in published[:SHOWN]]
    else:
        head = tag("tr", join(tag("th", name) for name in ("", "measured")))
        lines = [tag("tr", tag("td", name), tag("td", shown(each))) for name, each in row.measured[:SHOWN]]
    more = max(len(published or row.measured) - SHOWN, 0)
    rest = tag("p", f"{more} more in ledger.json", class_="note") if more else ""
    return join([tag("table", head, join(lines)), rest]) if lines else Html("")


def _printed(printed: Published, ours: Compared | None) -> Html:
    value = number(printed.value, printed.error) if printed.error else f"{printed.value:g}"
    mark = "" if ours is None else "agree" if ours.agree else "differ"
    setting = tag("small", f" {printed.setting}") if printed.setting else ""
    cells = (tag("td", value), tag("td", shown(ours.ours) if ours else "-"), tag("td", mark, class_=mark or None))
    return tag("tr", tag("td", printed.number, setting), *cells)


def shown(estimate: Estimate) -> str:
    """A number with its error, or why it has none.

    Example:
        >>> shown(Estimate(1.0, 0.1, 3)), shown(Estimate(0.5, None, 1))
        ('1.00 ± 0.10 (n = 3)', '0.5 (one run: no error)')
    """
    why = without_error(estimate)
    return f"{estimate.value:.4g} ({why})" if why else str(estimate)


def _bar(row: Row) -> Html:
    """The share of the published setting as a small bar, and in words."""
    if not row.scopes:
        return Html("")
    scope = row.scopes[0]
    shares = [each.share for each in (*scope.parts.values(), *scope.shares.values())]
    least = min(shares, default=1.0) if scope.known else 0.0
    meter = tag("span", tag("span", style=f"width:{100 * least:.0f}%"), class_="bar", title="smallest share")
    marked = f" Made by code of {row.provenance}." if row.provenance else ""
    return tag("p", meter, f" {row.scope}. Rule set {row.rule_set}.{marked}", class_="scope")


def _thumbnail(row: Row, relative_to: Path | None) -> Html:
    judgement = next((each.judgement for each in row.deciding), None) or next(iter(row.judgements), None)
    if judgement is None:
        return Html("")
    folder = judgement.run.path
    found = sorted((folder / "figures").glob("*.png")) or sorted((folder / "pictures").glob("*.png"))
    if not found:
        return Html("")
    names = [chart.name for chart in finished(folder)[1].figures]
    found.sort(key=lambda file: names.index(file.stem) if file.stem in names else len(names))
    picture = tag("img", src=_link(found[0], relative_to), alt=f"Figure of {folder.name}", loading="lazy")
    return tag("a", picture, href=f"{_link(folder, relative_to)}/index.html", class_="thumb")


def _details(row: Row, relative_to: Path | None) -> Html:
    claim = row.claim
    quote = tag("blockquote", claim.quote, tag("footer", claim.place)) if claim.quote else tag("p", claim.place)
    runs = [tag("li", _run(each, relative_to)) for each in row.judgements]
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    inside = [quote, tag("p", claim.why_rule) if claim.why_rule else "", tag("ul", join(runs)) if runs else ""]
    return tag("details", tag("summary", f"Quotation, rule, {count}"), join(inside))


def _run(each: Judgement, relative_to: Path | None) -> Html:
    link = tag("a", each.run.path.name, href=f"{_link(each.run.path, relative_to)}/index.html")
    kind = "" if each.level == LEVELS[0] else f", {each.level}"
    text = f": {each.verdict}{kind} ({each.scope}). {each.reason} Made by {provenance(each.run.environment)}."
    return join([link, text])


def _link(path: Path, relative_to: Path | None) -> str:
    return Path(os.path.relpath(path, relative_to)).as_posix() if relative_to else path.as_posix()


def _flat(row: Row) -> tuple[str, ...]:
    published = "; ".join(f"{each.number}: {each.value:g}" for each in row.claim.published)
    ours = [(each.published.number, each.ours) for each in row.compared] or list(row.measured)
    measured = "; ".join(f"{name}: {shown(each)}" for name, each in ours)
    about = (row.claim.id, row.claim.figure, row.claim.statement, row.verdict, row.level, row.replication)
    return (*about, published, measured, row.scope, row.rule_set, row.sentence)


@checked
def ledger_json(rows: Sequence[Row]) -> str:
    """Every row as JSON, with its runs."""
    return json.dumps([row.to_json() for row in rows], indent=1, ensure_ascii=False) + "\n"
