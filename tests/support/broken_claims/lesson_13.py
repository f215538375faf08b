"""Lesson 13: splits that drop a sum, plans that send more, masks that repeat, links that are free."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "G01",
        "the input's gradient is not summed",
        expensive=True,
        old="        total = gradient.clone(memory_format=torch.contiguous_format)\n"
        "        dist.all_reduce(total)\n        return total",
        new="        return gradient",
    ),
    Broken(
        "G02",
        "the sum comes before the activation function",
        old="(sum(map(f, by_rows)) - f(x @ w))",
        new="(f(sum(by_rows)) - f(x @ w))",
    ),
    Broken(
        "G03",
        "every rank has the first rank's heads",
        expensive=True,
        old="cut(self.inner.get_submodule(name), 0, rank, world_size)",
        new="cut(self.inner.get_submodule(name), 0, 0, world_size)",
    ),
    Broken(
        "G03",
        "there are as many key-value heads as GPUs",
        expensive=True,
        old="TransformerSizes(1, 32, 8, key_value_heads, 128, 1)",
        new="TransformerSizes(1, 32, 8, 4, 128, 1)",
    ),
    Broken(
        "G04",
        "all changes go through a full tensor",
        expensive=True,
        old="after = before.redistribute(mesh, [new])",
        new="after = before.redistribute(mesh, [Replicate()]).redistribute(mesh, [new])",
    ),
    Broken(
        "G05",
        "the parts of the feed-forward sum are never added",
        expensive=True,
        old='    "feed_forward": entering(Replicate()),\n',
        new='    "feed_forward": entering(Replicate()),\n'
        '    "feed_forward.down": RowwiseParallel(output_layouts=Partial()),\n',
    ),
    Broken(
        "G06",
        "each matmul takes its input separately",
        expensive=True,
        old="launch.run(beside_one_gpt, 4, plan, batch",
        new="launch.run(beside_one_gpt, 4, first_plan, batch",
    ),
    Broken(
        "G07",
        "plain tensor parallelism is used instead",
        expensive=True,
        cell="sequence-proof",
        old='"with sequence parallelism": (sequence_plan, Shard(1))',
        new='"with sequence parallelism": (plan, Replicate())',
    ),
    Broken(
        "G07",
        "norms and residual additions are not split",
        cell="kept-split-proof",
        old="plan=gpt3_plan(Shard(1)), x_length=2048 // t",
        new="plan=gpt3_plan(Replicate())",
    ),
    Broken(
        "G08",
        "the first matmuls run in float32",
        old="layer = GPT3Layer(h, heads, core).bfloat16()",
        new="layer = GPT3Layer(h, heads, core)",
        further=[
            (
                "x = torch.empty(1, x_length or s, h, dtype=torch.bfloat16, requires_grad=True)",
                "x = torch.empty(1, x_length or s, h, requires_grad=True)",
            )
        ],
    ),
    Broken(
        "G09",
        "the logits are gathered anyway",
        expensive=True,
        old='layout = {"use_local_output": False} if split else',
        new="layout =",
    ),
    Broken(
        "G10",
        "NVLink connects the hosts",
        expensive=True,
        old='with vgpu.cluster(hosts, degree // hosts, "H100", link=link)',
        new='with vgpu.cluster(1, degree, "H100", link=link)',
    ),
    Broken(
        "G11",
        "split DTensors get their masks from plain tensors",
        expensive=True,
        old="found.append(F.dropout(ones, 0.5).to_local().cpu() != 0)",
        new="found.append(F.dropout(ones.to_local(), 0.5).cpu() != 0)",
    ),
    Broken("G12", "the layer is wide", old="narrow = times_s[1024]", new="narrow = times_s[8192]"),
]
