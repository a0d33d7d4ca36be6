"""Worlds from process groups: who shares the data, not who shares the job."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.errors import OptionError
from penstock.torch import world_of

Join = Callable[[int, int], None]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Pretend to be one of many ranks; the others need not exist."""

    def start(rank: int, num_ranks: int) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", num_ranks), ("LOCAL_WORLD_SIZE", 4)):
            monkeypatch.setenv(name, str(value))
        distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())

    yield start
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_without_a_group_there_is_a_way_out() -> None:
    with pytest.raises(OptionError, match=r"World\.from_env"):
        world_of()


def test_the_default_group_is_the_job(join: Join) -> None:
    join(5, 8)
    assert world_of() == penstock.World(5, 8, num_nodes=2)


@pytest.mark.parametrize("rank", range(8))
def test_ranks_that_split_a_model_are_one_rank_of_the_data(join: Join, rank: int) -> None:
    join(rank, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    assert world_of(mesh["dp"]) == penstock.World(rank // 2, 4, num_nodes=2)
    assert world_of(mesh["dp"].get_group()) == world_of(mesh["dp"])


def test_worlds_of_ranks_that_split_a_model_are_told_apart(join: Join) -> None:
    join(5, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    mine = world_of(mesh["dp"])
    assert (mine.node, mine.local_rank, mine.num_local_ranks) == (1, 0, 2)
    assert mine.name != world_of(mesh["tp"]).name
    assert mine.name == world_of(mesh["dp"].get_group()).name
    assert world_of().name == ""


def test_nodes_may_have_different_numbers_of_ranks(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    join(1, 5)  # One rank on node 0, four on this one.
    assert world_of() == penstock.World(1, 5, 2, node=1, local_rank=0, num_local_ranks=4)
    others = world_of(distributed.new_group([0, 1, 2]))
    assert (others.local_rank, others.num_local_ranks) == (0, 2)


def test_several_dimensions_of_a_mesh_count_together(join: Join) -> None:
    join(6, 8)
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    assert world_of(mesh["dp_replicate", "dp_shard"]) == penstock.World(3, 4, num_nodes=2)


def test_a_group_of_others_is_refused(join: Join) -> None:
    join(3, 4)
    others = distributed.new_group([0, 1])
    with pytest.raises(OptionError, match="rank 3 is no member"):
        world_of(others)


def test_a_loader_takes_the_group_where_the_launcher_names_no_rank(
    join: Join, dataset: penstock.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(1, 2)
    monkeypatch.delenv("RANK")  # Lightning's own launcher leaves it out.
    loader = penstock.Loader(dataset, batch_size=4)
    assert loader.world == penstock.World(1, 2)
    assert torch.equal(next(iter(loader)).ids, next(iter(loader))["data"][:, 0])
