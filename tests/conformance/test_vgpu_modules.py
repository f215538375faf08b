"""torch's own module samples (module_db): outputs, gradients and buffers match the CPU's."""

import copy

import pytest
import torch
from conformance import exceptions
from conformance.comparison import (
    DEVICE,
    check_same,
    check_same_outcome,
    gradients,
    run_seeded,
    to_gpu,
)
from conformance.suites import (
    ModuleInfo,
    ModuleInput,
    first,
    module_db,
    sampled,
)
from torch.nn.modules.lazy import LazyModuleMixin

# torch warns about the deprecated, experimental and beta features that its samples use on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# A module's first samples are the most diverse.
SAMPLES = 4

# Every module in both modes: for some, the mode makes no difference, but there's no reliable way to
# tell. Lazy modules aren't supported until they're initialized (docs/vgpu.md).
ENTRIES = {
    f"{info.formatted_name}-{mode}": (info, mode == "training")
    for info in module_db
    if not issubclass(info.module_cls, LazyModuleMixin)
    for mode in ("training", "evaluation")
}


@pytest.mark.parametrize("entry", sampled(ENTRIES).values(), ids=sampled(ENTRIES))
def test_modules_match_the_cpus_values_and_gradients(entry):
    info, training = entry
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    )
    for sample in first(SAMPLES, samples):
        _compare(info, sample, training)


def _compare(info: ModuleInfo, sample: ModuleInput, training: bool) -> None:
    made_of = sample.constructor_input
    module = run_seeded(info.module_cls, *made_of.args, **made_of.kwargs).train(training)
    module = module.to(torch.float32)
    if sample.forward_input is None:
        return
    inputs = (sample.forward_input.args, sample.forward_input.kwargs)
    gpu_module = copy.deepcopy(module).to(DEVICE)
    gpu_inputs = to_gpu(inputs, {})
    tolerance = exceptions.TOLERANCES.get(info.name)
    found, expected = check_same_outcome(
        lambda: run_seeded(module, *inputs[0], **inputs[1]),
        lambda: run_seeded(gpu_module, *gpu_inputs[0], **gpu_inputs[1]),
        "output",
        tolerance=tolerance,
    )
    check_same(gpu_module.state_dict(), module.state_dict(), "state")
    check_same_outcome(
        lambda: gradients(expected, (inputs, list(module.parameters()))),
        lambda: gradients(found, (gpu_inputs, list(gpu_module.parameters()))),
        "gradient",
        strides=False,
        tolerance=tolerance,
    )
