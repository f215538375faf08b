"""Lesson 15: a free backward, other networks, no failures, one rate for all batches."""

from broken_claims import Broken

# Without the check that two and four layers predict all 32.
_FEW_LAYERS = [
    (
        "assert abs(seconds(first) / step.seconds - 1) < 0.01\n"
        'print(f"32 layers: {step.seconds:.4f} s; from 2 and 4 of them: {seconds(first):.4f} s")',
        "",
    )
]
_TWO_ROWS = [
    *_FEW_LAYERS,
    ('    "70B on 256, dp_shard 32 × tp 8": (llama("70B", 32, 8, 16, "full"), True, 597),\n', ""),
]
BROKEN = [
    Broken(
        "I01",
        "there is no backward pass",
        old="        model(tokens).sum().backward()",
        new="        model(tokens).sum()",
    ),
    Broken(
        "I02",
        "nothing is recomputed",
        expensive=True,
        shorter=[
            *_FEW_LAYERS,
            ('for how in ("none", "selective", "full")}', 'for how in ("none", "full")}'),
        ],
        old="ways = {how: dataclasses.replace(first, recompute=how)",
        new='ways = {how: dataclasses.replace(first, recompute="none")',
    ),
    Broken(
        "I03",
        "the hosts have one slow adapter",
        expensive=True,
        shorter=_TWO_ROWS,
        old="return Plan(LLAMA[model], layout, batch, recompute=recompute, gpu=H100_96)",
        new="return Plan(LLAMA[model], layout, batch, recompute=recompute, gpu=H100_96, "
        'network="Ethernet 25")',
    ),
    Broken(
        "I04",
        "nothing is recomputed",
        expensive=True,
        shorter=_FEW_LAYERS,
        old='llama("70B", 32, 8, 16, "full")',
        new='llama("70B", 32, 8, 16, "none")',
    ),
    Broken(
        "I05",
        "interleaving is not simulated",
        old="schedules.interleaved(8, micro_batches, chunks)",
        new="schedules.one_forward_one_backward(8, micro_batches)",
    ),
    Broken(
        "I06",
        "a batch has no more micro-batches than stages",
        expensive=True,
        shorter=[
            ("trainings = megatron.ROWS", "trainings = [megatron.ROWS[0], megatron.ROWS[-1]]")
        ],
        old="tera = {row.name: megatron.tera(row.run, of_a100) for row in trainings}",
        new="tera = {row.name: megatron.tera(row.run._replace(batch=row.run.dp * row.run.micro_batch"
        " * row.run.pp), of_a100) for row in trainings}",
    ),
    Broken(
        "I07",
        "the batch grows with the GPUs",
        expensive=True,
        old="batch=512 // gpus, sequence=2048)",
        new="batch=16, sequence=2048)",
    ),
    Broken(
        "I08",
        "checkpoints cost nothing",
        expensive=True,
        old="return estimate.expected_goodput(interval_s, checkpoint_s, restart_s, mean_s)",
        new="return estimate.expected_goodput(interval_s, 0, restart_s, mean_s)",
    ),
    Broken(
        "I09",
        "the rate never changes",
        expensive=True,
        shorter=[("for seed in range(3)]", "for seed in range(1)]")],
        old="optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)",
        new="optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)",
    ),
    Broken(
        "I10",
        "every size sends as much as the largest",
        expensive=True,
        old="numbers = torch.zeros(size // 4)",
        new="numbers = torch.zeros(sizes[-1] // 4)",
    ),
]
