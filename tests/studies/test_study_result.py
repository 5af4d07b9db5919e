"""Results as data: what is written can be read back."""

import json
import math

import numpy as np
import pytest
import torch

from biascope.studies import Chart, Estimate, HeatMap, Series, StudyResult
from biascope.support.errors import InputError


def test_a_heat_map_keeps_its_cells_and_its_gaps() -> None:
    drawn = HeatMap.of(
        "m", "t", x=[0, 1], y=[5], z=[[0.25, None]], x_label="x", y_label="y", z_label="z", alt="two cells", low=0.0
    )
    result = StudyResult("m", {}, (drawn,))
    text = json.dumps(result.to_json(), allow_nan=False)
    back = StudyResult.from_json(json.loads(text)).figures[0]
    assert isinstance(back, HeatMap)
    assert back.z[0][0] == 0.25
    assert math.isnan(back.z[0][1])
    assert back.low == 0.0


def test_a_heat_map_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(InputError, match="2 rows of 1 cells"):
        HeatMap.of("m", "t", x=[0], y=[0, 1], z=[[1.0]], x_label="", y_label="", z_label="", alt="")


def test_a_chart_comes_back_equal() -> None:
    drawn = Chart("c", "t", "net", "y", (Series.of("s", [1, 2], [0.5, 1.0]),), alt="two points", x_names=("a", "b"))
    result = StudyResult("m", {}, (drawn,))
    assert StudyResult.from_json(json.loads(json.dumps(result.to_json()))).figures == (drawn,)


def test_an_estimate_of_a_tensor_or_array_is_that_of_its_numbers_in_double_precision() -> None:
    samples = torch.randn(7, generator=torch.Generator().manual_seed(0))  # float32
    found = Estimate.of(samples)
    assert found == Estimate.of(samples.tolist()) == Estimate.of(samples.numpy())
    exact = samples.double().numpy()
    assert found.value == pytest.approx(exact.mean(), rel=1e-14)
    assert found.standard_error == pytest.approx(np.std(exact, ddof=1) / 7**0.5, rel=1e-14)


def test_errors_of_rounding_are_said_to_be_none() -> None:
    assert str(Estimate(-1 / 90, 8.7e-18, 2)) == "-0.01111 ± 0 (n = 2)"
    assert str(Estimate(0.0, 0.0, 2)) == "0 ± 0 (n = 2)"
    assert str(Estimate(1.0, float("nan"))) == "1"  # an error that is not known is not shown
