"""torch's own operator samples (op_db), forward and backward, on a virtual GPU and the CPU."""

import functools
from collections.abc import Callable

import pytest
import torch
from conformance import exceptions
from conformance.comparison import (
    DEVICE,
    check_same_outcome,
    gradients,
    run_seeded,
    tensors_of,
    to_gpu,
    without_bases,
)
from conformance.suites import OpInfo, SampleInput, first, marked, op_db, sampled

# float32, one integer dtype (bool if there is none) and complex64, if the CPU supports them.
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
# torch warns about deprecated, experimental and beta operators, which its samples use on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# An operator's first samples are the most diverse (sizes, then options). They come from the
# OpInfo's own function: OpInfo.sample_inputs looks for the running test in the stack, which takes
# longer than the test.
SAMPLES = 3


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _dtypes(op: OpInfo) -> list[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    wanted = [torch.float32, *[dtype for dtype in INTEGERS if dtype in supported][:1]]
    return [dtype for dtype in (*wanted, torch.complex64) if dtype in supported]


# The jiterator compiles CUDA code; the CPU has no such operator.
CPU_OPERATORS = [op for op in op_db if not op.name.startswith("jiterator_")]


def _entries() -> dict[str, tuple[OpInfo, torch.dtype]]:
    return {
        f"{op.formatted_name}-{_short(dtype)}": (op, dtype)
        for op in CPU_OPERATORS
        for dtype in _dtypes(op)
    }


def _variants() -> dict[str, OpInfo]:
    return {
        op.formatted_name: op
        for op in CPU_OPERATORS
        if torch.float32 in op.supported_dtypes("cpu")
        and (op.inplace_variant is not None or op.method_variant is not None or op.supports_out)
    }


ENTRIES, VARIANTS = _entries(), _variants()


def _differentiable(op: OpInfo, dtype: torch.dtype) -> bool:
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def _gpu_inputs(op: OpInfo, inputs: tuple) -> tuple:
    moved = {}
    if op.name in exceptions.CPU_ARGUMENTS:
        moved = {id(tensor): tensor for tensor in tensors_of(inputs[1])}
    return to_gpu(inputs, moved)


def _call(op: Callable, inputs: tuple) -> object:
    sample_input, args, kwargs = inputs
    return run_seeded(op, sample_input, *args, **kwargs)


def _call_on_gpu(op: Callable, inputs: tuple) -> object:
    """Call an operator on the GPU, which is the default device if no input is a tensor."""
    if tensors_of(inputs):
        return _call(op, inputs)
    with torch.device(DEVICE):
        return _call(op, inputs)


def _compare(op: OpInfo, sample: SampleInput) -> bool:
    """Compare results, then gradients; return False if torch rejects the sample on the CPU."""
    inputs = without_bases((sample.input, sample.args, sample.kwargs))
    gpu_inputs = _gpu_inputs(op, inputs)
    options = {
        "values": op.name not in exceptions.UNINITIALIZED,
        "tolerance": exceptions.TOLERANCES.get(op.name),
    }
    found, expected = check_same_outcome(
        lambda: _call(op, inputs),
        lambda: _call_on_gpu(op, gpu_inputs),
        "result",
        strides=op.name not in exceptions.CUDA_LAYOUT or inputs[0].shape == inputs[1][0].shape,
        **options,
    )
    check_same_outcome(
        lambda: gradients(sample.output_process_fn_grad(expected), inputs),
        lambda: gradients(sample.output_process_fn_grad(found), gpu_inputs),
        "gradient",
        strides=False,
        **options,
    )
    return expected is not None


@pytest.mark.parametrize("entry", marked(sampled(ENTRIES), exceptions.OPERATORS))
def test_operators_match_the_cpus_values_and_gradients(entry):
    op, dtype = entry
    samples = op.sample_inputs_func(op, "cpu", dtype, _differentiable(op, dtype))
    assert any([_compare(op, sample) for sample in first(SAMPLES, samples)]), "nothing compared"


@pytest.mark.parametrize("entry", marked(VARIANTS, exceptions.VARIANTS))
def test_methods_in_place_variants_and_out_arguments_agree_with_the_cpu(entry):
    """These are the other ways to call an operator; each must write to the tensor passed."""
    op = entry
    for sample in first(1, op.sample_inputs_func(op, "cpu", torch.float32, False)):
        inputs = (sample.input, sample.args, sample.kwargs)
        _compare_method(op, inputs)
        _compare_out(op, inputs)
        _compare_in_place(op, inputs)


def _compare_method(op: OpInfo, inputs: tuple) -> None:
    if op.method_variant is None:
        return
    gpu_inputs = _gpu_inputs(op, inputs)
    check_same_outcome(
        lambda: _call(op.method_variant, inputs),
        lambda: _call(op.method_variant, gpu_inputs),
        "method",
        values=op.name not in exceptions.UNINITIALIZED,
    )


def _compare_in_place(op: OpInfo, inputs: tuple) -> None:
    if op.inplace_variant is None:
        return
    gpu_inputs = _gpu_inputs(op, inputs)
    found, _ = check_same_outcome(
        lambda: _call(op.inplace_variant, inputs),
        lambda: _call(op.inplace_variant, gpu_inputs),
        "in place",
    )
    if isinstance(gpu_inputs[0], torch.Tensor):
        assert found is None or found is gpu_inputs[0]


def _compare_out(op: OpInfo, inputs: tuple) -> None:
    # out= determines the device; exceptions.py says what happens if device= is also passed.
    sample_input, args, kwargs = inputs
    inputs = (sample_input, args, {name: kwargs[name] for name in kwargs if name != "device"})
    result = _call(op, inputs) if op.supports_out else None
    if not isinstance(result, torch.Tensor):
        return
    gpu_inputs = _gpu_inputs(op, inputs)
    out = torch.zeros_like(result)
    gpu_out = to_gpu(out, {})
    found, _ = check_same_outcome(
        lambda: _call(functools.partial(op, out=out), inputs),
        lambda: _call(functools.partial(op, out=gpu_out), gpu_inputs),
        "out",
        values=op.name not in exceptions.UNINITIALIZED,
    )
    assert found is None or found is gpu_out


@pytest.mark.xfail(strict=True, reason=exceptions.DEVICE_BESIDE_OUT)
def test_a_device_argument_can_be_combined_with_out():
    out = torch.empty(3, device=DEVICE)
    assert torch.zeros(3, out=out, device=DEVICE) is out


@pytest.mark.parametrize(
    ("entries", "table"), [(ENTRIES, exceptions.OPERATORS), (VARIANTS, exceptions.VARIANTS)]
)
def test_at_least_99_percent_of_operators_agree(entries, table):
    """Each exception must be an entry in the suite, and have a reason."""
    assert table.keys() <= entries.keys()
    assert len(table) <= len(entries) / 100, f"{len(table)} of {len(entries)} disagree"
    assert all(len(reason) > 20 for reason in table.values())
