"""Fork the processes that tests start; spawned ones would import torch again in every test.

PyTorch's tests spawn processes because CUDA doesn't survive a fork; virtual GPUs do.
"""

import multiprocessing

import torch.multiprocessing as torch_multiprocessing

_forks = multiprocessing.get_context("fork")
torch_multiprocessing.get_context = lambda method=None: _forks
torch_multiprocessing.set_start_method = lambda method, force=False: None
torch_multiprocessing.Process = _forks.Process
torch_multiprocessing.Queue = _forks.Queue
