"""One thread a test process: tiny tensors gain nothing from more, and the suite itself runs in parallel."""

import torch

torch.set_num_threads(1)
