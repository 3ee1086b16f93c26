"""Networks of other tasks called in to help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..adversarial import Prepare
from ..heads import features, refit_head
from .learning import Task, answers
from .result import Continual


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Test accuracy of each task with the help of members, and without."""

    members: Tensor  # (tasks, k)
    accuracy: Tensor  # (tasks,)
    alone: Tensor  # (tasks,)

    def __repr__(self) -> str:
        helped, alone = (float(each.mean()) for each in (self.accuracy, self.alone))
        return (
            f"<Ensemble of {self.members.shape[1]} members for {len(self.members)} tasks: mean accuracy {helped:.3f}, "
            f"alone {alone:.3f}>"
        )


def ensemble(
    found: Continual, tasks: Sequence[Task], members: Tensor, *, prepare: Prepare | None = None, **options: Any
) -> Ensemble:
    """For each task the mean softmax answer of its own network and of its members, (tasks, k) numbers of other tasks.

    `sosie.linalg.most_similar(found.atoms().cosines(), k)` chooses the most similar. A member's network gives its
    features of the task's training images, once, and a last layer is fitted on them; other options are those of
    `refit_head`.
    """
    count = len(found)
    own = torch.arange(count)[:, None]
    members = members.cpu()
    if members.ndim != 2 or len(members) != count or len(tasks) != count:
        raise ValueError(f"need members (tasks, k) of {count} tasks, got {tuple(members.shape)} and {len(tasks)} tasks")
    if bool(((members < 0) | (members >= count) | (members == own)).any()):
        raise ValueError(f"members are numbers of other tasks, 0 to {count - 1}, got {members.tolist()}")
    helped, alone = [], []
    for k, (images, labels, test_images, test_labels) in enumerate(tasks):
        models = [found.model(int(member)) for member in members[k]]
        given: dict[str, Any] = {"head": found.head, "prepare": prepare}
        seen = torch.stack([features(model, images, **given) for model in models])
        heads = refit_head(seen, labels, int(labels.max()) + 1, **options)
        theirs = heads(torch.stack([features(model, test_images, **given) for model in models])).softmax(-1)
        ours = answers(found.model(k), test_images, prepare=prepare).softmax(-1)
        mean = torch.cat([ours[None], theirs]).mean(0)
        helped.append(float((mean.argmax(1) == test_labels).double().mean()))
        alone.append(float((ours.argmax(1) == test_labels).double().mean()))
    return Ensemble(members, torch.tensor(helped, dtype=torch.float64), torch.tensor(alone, dtype=torch.float64))
