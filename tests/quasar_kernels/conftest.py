"""Set-up of the kernel tests."""

from __future__ import annotations

import torch

# the tensors are small: threads that wait for one another cost ten times what they save
torch.set_num_threads(1)
