"""The supported releases of PyTorch, and everything the library does differently on some of them.

No other file checks a version. Code that works on every supported release isn't here. The releases
differ as follows; the code for each difference can be removed along with the release that is named:

- Since 2.15, pipelines initialize in
  ``_PipelineSchedule._initialize_pipeline_distributed_state``; before that, in ``_warmup_p2p``.
  Remove ``votes_in_warm_up`` and ``warm_up_alone`` along with 2.14.
- Since 2.14, a process group of an out-of-tree device type has a default backend; before that, C++
  warns that it has none. Remove ``name_default_backend`` along with 2.13.
- Since 2.15, FSDP2 upcasts accumulated unsharded gradients in
  ``FSDPParamGroup._set_unsharded_grad_dtypes``; before that, in
  ``FSDPParam.to_accumulated_grad_if_needed``. Remove ``widens_gradients`` along with 2.14.
- Since 2.14, torch and ``torch.distributed`` log to the current ``sys.stderr``; before that,
  to the one at import. Replace ``redirect_stderr`` with ``contextlib``'s along with 2.13.

docs/new_torch.md says what to do when a new release comes out.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import torch

OLDEST = (2, 13)
NEWEST_TRIED = (2, 15)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _written(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def check() -> None:
    """Raise ImportError on a torch older than ``OLDEST``."""
    if _release(torch.__version__) < OLDEST:
        raise ImportError(
            f"found torch {torch.__version__}, but virtual GPUs need {_written(OLDEST)} or newer: "
            f'python -m pip install "torch>={_written(OLDEST)}"'
        )


check()  # runs at import, because the rest of the library is imported after this file


# Names that are missing in torch


def name_of(owner: Any, name: str) -> str:
    """Return the full name, as in ``torch.nn.init.normal_``, including for a class's method."""
    where = getattr(owner, "__module__", "") if isinstance(owner, type) else ""
    of = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
    return ".".join(filter(None, (where, of, name)))


def was_tried() -> bool:
    """Whether this torch is no newer than the newest tested one."""
    return _release(torch.__version__) <= NEWEST_TRIED


@contextlib.contextmanager
def noting_missing(missing: list[str]) -> Iterator[None]:
    """On a torch newer than any tested, note a missing name, and skip the rest of the block."""
    try:
        yield
    except AttributeError as error:
        if was_tried() or error.name is None:
            raise
        missing.append(name_of(error.obj, error.name))


def report_missing(missing: list[str]) -> None:
    """Report in one sentence which names are missing in torch, and clear the list.

    On a torch newer than any tested, where the rest works without them, issue a RuntimeWarning,
    once per name. On a tested one, in which no name should be missing, raise AttributeError.
    """
    names = [name for name in dict.fromkeys(missing) if name not in _reported]
    missing.clear()
    if not names:
        return
    found = f"torch {torch.__version__} has no {', '.join(names)}"
    if was_tried():
        raise AttributeError(f"{found}, which virtual GPUs replace: see docs/new_torch.md")
    _reported.update(names)
    warnings.warn(
        f"{found}: virtual GPUs were tested with torch {_written(OLDEST)} to "
        f"{_written(NEWEST_TRIED)}, and continue without the features that need the missing names",
        RuntimeWarning,
        stacklevel=2,
    )


_reported: set[str] = set()


# Differences


def votes_in_warm_up(schedule: type) -> bool:
    """Whether ranks of this schedule vote in ``_warmup_p2p``, as before 2.15."""
    return hasattr(schedule, "_warmup_p2p")


def warm_up_alone(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """Run ``_warmup_p2p`` without the other ranks, as 2.15 does in a fake process group."""
    from torch.distributed.pipelining.stage import InferenceMode, PipelineStage

    for stage in stages:
        if not isinstance(stage, PipelineStage):  # the stage is traced, so its shapes are known
            continue
        stage._inference_mode = InferenceMode.STATIC
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            if len(set(stage.stage_index_to_group_rank.values())) > 1:
                raise RuntimeError(
                    f"Stage {stage.stage_index} requires dynamic shape inference, which needs the "
                    "other ranks, but they don't exist: pass input_args and output_args to "
                    "PipelineStage"
                )
            stage._inference_mode = InferenceMode.DYNAMIC


def widens_gradients(parameter: type, group: type) -> Callable[..., Any]:
    """Return FSDP2's function that upcasts gradients that haven't been reduced yet.

    ``parameter`` is ``FSDPParam``, and ``group`` is ``FSDPParamGroup``.
    """
    if hasattr(parameter, "to_accumulated_grad_if_needed"):
        return parameter.to_accumulated_grad_if_needed  # type: ignore[no-any-return]
    return group._set_unsharded_grad_dtypes  # type: ignore[attr-defined, no-any-return]


def name_default_backend(group: Any, kind: Any) -> None:
    """Set the default backend of a group that has none."""
    if group.name() == "undefined":
        group._set_default_backend(kind)


@contextlib.contextmanager
def redirect_stderr(target: TextIO) -> Iterator[None]:
    """Redirect stderr as ``contextlib`` does, including logs of torch and ``torch.distributed``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(target))
        for name in ("torch", "torch.distributed"):
            for handler in logging.getLogger(name).handlers:
                if type(handler) is logging.StreamHandler:
                    before = handler.setStream(target)
                    stack.callback(handler.setStream, before)
        yield
