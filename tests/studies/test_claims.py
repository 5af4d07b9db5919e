"""The catalogue of claims: whole, unambiguous, and refused when it is not."""

from pathlib import Path

import pytest

from biascope.errors import CorruptError
from biascope.studies.claims import claims
from biascope.studies.registry import PAPERS


def test_every_document_is_covered() -> None:
    found = claims()
    count = {paper: sum(claim.paper == paper for claim in found) for paper in PAPERS}
    assert min(count.values()) >= 17
    assert sum(count.values()) >= 140
    assert all(claim.claim.endswith(".") and claim.data for claim in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claim = 3", "not a catalogue"),
        ('[[claim]]\nid = "a"', "not a catalogue"),
        ('[[claim]]\nid="a"\npaper="nad"\nfigure="1"\nclaim="x."\nstudies=["s"]\ndata="d"\n' * 2, "more than once: a"),
        ('[[claim]]\nid="a"\npaper="x"\nfigure="1"\nclaim="x."\nstudies=["s"]\ndata="d"', "of an unknown paper: a"),
        ('[[claim]]\nid="a"\npaper="nad"\nfigure="1"\nclaim="x."\nstudies=[]\ndata="d"', "no study, no reason: a"),
    ],
)
def test_a_bad_catalogue_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(CorruptError, match=message):
        claims(tmp_path / "claims.toml")
