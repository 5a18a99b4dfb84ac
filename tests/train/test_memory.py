"""Memory that is refused, by a GPU or by the host, is the user's to mend; anything else keeps its own words."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from joulelab.errors import OutOfMemory
from joulelab.train.training_session import _explain_out_of_memory

TASK = SimpleNamespace(stage="model.train", config=SimpleNamespace(batch_size=99999999))


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**58), lambda: torch.empty(2**62), lambda: np.empty(2**58)])
def test_a_batch_that_does_not_fit_is_reported_with_the_way_out(allocate):
    words = "does not fit into this machine's memory with micro-batches of 99999999"
    with pytest.raises(OutOfMemory, match=words) as output_text, _explain_out_of_memory(TASK):
        allocate()
    assert "raise accumulate by the same factor" in output_text.value.hint


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="cannot be multiplied"), _explain_out_of_memory(TASK):
        torch.ones(2, 3) @ torch.ones(2, 3)
