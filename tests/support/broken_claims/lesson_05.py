"""Lesson 05: what DataParallel makes anew at every forward, and throws away."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "B16",
        "replicas are kept from one forward to the next",
        before="""
kept = {}
def replicate_once(self, module, ids):
    return kept.setdefault(module, replicate(module, ids))
patch("torch.nn.DataParallel.replicate", replicate_once)
""",
    ),
    Broken(
        "B17",
        "the module itself stands in for its replicas",
        before="""
patch("torch.nn.DataParallel.replicate", lambda self, module, ids: [module] * len(ids))
""",
    ),
]
