"""Units are made once per anatomy, and are those of the question asked."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.curvature.pieces import ParameterSpace
from biascope.curvature.plan import make_units
from biascope.network.functional import functional
from biascope.network.stream import anatomy
from biascope.support.errors import InputError

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.LayerNorm(5))


def asked(found, f, representation="kfac", sharing="expand", sua=False, limit=2**40):
    return make_units(found, ParameterSpace.of(f), representation, sharing, sua, lambda: limit)


def test_units_of_every_question_are_its_own():
    f = functional(net())
    found = anatomy(f, X)
    questions = [
        (representation, sharing, sua)
        for representation in ("dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank")
        for sharing in ("expand", "reduce")
        for sua in (False, True)
    ]
    once = [asked(found, f, *q) for q in questions]
    again = [asked(found, f, *q) for q in questions]
    fresh = [asked(replace(found), f, *q) for q in questions]
    assert replace(found).plans == {}
    assert once == again == fresh


def test_the_plan_of_a_metric_is_made_once_but_not_for_maps():
    model = net()
    first, second = (bs.fisher(model, X, "ekfac") for _ in range(2))
    assert first.plan is second.plan
    mapped = bs.fisher(model, X, {"*": "diagonal"})
    assert {row[2] for row in mapped.plan.rows} == {"diagonal"}
    assert {row[2] for row in bs.fisher(model, X, "mixed").plan.rows} != {"diagonal"}


def test_a_mixture_is_made_anew():
    f = functional(net())
    found = anatomy(f, X)
    assert next(u.kind for u in asked(found, f, {"0": "diagonal"})) == "diagonal"
    assert next(u.kind for u in asked(found, f, {"0": "kfac"})) == "kfac"


def test_the_budget_is_asked_every_time():
    f = functional(net())
    found = anatomy(f, X)
    asked(found, f, "dense")
    with pytest.raises(InputError, match="a dense matrix of"):
        asked(found, f, "dense", limit=1000)


def test_a_changed_network_gets_another_plan():
    model = net()
    before = bs.fisher(model, X, "kfac").plan
    model[0].weight.requires_grad_(False)
    after = bs.fisher(model, X, "kfac").plan
    assert before["0.weight"] == "kfac"
    with pytest.raises(InputError, match=r"no parameter is called '0\.weight'"):
        after["0.weight"]
