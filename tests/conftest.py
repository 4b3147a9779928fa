import os

import pytest
import torch

torch.set_num_threads(1)
SEED = int(os.environ.get("EXHUME_TEST_SEED", "0"))
torch.manual_seed(SEED)  # models built while tests are collected


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(SEED)
