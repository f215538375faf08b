"""Which releases of PyTorch the library works with, and all that it does differently on some of them.

No other file asks for a version. Where one way works on every release of the range, that way is
taken, and nothing is said here. What differs, since when, and what goes with which release:

- Pipelines set themselves up in ``_PipelineSchedule._initialize_pipeline_distributed_state`` since
  2.15, and in ``_warmup_p2p`` before. With 2.14 go ``votes_in_warm_up`` and
  ``warm_up_alone``.
- A process group of another device type has a default backend since 2.14; before, C++ warns that it
  finds none. With 2.13 goes ``name_default_backend``.
- Gradients that FSDP2 keeps to be summed over the ranks later, it makes as wide as parameters in
  ``FSDPParamGroup._set_unsharded_grad_dtypes`` since 2.15, and before in
  ``FSDPParam.to_accumulated_grad_if_needed``. With 2.14 goes ``widens_gradients``.
- The logs of torch and ``torch.distributed`` go to what ``sys.stderr`` is then since 2.14, and
  before to what it was at import. With 2.13 goes ``redirect_stderr``, for that of ``contextlib``.

docs/new_torch.md says what to do with a new release.
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
    """ImportError on a torch older than ``OLDEST``."""
    if _release(torch.__version__) < OLDEST:
        raise ImportError(
            f"found torch {torch.__version__}, and virtual GPUs need {_written(OLDEST)} or newer: "
            f'install one, as in python -m pip install "torch>={_written(OLDEST)}"'
        )


check()  # here: all else of the library is imported after this file


# Names of torch's that are not there


def name_of(owner: Any, name: str) -> str:
    """As one writes it: ``torch.nn.init.normal_``, also for a method of a class."""
    where = getattr(owner, "__module__", "") if isinstance(owner, type) else ""
    of = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
    return ".".join(filter(None, (where, of, name)))


def was_tried() -> bool:
    """Whether this torch is no newer than the newest that was tried."""
    return _release(torch.__version__) <= NEWEST_TRIED


@contextlib.contextmanager
def noting_missing(missing: list[str]) -> Iterator[None]:
    """On a torch newer than any tried, note what the block does not find; the block ends there."""
    try:
        yield
    except AttributeError as error:
        if was_tried() or error.name is None:
            raise
        missing.append(name_of(error.obj, error.name))


def report_missing(missing: list[str]) -> None:
    """Say in one sentence which names of torch's were not found, and forget them.

    RuntimeWarning, once, on a torch newer than any tried, where the rest works without them;
    AttributeError on one that was tried, since none may be missing there.
    """
    names = [name for name in dict.fromkeys(missing) if name not in _reported]
    missing.clear()
    if not names:
        return
    found = f"torch {torch.__version__} has no {', '.join(names)}"
    if was_tried():
        raise AttributeError(f"{found}, and virtual GPUs replace that: see docs/new_torch.md")
    _reported.update(names)
    warnings.warn(
        f"{found}: virtual GPUs were tried with torch {_written(OLDEST)} to "
        f"{_written(NEWEST_TRIED)}, and go on without what rests on that",
        RuntimeWarning,
        stacklevel=2,
    )


_reported: set[str] = set()


# Differences


def votes_in_warm_up(schedule: type) -> bool:
    """Whether this class of schedules votes in ``_warmup_p2p``, as before 2.15."""
    return hasattr(schedule, "_warmup_p2p")


def warm_up_alone(schedule: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    """``_warmup_p2p`` where the other ranks are absent: what 2.15 does in a fake process group."""
    from torch.distributed.pipelining.stage import InferenceMode, PipelineStage

    for stage in stages:
        if not isinstance(stage, PipelineStage):  # traced, so its sizes are known
            continue
        stage._inference_mode = InferenceMode.STATIC
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            if len(set(stage.stage_index_to_group_rank.values())) > 1:
                raise RuntimeError(
                    f"Stage {stage.stage_index} requires dynamic shape inference, which needs the "
                    "other ranks, and they are absent: give input_args and output_args to "
                    "PipelineStage"
                )
            stage._inference_mode = InferenceMode.DYNAMIC


def widens_gradients(parameter: type, group: type) -> Callable[..., Any]:
    """The function of FSDP2 that makes gradients wider which are not reduced yet.

    parameter, group: ``FSDPParam`` and ``FSDPParamGroup``.
    """
    if hasattr(parameter, "to_accumulated_grad_if_needed"):
        return parameter.to_accumulated_grad_if_needed  # type: ignore[no-any-return]
    return group._set_unsharded_grad_dtypes  # type: ignore[attr-defined, no-any-return]


def name_default_backend(group: Any, kind: Any) -> None:
    """Give a group without a default backend the one of this kind."""
    if group.name() == "undefined":
        group._set_default_backend(kind)


@contextlib.contextmanager
def redirect_stderr(target: TextIO) -> Iterator[None]:
    """``contextlib.redirect_stderr``, also for the logs of torch and ``torch.distributed``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(target))
        for name in ("torch", "torch.distributed"):
            for handler in logging.getLogger(name).handlers:
                if type(handler) is logging.StreamHandler:
                    before = handler.setStream(target)
                    stack.callback(handler.setStream, before)
        yield
