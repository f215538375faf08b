"""``import vgpu.enabled``: virtual GPUs for a script that knows nothing of them.

Two, or as many as the environment variable ``VGPU_COUNT`` says. What was written for
``torch.cuda`` runs on them once its ``cuda`` reads ``vgpu``.
"""

import os

from vgpu.backend import enable, is_enabled

if not is_enabled():
    enable(int(os.environ.get("VGPU_COUNT", "2")))
