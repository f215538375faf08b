"""Lesson 17: what fewer bits lose in weights, sums and products, and what's sent for them."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "J01",
        "half of bfloat16's values are left out",
        old="    return values[values.isfinite()]",
        new="    return values[values.isfinite()][::2]",
    ),
    Broken(
        "J02",
        "the weights are never in bfloat16",
        expensive=True,
        old='net.to(torch.bfloat16 if way == "all bfloat16" else torch.float32)',
        new="net.float()",
    ),
    Broken(
        "J02",
        "an update is larger than half a step",
        old="        weight -= 1e-4",
        new="        weight -= 1e-2",
    ),
    Broken(
        "J03",
        "each rank checks the full sum",
        expensive=True,
        old="found = shard.isinf().any().float()",
        new="found = everywhere.isinf().any().float()",
    ),
    Broken("J03", "no flag is sent", old="    dist.all_reduce(found, dist.ReduceOp.MAX)\n", new=""),
    Broken(
        "J04",
        "partial sums are not rounded",
        expensive=True,
        old="        total = total + part  # rounded to the type of the parts",
        new="        total = total.float() + part",
        further=[("    return total\n", "    return total.to(parts.dtype)\n")],
    ),
    Broken(
        "J05",
        "both runs send float32",
        expensive=True,
        old="mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)",
        new="mp_policy=MixedPrecisionPolicy()",
    ),
    Broken(
        "J05",
        "DDP has no hook",
        expensive=True,
        old="            model.register_comm_hook(None, bf16_compress_hook)",
        new="            pass",
    ),
    Broken(
        "J05",
        "PowerSGD's matrices are twice as wide",
        expensive=True,
        old="PowerSGDState(None, 4, 0",
        new="PowerSGDState(None, 8, 0",
    ),
    Broken(
        "J06",
        "the largest value does not determine the scale",
        cell="outliers-proved",
        old="    scale = most / largest.clamp(min=1e-30)",
        new="    scale = most / (100 * sizes.median())",
    ),
    Broken(
        "J06",
        "the stored scale is rounded down",
        cell="mxfp8-proved",
        old=".log2().ceil()",
        new=".log2().floor()",
    ),
    Broken(
        "J07",
        "the delayed scale already includes the current step",
        old='("delayed", max(largest[-history:], default=now))',
        new='("delayed", now)',
    ),
    Broken(
        "J08",
        "the largest values are summed",
        expensive=True,
        old="            dist.all_reduce(largest, dist.ReduceOp.MAX)\n    scale",
        new="            dist.all_reduce(largest)\n    scale",
    ),
    Broken(
        "J09",
        "each rank casts with its own scale",
        expensive=True,
        old="            dist.all_reduce(largest, dist.ReduceOp.MAX)\n            scale",
        new="            scale",
    ),
    Broken(
        "J10",
        "the scale is never used",
        expensive=True,
        old='"float8, a scale per tensor": True',
        new='"float8, a scale per tensor": False',
    ),
    Broken(
        "J11",
        "float8 is multiplied in bfloat16",
        old="    return scaled_mm(cast(x, scale_x), cast(weight, scale_weight).T, 1 / scale_x",
        new="    return F.linear(x, weight)\n"
        "    return scaled_mm(cast(x, scale_x), cast(weight, scale_weight).T, 1 / scale_x",
    ),
    Broken(
        "J12",
        "nothing is fused",
        expensive=True,
        old="        with vgpu.record(fuses=fuses, **shares) as timeline:\n            block",
        new="        with vgpu.record(**shares) as timeline:\n            block",
    ),
    Broken(
        "J13",
        "the plan's matmuls stay in bfloat16",
        expensive=True,
        old="gpu=H100_96, float8=float8)",
        new="gpu=H100_96)",
    ),
]
