import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from biascope.support.errors import InputError
from biascope.support.processes import ALONE, Processes, processes
from ranks import Failed, Ranks


def test_one_process_is_a_group_of_one() -> None:
    team = processes(None)
    t = torch.arange(3.0)
    with team:
        team.check()
        assert team.sum(t) is t
        team.reduce(t, 0)
        team.broadcast(t, 0)
    assert team is ALONE
    assert (team.rank, team.size, team.gather("a")) == (0, 1, ["a"])
    assert t.tolist() == [0.0, 1.0, 2.0]
    assert team.share(7) == slice(0, 7)
    with pytest.raises(InputError, match="group is a str"):
        processes("world")


def collectives(group: Any) -> tuple[Any, ...]:
    team = processes(group)
    team.bytes.clear()  # type: ignore[attr-defined]
    with team:
        total = team.sum(torch.arange(6.0).view(2, 3).mT + team.rank)  # not contiguous
        whole = torch.zeros(5, dtype=torch.float64)
        whole[team.share(5)] = torch.arange(5, dtype=torch.float64)[team.share(5)]
        team.sum(whole)
        owned = torch.full((2,), float(team.rank + 1))
        team.reduce(owned, 1)
        sent = torch.full((2,), float(team.rank))
        team.broadcast(sent, team.size - 1)
        names = team.gather(f"rank {team.rank}")
    return total, whole, owned, sent, names, dict(team.bytes)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(ranks: Ranks, size: int) -> None:
    for rank, (total, whole, owned, sent, names, traffic) in enumerate(ranks.run(collectives, size)):
        expected = size * torch.arange(6.0).view(2, 3).mT + sum(range(size))
        assert torch.equal(total, expected)
        assert whole.tolist() == [0, 1, 2, 3, 4]
        if rank == 1:
            assert owned.tolist() == [sum(range(1, size + 1))] * 2
        assert sent.tolist() == [size - 1.0] * 2
        assert names == [f"rank {r}" for r in range(size)]
        assert traffic == {"all_reduce": 6 * 4 + 5 * 8, "reduce": 8, "broadcast": 8}


def parts(group: Any) -> tuple[Any, ...]:
    team = processes(group)
    with team:
        joined = team.concatenate(torch.full((2, 3), float(team.rank)))
        summed = team.sum_part(torch.arange(2.0 * team.size)[:, None] * (team.rank + 1))
    return joined, summed


def test_parts_of_ranks_are_joined_and_sums_cut(ranks: Ranks) -> None:
    for rank, (joined, summed) in enumerate(ranks.run(parts, 2)):
        assert joined[:, 0].tolist() == [0, 0, 1, 1]
        assert summed.flatten().tolist() == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
    t = torch.ones(2)
    assert ALONE.concatenate(t) is t
    assert ALONE.sum_part(t) is t


def one_fails(team: Processes, where: str) -> None:
    with team:
        if where == "first" and team.rank == 1:
            raise InputError("label 7 of batch 3 is missing")
        t = team.sum(torch.ones(3))
        if where == "between" and team.rank == 1:
            raise InputError("label 7 of batch 3 is missing")
        for _ in range(1000 if where == "between" and team.rank != 1 else 1):  # a long pass without collectives
            team.check()
            time.sleep(0.02 if where == "between" else 0)
        team.sum(t)
        if where == "last" and team.rank == 1:
            raise InputError("label 7 of batch 3 is missing")


def fails(group: Any, where: str) -> float:
    team = processes(group)
    begin = time.monotonic()
    with pytest.raises(InputError, match="label 7 of batch 3"):
        one_fails(team, where)
    seconds = time.monotonic() - begin
    with team:  # the group is as good as new
        assert team.sum(torch.ones(1)).item() == team.size
    return seconds


@pytest.mark.parametrize("where", ["first", "between", "last"])
@pytest.mark.parametrize("size", [2, 4])
def test_an_error_on_one_rank_ends_all(ranks: Ranks, size: int, where: str) -> None:
    assert max(ranks.run(fails, size, where)) < 5


def fails_inside(group: Any) -> str:
    """An error that all know of may be dealt with by all, as `build` deals with a stale anatomy."""
    team = processes(group)
    with team:
        try:
            with team:
                if team.rank == 0:
                    raise KeyError("inner")
        except KeyError as error:
            return f"{error!r} {team.sum(torch.ones(1)).item()}"
    raise AssertionError("no error")


def test_an_inner_error_can_be_dealt_with(ranks: Ranks) -> None:
    assert ranks.run(fails_inside, 2) == ["KeyError('inner') 2.0"] * 2


def strange(group: Any) -> None:
    class Local(Exception):  # cannot be pickled
        pass

    with processes(group):
        if dist.get_rank(group) == 0:
            raise Local("only here")


def test_an_error_that_cannot_be_sent_comes_as_text(ranks: Ranks) -> None:
    mine, theirs = ranks.outcomes(strange, 2)
    assert isinstance(mine, Failed)
    assert isinstance(theirs, Failed)
    assert str(theirs.error) == "Local: only here"
    assert theirs.notes == ["(raised on rank 0 of 2)"]


def killed(group: Any) -> None:
    team = processes(group)
    with team:
        team.sum(torch.ones(1))
        if team.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        team.sum(torch.ones(3))


def test_a_rank_that_is_killed_leaves_no_other_waiting() -> None:
    """gloo sees it at once; who is left ends with torch's error, and asks nobody why."""
    crew, begin = Ranks(), time.monotonic()
    try:
        with pytest.raises(EOFError):
            crew.outcomes(killed, 3)
        for pipe in crew.pipes[1:3]:
            assert pipe.poll(30)
            assert isinstance(pipe.recv().error, RuntimeError)
    finally:
        crew.close()
    assert time.monotonic() - begin < 45


def disagrees(group: Any) -> None:
    team = processes(group)
    with team:
        team.agree(7, "batch size")
        team.agree(team.rank, "number of examples")


def test_what_must_be_the_same_is_compared(ranks: Ranks) -> None:
    with pytest.raises(InputError, match="number of examples: rank 0 has 0, rank 1 has 1"):
        ranks.run(disagrees, 2)


def outside(group: Any) -> None:
    small = dist.new_group([0], backend="gloo", use_local_synchronization=True) if dist.get_rank() == 0 else None
    processes(dist.GroupMember.NON_GROUP_MEMBER if small is None else small)


def test_a_process_outside_of_the_group(ranks: Ranks) -> None:
    inside, out = ranks.outcomes(outside, 2)
    assert inside is None
    assert isinstance(out, Failed)
    assert "not in the group" in str(out.error)


def mesh(group: Any) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    line = processes(init_device_mesh("cpu", (4,)))
    plane = processes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with plane:
        plane.sum(torch.ones(1))
    return line.size, plane.size


def test_a_device_mesh_is_a_group(ranks: Ranks) -> None:
    assert ranks.run(mesh, 4) == [(4, 4)] * 4


def test_work_is_dealt_out_by_cost() -> None:
    class Two(type(ALONE)):  # type: ignore[misc]
        size = 2

    assert Two().deal([1.0, 8.0, 5.0, 4.0]) == [0, 0, 1, 1]
    assert Two().deal([]) == []
    assert ALONE.deal([3.0, 2.0]) == [0, 0]
