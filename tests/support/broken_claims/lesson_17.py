"""Lesson 17: what fewer bits lose in weights, sums and products, and what's sent for them."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "J01",
        "half of bfloat16's numbers are left out",
        edits=[
            ("    return values[values.isfinite()]", "    return values[values.isfinite()][::2]")
        ],
    ),
    Broken(
        "J02",
        "the weights are never in bfloat16",
        edits=[('net.to(torch.bfloat16 if way == "bfloat16" else torch.float32)', "net.float()")],
    ),
    Broken(
        "J02",
        "an update is larger than half a step",
        edits=[("        weight -= 1e-4", "        weight -= 1e-2")],
    ),
    Broken(
        "J03",
        "each rank looks at the whole sum",
        edits=[
            (
                "found = shard.isinf().any().float()",
                "found = everywhere.isinf().any().float()",
            )
        ],
    ),
    Broken(
        "J03",
        "no flag is sent",
        edits=[("    dist.all_reduce(found, dist.ReduceOp.MAX)\n", "")],
    ),
    Broken(
        "J04",
        "partial sums are not rounded",
        edits=[
            (
                "        total = total + part  # rounded to the type of the parts",
                "        total = total.float() + part",
            ),
            ("    return total\n", "    return total.to(parts.dtype)\n"),
        ],
    ),
    Broken(
        "J05",
        "both ways travel in float32",
        edits=[
            (
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)",
                "mp_policy=MixedPrecisionPolicy()",
            )
        ],
    ),
    Broken(
        "J05",
        "DDP has no hook",
        edits=[
            ("            model.register_comm_hook(None, bf16_compress_hook)", "            pass")
        ],
    ),
    Broken(
        "J06",
        "the scale is not set by the largest number",
        edits=[("groups.abs().amax(dim, keepdim=True)", "(100 * groups.abs().median())")],
    ),
    Broken(
        "J07",
        "the delayed scale knows the current step",
        edits=[
            ('("delayed", max(largest[-history:], default=now))', '("delayed", now)'),
        ],
    ),
    Broken(
        "J08",
        "the largest numbers are added",
        edits=[
            (
                "            dist.all_reduce(largest, dist.ReduceOp.MAX)\n    scale",
                "            dist.all_reduce(largest)\n    scale",
            )
        ],
    ),
    Broken(
        "J09",
        "each rank casts with its own scale",
        edits=[
            (
                "            dist.all_reduce(largest, dist.ReduceOp.MAX)\n            scale",
                "            scale",
            )
        ],
    ),
    Broken(
        "J10",
        "the scale is never used",
        expensive=True,
        edits=[
            ('"float8, a scale per tensor": "tensor"', '"float8, a scale per tensor": "nothing"')
        ],
    ),
    Broken(
        "J11",
        "float8 is multiplied in bfloat16",
        edits=[
            (
                "    return scaled_mm(cast(x, scale_x), cast(weight, scale_weight).T, 1 / scale_x",
                "    return F.linear(x, weight)\n"
                "    return scaled_mm(cast(x, scale_x), cast(weight, scale_weight).T, 1 / scale_x",
            )
        ],
    ),
    Broken(
        "J12",
        "nothing is fused",
        expensive=True,
        edits=[
            (
                "        with vgpu.record(fuses=fuses, **shares) as timeline:\n            block",
                "        with vgpu.record(**shares) as timeline:\n            block",
            )
        ],
    ),
    Broken(
        "J13",
        "the plan's products stay in bfloat16",
        expensive=True,
        edits=[("gpu=H100_96, float8=float8)", "gpu=H100_96)")],
    ),
]
