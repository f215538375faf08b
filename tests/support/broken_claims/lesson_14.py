"""Lesson 14: reversed meshes, norms counted twice, a ring that forgets, experts for everyone."""

from broken_claims import Broken

_ONE_STEP = [("itertools.islice(reader, 3)", "itertools.islice(reader, 1)")]

BROKEN = [
    Broken(
        "H01",
        "the mesh's first dimension varies fastest",
        expensive=True,
        old="mesh = init_device_mesh(my_gpu().type, shape, mesh_dim_names=names)",
        new="ranks = torch.arange(8).view(4, 2).T\n"
        "    mesh = dist.DeviceMesh(my_gpu().type, ranks, mesh_dim_names=names)",
    ),
    Broken(
        "H02",
        "each rank in a tensor group reads its own sequences",
        expensive=True,
        shorter=_ONE_STEP,
        old='train(model, mesh.get_local_rank("shard"), mesh["shard"].size())',
        new="train(model, rank, world_size)",
    ),
    Broken(
        "H09",
        "replicated gradients are added, too",
        expensive=True,
        old="                if not placement.is_replicate():\n"
        "                    group = parameter.device_mesh.get_group(dimension)\n"
        "                    dist.all_reduce(square, group=group)",
        new="                if dimension == 0:\n                    dist.all_reduce(square)",
    ),
    Broken(
        "H03",
        "the network is as fast as the links inside a host",
        expensive=True,
        old="with vgpu.cluster(hosts=8, gpus_per_host=8",
        new="with vgpu.cluster(hosts=1, gpus_per_host=64",
    ),
    Broken(
        "H04",
        "the first stage is fed with zeros",
        expensive=True,
        old="schedule.step(batch) if number == 0",
        new="schedule.step(batch * 0) if number == 0",
    ),
    Broken(
        "H04",
        "nothing is kept gathered",
        expensive=True,
        old='"kept until the step ends": (True, False)',
        new='"kept until the step ends": (True, True)',
    ),
    Broken(
        "H05",
        "earlier sums are not rescaled when a higher score appears",
        expensive=True,
        old="shrink * total + weights.sum(-1, keepdim=True), shrink * output + weights @ values",
        new="total + weights.sum(-1, keepdim=True), output + weights @ values",
    ),
    Broken(
        "H05",
        "gradients stay with the last rank that they reached",
        expensive=True,
        old="            add_gradients(saved, query[i], keys, values, same, grad_query[i], *grads)\n"
        "        moving = pass_on(moving)",
        new="            add_gradients(saved, query[i], keys, values, same, grad_query[i], *grads)\n"
        "        moving = pass_on(moving) if step < ranks - 1 else moving",
    ),
    Broken(
        "H06",
        "the balanced layout pairs neighbors",
        expensive=True,
        old="def both_ends(rank, ranks):\n    return rank, 2 * ranks - 1 - rank",
        new="def both_ends(rank, ranks):\n    return rank, ranks + rank",
    ),
    Broken(
        "H07",
        "the router sends the same number of tokens to each expert",
        expensive=True,
        cell="load-proved",
        old="scores, chosen = router(tokens).topk(best)",
        new="scores, chosen = router(tokens).topk(best)\n"
        "    numbers = torch.arange(chosen.numel(), device=tokens.device).view_as(chosen)\n"
        "    chosen = numbers % len(router.weight)",
    ),
    Broken(
        "H07",
        "tokens' gradients stay with the expert",
        expensive=True,
        cell="moe-run",
        old="return AllToAll.apply(grad, ctx.receives, ctx.sends), None, None",
        new="return grad.new_zeros(sum(ctx.sends), grad.size(1)), None, None",
    ),
    Broken(
        "H08",
        "every expert processes all tokens on its rank and keeps its own",
        expensive=True,
        old="        results = results.index_add(0, mine, expert(rows[mine]))",
        new="        own = (numbers == number)[:, None]\n"
        "        results = torch.where(own, expert(rows), results)",
    ),
    Broken(
        "H10",
        "all links are as fast as those inside a host",
        old="return {order: answer(mesh, **changes)",
        new="return {order: answer(mesh, gpus_per_host=64)",
    ),
]
