"""What stands for a parameter in a save does not outlive it."""

import torch
from torch import nn

from penstock.step.attached.released_params import Absence, stand_in


def test_what_a_failed_save_leaves_is_gone_when_the_values_are_there_again() -> None:
    param = nn.Parameter(torch.ones(3))
    fetched = []
    absence = Absence([param], lambda: fetched.append(True))
    absence.begin()
    stand_in(param, torch.zeros(3))
    absence.end()  # A save that failed has not taken the stand-in back.
    absence.begin()
    assert "_part" not in vars(param)
    absence.end()
    assert torch.equal(param.detach(), torch.ones(3))
