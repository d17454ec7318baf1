"""Section 7: what a module's owner does around the rounds counts, or is refused by name."""

import pytest
import torch
from classifier import Classifier, federation, flat, modes
from torch import nn

import tcs_core as tcs


def test_an_autocast_around_whole_rounds_sees_every_local_step():
    cast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731

    def cast_loss(model, batch):
        with cast():
            return tcs.cross_entropy(model, batch)

    inside = federation(Classifier(), "FedAvg-L2", eta=0.5, loss=cast_loss)
    around = federation(Classifier(), "FedAvg-L2", eta=0.5)
    for _ in range(2):
        inside.round()
    with cast():
        for _ in range(2):
            around.round()
    assert torch.equal(inside.theta_D, around.theta_D)


def test_an_autocast_around_whole_rounds_leaves_averaged_statistics_exact():
    ends = []
    for enabled in (False, True):
        fed = federation(Classifier(), "FedAvg", weights=[1, 2])
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ends.append(fed.trainer.average_statistics([0, 1], [1.0, 2.0]))
            fed.statistics_NS[1] *= 1.01
            ends.append(fed.trainer.average_statistics([0, 1], [1.0, 2.0]))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


def test_modes_are_those_that_the_module_had_when_it_was_given():
    model = Classifier()
    model.train()
    model.stem.eval()
    fed = federation(model)
    model.eval()  # as one leaves it after an evaluation
    mean = model.stem[1].running_mean.clone()
    fed.round()
    assert torch.equal(model.stem[1].running_mean, mean)
    assert not any(modes(model).values())


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_another_type_of_parameters_is_refused_by_name(kind):
    model = Classifier()
    fed = federation(model)
    fed.round()
    model.to(kind)
    with pytest.raises(ValueError, match=rf"^model: stem.0.weight: got {kind}, allowed: torch.fl"):
        fed.round()


def test_another_device_is_refused_with_nothing_changed():
    model = Classifier()
    fed = federation(model)
    fed.round()
    theta_D = fed.theta_D.clone()
    model.to("meta")
    with pytest.raises(ValueError, match=r"^model: stem\.0\.weight: got one on meta, allowed: cpu"):
        fed.round()
    assert fed.theta_D.device.type == "cpu" and torch.equal(fed.theta_D, theta_D)


def test_a_state_has_what_the_owner_loaded_since_the_last_round():
    model = Classifier()
    fed = federation(model)
    fed.round()
    model.load_state_dict(
        {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    )
    with fed.evaluated():  # also there
        inside = fed.state_dict()
    for state in (inside, fed.state_dict()):
        assert (state["theta_D"] == 1).all()
        assert (state["statistics_NS"] == 1).all() and (state["left_S"] == 1).all()
    assert (fed.statistics_NS == 1).all()


def test_a_state_has_what_is_frozen_and_what_its_owner_loads_there():
    ends = []
    for resumed in (False, True):
        model = Classifier().frozen()
        fed = federation(model)
        fed.round()
        nn.init.ones_(model.stem[0].weight)
        fed.round()
        if resumed:
            state, model = fed.state_dict(), Classifier().frozen()
            nn.init.zeros_(model.stem[0].weight)
            fed = federation(model)
            fed.load_state_dict(state)
        fed.round()
        ends.append(flat(model))
        assert (model.stem[0].weight == 1).all()
    assert torch.equal(*ends)
