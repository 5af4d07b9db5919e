"""The page of a study: the claim, published numbers beside ours, the figures remade, the numbers, the command."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from biascope.reports import figures
from biascope.reports.glossary import meaning
from biascope.reports.html import Html, csv_link, figure, image, join, page, table, tag
from biascope.reports.published import citation, published_section, symbol_list
from biascope.studies import Chart, HeatMap, Run, StudyResult, find, load_result
from biascope.studies.claims import documents
from biascope.studies.judging import Judgement, judgements
from biascope.support.arguments import check_choice
from biascope.support.errors import CorruptError, InputError
from biascope.support.files import read_bytes, write_text
from biascope.support.signatures import checked

LONG = 300  # characters of a paragraph
MOST_DPI = 2400  # a figure of 3.4 by 2.4 inches is 8160 pixels wide then
INLINE = 20_000  # characters that the numbers of one chart may take on a page that is kept
SMOKE = "A smoke run: it shows that the study runs, and proves nothing, whatever the numbers and verdicts below say."


@checked
def measured(text: str) -> Html:
    """What was measured: one sentence a line where they are many."""
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text) if len(text) > LONG else [text]
    return tag("div", *(tag("p", sentence) for sentence in sentences), class_="meaning")


def write_study_page(
    path: str | Path, light: bool = False, formats: Sequence[str] = figures.FORMATS, dpi: int | None = None
) -> Path:
    """Draw the figures of a finished run folder (PNG, SVG, PDF) and write its `index.html`.

    Args:
        path: the run folder.
        light: the page links to the PNG files that are there, and to page.css and page.js in the folder above, instead
            of holding them, and nothing is drawn.
        formats: what to draw.
        dpi: of the PNG files; None for print.

    Example:
        >>> import tempfile
        >>> from biascope.studies import configure, execute
        >>> run = Run.create(Path(tempfile.mkdtemp()) / "r", configure("nad/fig4a"))
        >>> _ = execute(run); write_study_page(run.path).name
        'index.html'
    """
    for kind in formats:
        check_choice(kind, "formats", figures.FORMATS)
    if dpi is not None and not 1 <= dpi <= MOST_DPI:
        raise InputError(f"dpi={dpi}: from 1 to {MOST_DPI}, or None for print")
    run, result, raw = finished(path)
    if light:
        absent = [chart.name for chart in result.figures if not (run.path / "figures" / f"{chart.name}.png").is_file()]
        if absent:
            raise InputError(
                f"{run.path / 'figures'} has no {absent[0]}.png to link to: make the page without light first"
            )
    for chart in () if light else result.figures:
        figures.save(figures.draw(chart), run.path / "figures", chart.name, formats, dpi)
    write_text(run.path / "index.html", study_page(run, result, raw, light))
    return run.path / "index.html"


def finished(path: str | Path) -> tuple[Run, StudyResult, dict[str, Any]]:
    """`load_result`, and what pages, kept runs and the ledger need of the folder beside: refused by the file's name."""
    run, result, raw = load_result(path)
    check_config(run)
    if not isinstance(raw.get("study"), str) or not isinstance(raw.get("seconds", 0), int | float):
        raise CorruptError(f"{run.path / 'result.json'} is damaged: it needs the study's name and its seconds")
    if not isinstance(result.measured, str):
        raise CorruptError(f"{run.path / 'result.json'} is damaged: what was measured should be text")
    return run, result, raw


def check_config(run: Run) -> Run:
    """The run, if its configuration has the form that studies write.

    Example:
        >>> check_config(Run(Path("r"), {"options": []}, {}))
        Traceback (most recent call last):
        ...
        biascope.CorruptError: r/config.json is damaged: options should be a JSON object, not []
    """
    words: dict[type, str] = {dict: "a JSON object", int: "a whole number", str: "text"}
    for key, kind in (("options", dict), ("seed", int), ("study", str), ("size", str), ("device", str)):
        if key in run.config and not isinstance(run.config[key], kind):
            found = run.config[key]
            raise CorruptError(f"{run.path / 'config.json'} is damaged: {key} should be {words[kind]}, not {found!r}")
    return run


def study_page(run: Run, result: StudyResult, raw: dict[str, Any], light: bool = False) -> str:
    """The page as text."""
    study = find(raw["study"])
    device = run.environment.get("device_name", run.device)
    judged = judgements(run, result.numbers)
    facts = [
        ("Size", run.config.get("size", "")),
        ("Seed", run.seed),
        ("Time", _took(run, raw)),
        ("Device", device),
    ]
    numbers = [(name, estimate.value, _or_empty(estimate.standard_error), _or_empty(estimate.n))
               for name, estimate in result.numbers.items()]  # fmt: skip
    options = [(key, str(value)) for key, value in run.config.get("options", {}).items()]
    charts = [
        tag("section", tag("h2", chart.title), linked(chart) if light else chart_block(chart, f"f{i}"))
        for i, chart in enumerate(result.figures)
    ]
    drawn = {chart.name for chart in result.figures}
    pictures = [  # what a study drew itself, such as images of directions
        tag("section", tag("h2", _words(png)), figure(_picture(png, light), _alt(png), _caption(png)))
        for png in sorted([*(run.path / "figures").glob("*.png"), *(run.path / "pictures").glob("*.png")])
        if png.stem not in drawn
    ]
    beside = published_section([each for one in judged for each in one.compared])
    body = [
        tag("p", SMOKE, class_="meaning smoke") if run.config.get("size") == "smoke" else "",
        tag(
            "section",
            tag("h2", "The claim" if len(judged) == 1 else "The claims"),
            tag("p", citation(documents()[study.paper]), class_="note"),
            join(claim_block(each) for each in judged) or tag("p", study.statement),
        ),
        beside,
        tag(
            "section",
            tag("h2", "What was measured"),
            measured(result.measured),
            fact_list(facts),
            symbol_list(study.name, _texts(result)),
        ),
        *pictures,
        tag("div", join(charts), class_="columns"),
        tag(
            "section",
            tag("h2", "Numbers"),
            table(["quantity", "value", "standard error", "n"], numbers, "numbers", limit=40),
        ),
        tag(
            "section",
            tag("h2", "How to run it again"),
            tag("p", tag("code", command(run))),
            table(["option", "value"], options, "options", limit=40),
        ),
    ]
    made_with = ("biascope", "torch", "numpy", "python")
    versions = ", ".join(f"{name} {run.environment.get(name, '(version unknown)')}" for name in made_with)
    title = f"{study.name}: {study.summary.rstrip('.')}"
    return page(title, body, study.place, f"Made with {versions}.", look=".." if light else "")


def _texts(result: StudyResult) -> list[str]:
    """Everything on a page that may hold a symbol."""
    texts = [result.measured, *result.numbers]
    for chart in result.figures:
        texts += [chart.title, chart.x_label, chart.y_label, chart.caption]
        texts += [chart.z_label] if isinstance(chart, HeatMap) else [series.label for series in chart.series]
    return texts


def claim_block(judgement: Judgement) -> Html:
    """A claim on a page: its verdict with the size it rests on, the statement, the quotation, and why."""
    claim, level = judgement.claim, judgement.level
    smoke = judgement.run.config.get("size") == "smoke"
    verdict = judgement.verdict + ("" if level == "published size" else f", {level}")
    if smoke:
        verdict = f"proves nothing (smoke run): {judgement.verdict}"
    quote = tag("blockquote", claim.quote, tag("footer", claim.place)) if claim.quote else ""
    return join(
        [
            tag(
                "p",
                tag("span", verdict, class_="badge" if smoke else f"badge {judgement.verdict}"),
                " ",
                claim.statement,
            ),
            quote,
            tag("p", f"Run: {judgement.scope}. {judgement.reason}", class_="why"),
        ]
    )


def chart_block(chart: Chart | HeatMap, prefix: str) -> Html:
    """A chart on a page: the drawing, its words, its numbers as a file."""
    drawn = figures.draw(chart, 3.9, 2.6)
    axes, drawing = drawn.axes[0], figures.inline_svg(drawn, prefix)
    if isinstance(chart, HeatMap):
        hover = figures.hover(axes, cells=chart)
    else:
        hover = figures.hover(axes, [(series.label, series.x, series.y) for series in chart.series])
    shown = figure(drawing, chart.alt, chart.caption, hover)
    return join([shown, table(*figures.numbers(chart), chart.name, fold=True)])


def linked(chart: Chart | HeatMap) -> Html:
    """A chart as a link to its PNG beside the page; its numbers as a file, where long in result.json alone."""
    picture = tag("img", src=f"figures/{chart.name}.png", alt=chart.alt, loading="lazy")
    numbers = csv_link(*figures.numbers(chart), chart.name)
    if len(numbers) > INLINE:
        numbers = tag("a", "Numbers: result.json", href="result.json")
    return join([figure(picture, chart.alt, chart.caption), tag("p", numbers, class_="note")])


def _picture(png: Path, light: bool) -> Html:
    return (
        tag("img", src=f"{png.parent.name}/{png.name}", alt=_alt(png)) if light else image(read_bytes(png), _alt(png))
    )


def _alt(png: Path) -> str:
    return _caption(png) or _words(png)


def _caption(png: Path) -> str:
    """What a study says of a picture of its own."""
    beside = png.with_suffix(".txt")
    return read_bytes(beside).decode("utf-8").strip() if beside.exists() else ""


def fact_list(facts: list[tuple[str, object]]) -> Html:
    """Short facts side by side; the name of a quantity says under the pointer what it is."""
    rows = join(tag("div", tag("dt", name, title=meaning(name)), tag("dd", value)) for name, value in facts)
    return tag("dl", rows, class_="facts")


def command(run: Run) -> str:
    """The command that makes this run again."""
    study, size = str(run.config.get("study")), str(run.config.get("size", "smoke"))
    changed = [f"--set {shlex.quote(f'{key}={_typed(value)}')}" for key, value in changed_options(run).items()]
    return " ".join([f"biascope run {study} --size {size} --seed {run.seed} --device {run.device}", *changed])


def changed_options(run: Run) -> dict[str, Any]:
    """The options of a run that differ from what its size says."""
    usual = find(str(run.config.get("study"))).values(str(run.config.get("size", "smoke")))
    return {key: value for key, value in run.config.get("options", {}).items() if _differs(usual.get(key), value)}


def _typed(value: Any) -> str:
    """A value as it is typed on the command line: sequences with commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _took(run: Run, raw: dict[str, Any]) -> str:
    """Seconds, and what they do not count: earlier sittings, measurements that another study had made already."""
    found = sum(bool(line.get("from_cache")) for line in run.metrics())
    notes = ["resumed"] * bool(raw.get("resumed")) + [f"{found} measurements taken from other studies"] * bool(found)
    return f"{raw.get('seconds', 0):.3g} s" + (f" ({', '.join(notes)})" if notes else "")


def _words(file: Path) -> str:
    return file.stem.replace("-", " ").replace("_", " ").capitalize()


def _differs(usual: Any, value: Any) -> bool:
    return bool((list(usual) if isinstance(usual, tuple) else usual) != value)


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value
