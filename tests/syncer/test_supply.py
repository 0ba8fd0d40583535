import pytest
import torch

from hf_diloco.core import messages as ms
from hf_diloco.errors import MessageError
from hf_diloco.syncer.supply import Supply

pytestmark = pytest.mark.fast


def supply():
    found = Supply()
    constants = {"norm.running_mean": torch.zeros(2), "norm.count": torch.tensor(0), "frozen": torch.ones(3)}
    found.restore(constants, {}, ["norm.running_mean", "norm.count"])
    return found


def take(to, learner_id, name, value):
    message = ms.Statistic(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
    to.take_statistic(learner_id, message, value.reshape(-1).view(torch.uint8))


def test_running_statistics_are_averaged_by_tokens_and_counters_are_the_first_learners():
    ours = supply()
    for learner_id, mean, count in ((3, 1.0, 30), (1, 5.0, 10)):
        take(
            ours, learner_id, "norm.running_mean", torch.tensor([9.0, 9.0])
        )  # sent again on a new link: the last counts
        take(ours, learner_id, "norm.running_mean", torch.tensor([mean, -mean]))
        take(ours, learner_id, "norm.count", torch.tensor(count))
    assert ours.settle({3: 300, 1: 100, 7: 5000}) is None
    assert torch.equal(ours.constants["norm.running_mean"], torch.tensor([2.0, -2.0]))
    assert ours.constants["norm.count"] == 10
    assert torch.equal(ours.constants["frozen"], torch.ones(3))
    assert ours.settled


def test_without_any_nothing_changes_and_a_warning_names_them():
    ours = supply()
    assert ours.settle({0: 0}) is None, "nobody has trained"
    take(ours, 0, "frozen", torch.full((3,), 2.0))
    assert "(norm.count, norm.running_mean)" in ours.settle({0: 10})
    assert torch.equal(ours.constants["norm.running_mean"], torch.zeros(2))


def test_what_leavers_sent_is_used_only_where_nobody_came_to_the_end():
    ours = supply()
    for learner_id, mean in ((0, 1.0), (1, 3.0), (2, 7.0)):
        take(ours, learner_id, "norm.running_mean", torch.full((2,), mean))
    take(ours, 1, "norm.count", torch.tensor(5))
    ours.take_leave(0)
    ours.take_leave(1)
    ours.take_leave(3)
    assert ours.settle({0: 10, 1: 10, 2: 10}) is None
    assert torch.equal(ours.constants["norm.running_mean"], torch.full((2,), 7.0))
    assert ours.constants["norm.count"] == 5
    alone = supply()
    for learner_id, mean in ((0, 1.0), (1, 3.0)):
        take(alone, learner_id, "norm.running_mean", torch.full((2,), mean))
        alone.take_leave(learner_id)
    assert "(norm.count)" in alone.settle({0: 10, 1: 10})
    assert torch.equal(alone.constants["norm.running_mean"], torch.full((2,), 2.0))


def test_a_floating_buffer_in_another_precision_is_taken():
    ours = supply()
    take(ours, 0, "norm.running_mean", torch.ones(2, dtype=torch.bfloat16))
    ours.settle({0: 1})
    assert torch.equal(ours.constants["norm.running_mean"], torch.ones(2))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("other", torch.zeros(2), "no buffer of this model"),
        ("norm.running_mean", torch.zeros(3), "another dtype or shape"),
        ("norm.running_mean", torch.zeros(2).int(), "another dtype or shape"),
        ("norm.running_mean", torch.tensor([0.0, torch.nan]), "NaN"),
    ],
)
def test_what_is_no_statistic_of_this_model_is_refused(name, value, why):
    with pytest.raises(MessageError, match=why):
        take(supply(), 0, name, value)
