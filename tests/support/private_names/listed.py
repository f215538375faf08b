"""Private names of torch that the course relies on: what for, and what to do when one is gone.

``tests/vgpu/test_torch_private_names.py`` tests each on the installed torch, and tests/house
compares the list with the code: a private name that the code uses but the list lacks fails, and so
does the reverse. docs/new_torch.md says when to run it.
"""

from typing import NamedTuple


class Reliance(NamedTuple):
    """Names that serve one purpose; ``without`` says what to do when one of them is gone."""

    purpose: str
    without: str
    names: tuple[str, ...]


RELIANCES = (
    Reliance(
        "a tensor that Python sees on a virtual GPU, and C++ on the device type lazy",
        "Everything depends on it: look at how torch.testing._internal.two_tensor and DTensor create "
        "their wrappers now, and do the same in tensor/tensor.py and "
        "collectives/wrappers.py.",
        (
            "torch.Tensor._make_wrapper_subclass",
            "torch._C.TensorBase",
            "torch._C._disabled_torch_function_impl",
            "torch._C._set_conj",
            "torch._C._set_neg",
            "torch._tensor_str._str",
            "torch._tensor_str._tensor_str",
        ),
    ),
    Reliance(
        "seeing each operator, with modes and dispatch keys",
        "torch.utils._python_dispatch has long been private in name only; follow what FakeTensor "
        "imports, in tensor/compute.py, tensor/methods.py and tensor/shapes.py.",
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch._C.DisableTorchFunctionSubclass",
            "torch._C.DispatchKey",
            "torch._C.DispatchKeySet",
            "torch._C._AutoDispatchBelowAutograd",
            "torch._C._ExcludeDispatchKeyGuard",
            "torch._C._ForceDispatchKeyGuard",
            "torch._C._RestorePythonTLSSnapshot",
            "torch._C._SetExcludeDispatchKeyGuard",
            "torch._C._TorchDispatchModeKey.FAKE",
            "torch._C._dispatch_tls_local_exclude_set",
            "torch._C._dispatch_tls_local_include_set",
            "torch._C._get_dispatch_mode",
        ),
    ),
    Reliance(
        "products of float8 tensors in plans",
        "torch.nn.functional.scaled_mm computes the same: let plan/float8.py call it, and "
        "plan/parallel_model.py count what it becomes.",
        ("torch._scaled_mm", "torch.ops.aten._scaled_mm.default"),
    ),
    Reliance(
        "kernels of custom operators, on virtual tensors",
        "In tensor/operators.py and tensor/kernels.py, find another way to ask for kernels registered "
        "from Python. tests/vgpu/tensor/test_custom_operators.py tells whether it works.",
        (
            "torch._library.utils._c_check_aliasing_constraint",
            "torch.library._defs",
            "torch.library._impls",
        ),
    ),
    Reliance(
        "which operators there are, what their schemas say, and for which keys they have kernels",
        "Find another way to ask the registry (torch.library, torch._ops) in tensor/operators.py, "
        "tensor/kernels.py and collectives/dispatch.py; as a last resort, try the operator on a CPU tensor once.",
        (
            "torch._C.FunctionSchema",
            "torch._C._dispatch_get_all_op_names",
            "torch._C._dispatch_has_kernel",
            "torch._C._dispatch_has_kernel_for_dispatch_key",
            "torch._ops.OpOverloadPacket",
        ),
    ),
    Reliance(
        "views and versions: an in-place change through one name is visible through the others",
        "Without a substitute in tensor/views.py and torch_patches/data_assignment.py, refuse "
        "changes of shape in place and p.data = q (tensor/refusals.py): an error is better "
        "than a wrong gradient. tests/vgpu/tensor/test_views.py tells whether it works.",
        (
            "torch.Tensor._version",
            "torch.Tensor._base",
            "torch.Tensor._is_view",
            "torch.Tensor._backward_hooks",
            "torch.Tensor._post_accumulate_grad_hooks",
            "torch.Tensor._use_count",
            "torch.UntypedStorage._cdata",
            "torch._C._autograd.CreationMeta",
            "torch._C._autograd._get_creation_meta",
            "torch._C._dispatch_keys",
            "torch._C._increment_version",
            "torch._C._storage_Use_Count",
            "torch._C._swap_tensor_impl",
            "torch._has_compatible_shallow_copy_type",
        ),
    ),
    Reliance(
        "operators without a public name: fused attention and RMSNorm, softmax, functional "
        "collectives",
        "Call F.scaled_dot_product_attention, F.softmax or torch.distributed under a "
        "TorchDispatchMode and see which operator it calls now; tensor/cuda_kernels.py, "
        "torch_patches/attention.py, collectives/wrappers.py.",
        (
            "torch.ops._c10d_functional._wrap_tensor_autograd",
            "torch.ops._c10d_functional.reduce_scatter_tensor",
            "torch.ops.aten._fused_rms_norm.default",
            "torch.ops.aten._log_softmax.default",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention.default",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "torch.ops.aten._softmax.default",
        ),
    ),
    Reliance(
        "the order in which kernels for attention are tried",
        "Use the order flash, efficient, math in torch_patches/attention.py, and say in docs/vgpu.md that "
        "sdpa_kernel(..., set_priority=True) has no effect.",
        ("torch._C._get_sdp_priority_order",),
    ),
    Reliance(
        "making the word vgpu a device type, with a device module and guards",
        "Read torch.utils.backend_registration and the example backend torch_openreg for the current "
        "way, then backend.py and memory/gpus.py.",
        (
            "torch._C._get_privateuse1_backend_name",
            "torch.library.Library._destroy",
            "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
            "torch._C._acc.DeviceGuard",
            "torch._C._autograd.DeviceType",
        ),
    ),
    Reliance(
        "torch.accelerator, and functions that ask for the available device type",
        "Find what torch/accelerator/__init__.py calls now, and replace that in "
        "torch_patches/functions.py.",
        (
            "torch._C._accelerator_emptyCache",
            "torch._C._accelerator_exchangeDevice",
            "torch._C._accelerator_getDeviceIndex",
            "torch._C._accelerator_getDeviceStats",
            "torch._C._accelerator_getMemoryInfo",
            "torch._C._accelerator_getStream",
            "torch._C._accelerator_isAllocatorInitialized",
            "torch._C._accelerator_maybeExchangeDevice",
            "torch._C._accelerator_resetPeakStats",
            "torch._C._accelerator_setDeviceIndex",
            "torch._C._accelerator_setStream",
            "torch._C._accelerator_synchronizeDevice",
            "torch._utils._get_available_device_type",
            "torch._utils._get_device_index",
            "torch.nn.parallel.data_parallel._get_available_device_type",
        ),
    ),
    Reliance(
        "knowing which backward pass is running, and which forward operation a node belongs to",
        "Names of modules and passes in a timeline depend on it, and so does the stream of a backward "
        "operation (memory/gpus.py, time/host_threads.py); tensor hooks are another way to run a "
        "backward pass on the forward's stream.",
        (
            "torch._C._autograd._get_sequence_nr",
            "torch._C._current_autograd_node",
            "torch._C._current_graph_task_id",
            "torch.autograd.graph.Node._input_metadata",
            "torch.autograd.graph.Node._sequence_nr",
            "torch.autograd._engine_run_backward",
            "torch.autograd.Variable._execution_engine.queue_callback",
        ),
    ),
    Reliance(
        "functions that compare devices in C++ or read arguments there",
        "Look at how the Python function that users call reaches C++ now, and replace that name "
        "(torch_patches/functions.py, tensor/refusals.py).",
        (
            "torch._C._nn",
            "torch._VF._unpack_dual",
            "torch._functorch.eager_transforms",
            "torch._prims_common.suggest_memory_format",
            "torch._utils._handle_complex",
            "torch.autograd.forward_ad._current_level",
            "torch.utils._device.DeviceContext",
            "torch.utils._device._device_constructors",
        ),
    ),
    Reliance(
        "sparse tensors and nested containers",
        "Some have public counterparts (torch.utils._pytree: optree); use those.",
        (
            "torch.Tensor._indices",
            "torch.Tensor._nnz",
            "torch.Tensor._values",
            "torch.utils._pytree",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map",
        ),
    ),
    Reliance(
        "torch.save and torch.load in the format of CUDA checkpoints; sending to processes",
        "Save a tensor in torch_patches/serialization.py's test, and look at what its pickle names now; "
        "old checkpoints must still load.",
        (
            "torch.Tensor._reduce_ex_internal",
            "torch._tensor._rebuild_from_type_v2",
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_parameter_with_state",
            "torch._utils._rebuild_tensor",
            "torch.serialization._package_registry.remove",
            "torch.serialization._serialization_tls.map_location",
            "torch.serialization._validate_device",
            "torch.storage._new_dtypes",
        ),
    ),
    Reliance(
        "the stream on which DataParallel copies to its replicas",
        "Replace what nn.parallel.comm and Scatter ask for a stream (torch_patches/data_parallel.py); "
        "without it, copies are right, but their time is on the wrong stream.",
        ("torch.nn.parallel._functions._get_stream",),
    ),
    Reliance(
        "virtual time of float32 products with TF32",
        "Read torch.backends' public fp32_precision in time/costs.py.",
        ("torch._C._get_fp32_precision_getter",),
    ),
    Reliance(
        "models whose tensors have no values: functions that would read one",
        "Run tests/vgpu/tensor/test_shapes.py: the error says what reads a value; replace that in "
        "tensor/shapes.py.",
        (
            "torch.distributed.Reducer._rebuild_buckets",
            "torch.nn.init._no_grad_trunc_normal_",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
        ),
    ),
    Reliance(
        "the backend vccl: process groups of virtual GPUs over gloo",
        "Backend.register_backend is public and stays; the rest is in "
        "collectives/process_groups.py. Compare new_group in torch/distributed/distributed_c10d.py.",
        (
            "torch.distributed.Backend._BackendPlugin",
            "torch.distributed.Backend._plugins",
            "torch.distributed.ProcessGroup._device_types",
            "torch.distributed.ProcessGroup._get_backend",
            "torch.distributed.ProcessGroup._register_backend",
            "torch.distributed.ProcessGroup._set_default_backend",
            "torch.distributed.distributed_c10d._coalescing_manager",
            "torch.distributed.distributed_c10d._get_split_source",
            "torch.distributed.distributed_c10d._new_process_group_helper",
        ),
    ),
    Reliance(
        "optimizers and clipping that handle all tensors at once by default, as on CUDA",
        "Find out what decides that now (torch_patches/functions.py); without it, steps are a loop with fewer "
        "temporary bytes and more kernels than CUDA's.",
        (
            "torch._C._group_tensors_by_device_and_dtype",
            "torch.nn.utils.clip_grad._has_foreach_support",
            "torch.optim.optimizer._foreach_supported_types",
            "torch.utils._foreach_utils._has_foreach_support",
        ),
    ),
    Reliance(
        "wrappers of virtual tensors: DTensor, and results of asynchronous collectives",
        "They must report their inner tensor's device (collectives/wrappers.py); "
        "tests/vgpu/collectives/test_wrappers.py shows which one doesn't.",
        (
            "torch.distributed._functional_collectives.AsyncCollectiveTensor",
            "torch.distributed.tensor._api.DTensor",
            "torch.distributed.tensor._random._PhiloxState",
            "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
        ),
    ),
    Reliance(
        "refusing what only NCCL has, and replacing its premultiplied sum",
        "If FSDP2 now reduces in another way, adapt collectives/wrappers.py; gloo's error says "
        "what it can't do.",
        (
            "torch.distributed._symmetric_memory.empty",
            "torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors",
        ),
    ),
    Reliance(
        "bytes by cause: which functions of FSDP2 and DDP allocate for gathers, and for gradients",
        "Name the functions that do it now in vgpu/profiling/peaks.py; tests/vgpu/profiling/test_peaks.py says whether "
        "gathered parameters, gradients and buckets are found again.",
        (
            "torch.nn.parallel.DistributedDataParallel._pre_forward",
            "torch.distributed.fsdp._fully_shard._fsdp_collectives",
            "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_all_gather",
            "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_all_gather_copy_out",
            "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
            "._set_unsharded_grad_dtypes",
            "torch.distributed.tensor._api.DTensor._local_tensor",
        ),
    ),
    Reliance(
        "events of collectives in the profiler",
        "Use torch.profiler.record_function in collectives/dispatch.py.",
        ("torch._C._profiler._RecordFunctionFast",),
    ),
    Reliance(
        "a cluster that doesn't exist: groups with absent ranks",
        "The fake process group is torch's own test tool and moves with its tests: search torch "
        "for fake_pg, then adapt collectives/cluster.py, dispatch.py and process_groups.py.",
        (
            "torch._C._distributed_c10d.PythonCallbackWork",
            "torch._C.fork",
            "torch.distributed.distributed_c10d._resolve_process_group",
            "torch.testing._internal.distributed.fake_pg.FakeProcessGroup._create_internal",
            "torch.testing._internal.distributed.fake_pg.FakeStore",
        ),
    ),
    Reliance(
        "emptying DTensor's sharding caches when a cluster's block ends",
        "Look at where torch/distributed/tensor/_sharding_prop.py caches its results, and empty "
        "that in collectives/cluster.py.",
        (
            "torch._C._clear_DTensor_sharding_propagator_cache",
            "torch.distributed.tensor._api.DTensor._op_dispatcher",
        ),
    ),
    Reliance(
        "torch's pipelines on a cluster, whose absent ranks can't vote",
        "Look at how a schedule initializes before its first step, and what it skips for torch's "
        "fake process group; collectives/wrappers.py makes it skip the same.",
        (
            "torch.distributed.pipelining.schedules._PipelineSchedule",
            "torch.distributed.pipelining.schedules._PipelineSchedule"
            "._initialize_pipeline_distributed_state",
            "torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p",
        ),
    ),
    Reliance(
        "saying which rank waits for what",
        "launch/call_sites.py falls back to the ranks' Python stacks if the flight recorder has "
        "nothing; the messages in lesson 06 are then less certain, and its tests show where.",
        (
            "torch._C._distributed_c10d._dump_fr_trace",
            "torch.distributed.distributed_c10d._world.group_count",
            "torch.distributed.distributed_c10d._world.pg_map",
        ),
    ),
    Reliance(
        "PyTorch's own report on a memory snapshot, in lesson 16",
        "Look in torch/cuda for what now reads the dictionary of torch.cuda.memory._snapshot, and "
        "compare vgpu/memory/snapshot.py with it.",
        ("torch.cuda._memory_viz",),
    ),
    Reliance(
        "torch.compile and flex_attention on virtual GPUs",
        "See in torch/_dynamo/eval_frame.py how OptimizedModule creates its forward, and in "
        "torch/nn/attention/flex_attention.py how flex_attention checks devices and calls its "
        "operator; then adapt torch_patches/compile.py and torch_patches/flex_attention.py.",
        (
            "torch._dynamo.eval_frame.OptimizedModule._initialize",
            "torch._dynamo.trace_rules.SKIP_DIRS",
            "torch._dynamo.trace_rules.add",
            "torch._higher_order_ops.flex_attention._permute_strides",
            "torch._higher_order_ops.flex_attention.math_attention",
            "torch.nn.attention.flex_attention._validate_device",
            "torch.nn.attention.flex_attention._warn_once",
            "torch.nn.attention.flex_attention.flex_attention_hop",
        ),
    ),
    Reliance(
        "torch's own tests for CUDA on virtual GPUs",
        "See how torch/testing/_internal/common_utils.py makes a test's own streams current, and "
        "replace that in torch_patches/cuda_names.py.",
        (
            "torch._C._cuda_setDevice",
            "torch._C._cuda_setStream",
        ),
    ),
    Reliance(
        "distinguishing torch's compile workers from a program's processes",
        "Add what starts them now to for_children/sitecustomize.py.",
        ("torch._inductor",),
    ),
    Reliance(
        "starting ranks quickly: what the forkserver imports ahead",
        "Remove it from PRELOAD in launch/forkserver.py; ranks then start more slowly.",
        ("torch._dynamo",),
    ),
    Reliance(
        "lesson 01's GPUs that NVML would count",
        "Lesson 01 and its check 1.3 use these names of torch/cuda/__init__.py; use the current names "
        "in both, or leave that part to machines with GPUs.",
        (
            "torch._C._cuda_getDeviceCount",
            "torch.cuda._device_count_nvml",
            "torch.cuda._get_nvml_device_index",
            "torch.cuda._is_compiled",
            "torch.cuda._raw_device_count_nvml",
        ),
    ),
    Reliance(
        "the result of PyTorch's own ring attention, reassembled",
        "Lesson 14 compares its ring with it: use the public name if there is one by then, or "
        "leave out that comparison.",
        ("torch.distributed.tensor.experimental._attention.context_parallel_unshard",),
    ),
    Reliance(
        "PyTorch's own test suites, run on a virtual GPU, and peers in benchmarks",
        "Adapt tests/conformance/suites.py to where they moved; a suite that's gone is a gap to report, "
        "not to skip silently.",
        (
            "torch._neg_view",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch.testing._internal.common_methods_invocations.op_db",
            "torch.testing._internal.common_modules",
            "torch.testing._internal.common_modules.module_db",
            "torch.testing._internal.common_optimizers",
            "torch.testing._internal.common_optimizers"
            "._get_optim_inputs_including_global_cliquey_kwargs",
            "torch.testing._internal.opinfo.core.OpInfo",
            "torch.testing._internal.two_tensor.TwoTensor",
        ),
    ),
)
"""In the order in which to check a new torch: what everything depends on comes first."""

WITHOUT_CUDA = (
    "torch._C._cuda_getDeviceCount",
    "torch._C._cuda_setDevice",
    "torch._C._cuda_setStream",
)
"""Missing from PyTorch's CPU builds; lesson 01 and ``--cuda-is-vgpu`` create them temporarily."""

SINCE = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
    "._set_unsharded_grad_dtypes": (2, 15),
    "torch.distributed.pipelining.schedules._PipelineSchedule"
    "._initialize_pipeline_distributed_state": (2, 15),
}
"""Missing from torch before this release; vgpu/torch_releases.py says what's there instead."""

UNTIL = {
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed": (
        2,
        14,
    ),
    "torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p": (2, 14),
}
"""Missing from torch after this release."""
