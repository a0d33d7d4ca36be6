"""Importance sampling: hard samples are drawn more often, and the gradient stays unbiased.

* `options` – `Importance`, what a user asks for
* `scores` – what is known about each sample, in whole numbers
* `draws` – probabilities, systematic draws and weights of one window
* `order`, `course` – windows of an epoch; those that are known by now
"""

from penstock.order.importance.course import ImportanceCourse
from penstock.order.importance.draws import Probabilities, draw, probabilities
from penstock.order.importance.options import Importance
from penstock.order.importance.order import ImportanceOrder, WindowDraws
from penstock.order.importance.scores import ScoreTable, StepLosses

__all__ = [
    "Importance",
    "ImportanceCourse",
    "ImportanceOrder",
    "Probabilities",
    "ScoreTable",
    "StepLosses",
    "WindowDraws",
    "draw",
    "probabilities",
]
