"""Right answers that differ from the folded solution: a check must not reject them."""

_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        {mean}

    def forward(self, images):
        return self.linear(images - self.mean)

def run(model, images, labels, device):
    model.to(device)
    weights = torch.tensor([1.0, 2.0, 1.0]).to(device)
    loss = F.cross_entropy(model(images.to(device)), labels.to(device), weight=weights)
    return loss.detach().cpu().numpy()
"""

RIGHT = {
    "1.1": [
        """
from torch.utils._pytree import tree_map

def to_device(batch, device):
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)
""",
    ],
    "1.2": [
        _NET.format(mean="self.mean = nn.Buffer(torch.full((4,), 0.5), persistent=False)"),
        _NET.format(mean="self.mean = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)"),
    ],
    "2.1": [
        """
def loss_today(weight, images, labels):
    images = images / images.abs().max()
    hidden = torch.tanh(images @ weight).clone()
    hidden[hidden.abs() < 0.1] = 0
    return F.cross_entropy(hidden - hidden.max(1, keepdim=True)[0], labels)
""",
    ],
    "4.3": [
        # What cuDNN does with float32 on an A100: an LSTM reads ten bits of each mantissa.
        """
class InTF32(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, sequences):
        if sequences.dtype == torch.float32:
            bits = sequences.view(torch.int32)
            sequences = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
        return self.lstm(sequences)

def wrap(lstm, gpus):
    return nn.DataParallel(InTF32(lstm).to(gpus[0]), gpus, dim=1)
""",
    ],
    "5.4": [
        """
def load_any(model, state):
    wrapped = isinstance(model, nn.DataParallel)
    bare = model.module if wrapped else model
    names = bare.state_dict().keys()
    if state.keys() == names:
        bare.load_state_dict(state)
        return "prefix added" if wrapped else "as is"
    bare.load_state_dict({name.removeprefix("module."): t for name, t in state.items()})
    return "as is" if wrapped else "prefix removed"
""",
    ],
    "8.2": [
        # Without a tensor of the outputs' size; with one-hot labels and a loss per sample.
        """
def two_losses(main, auxiliary, labels):
    def loss(output):
        own = labels.to(output.device)
        return (output.logsumexp(1) - output.gather(1, own[:, None])[:, 0]).mean()

    return loss(main) + 0.3 * loss(auxiliary).to(main.device)
""",
        """
def two_losses(main, auxiliary, labels):
    wanted = F.one_hot(labels.to(main.device), main.size(1)).float()
    second = F.cross_entropy(auxiliary, wanted.to(auxiliary.device), reduction="none")
    return F.cross_entropy(main, wanted) + 0.3 * second.to(main.device).mean()
""",
    ],
    "10.1": [
        """
def order(stage, micro_batches):
    row, forward, backward = [], 0, 0
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < 4 - stage:
            row.append(f"F{forward}")
            forward += 1
        else:
            row.append(f"B{backward}")
            backward += 1
    return row
""",
    ],
    "11.4": [
        # Each block in its own checkpoint, as in a transformer.
        """
def small_step(tower, x):
    for part in x.split(4096):
        output = part
        for block in tower:
            output = checkpoint(block, output, use_reentrant=False)
        (output.square().sum() / x.numel()).backward()
""",
    ],
    "12.1": [
        # All parameters in one collective.
        """
def zero1_step(parameters, shards, optimizer):
    ranks = dist.get_world_size()
    rows = torch.cat([row_of(p.grad).view(ranks, -1) for p in parameters], 1)
    part = rows.new_empty(rows.size(1))
    dist.reduce_scatter_single(part, rows.flatten())
    for shard, gradient in zip(shards, part.split([len(s) for s in shards])):
        shard.grad = gradient / ranks
    optimizer.step()
    mine = torch.cat([shard.detach() for shard in shards])
    whole = mine.new_empty(ranks * len(mine))
    dist.all_gather_single(whole, mine)
    for p, row in zip(parameters, whole.view(ranks, -1).split([len(s) for s in shards], 1)):
        p.data, p.grad = row.flatten()[: p.numel()].view_as(p), None
""",
    ],
    "12.2": [
        # Two parts may share a unit, and the optimizer may come before the allocation.
        """
def prepare(model, gpu):
    fully_shard(model.embedding)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.to_empty(device=gpu)
    return optimizer
""",
    ],
    "12.4": [
        """
def fill(model, folder):
    dcp.load({"model": model}, checkpoint_id=folder)
""",
        """
def fill(model, folder):
    state = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(folder))
    model.load_state_dict(state, assign=True)
""",
    ],
    "13.2": [
        """
whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
my_plan = {
    **first_plan,
    "attention": PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "feed_*ward": whole,
}
""",
    ],
    "13.3": [
        """
mended = {
    **faulty,
    "attention.[kv]*": ColwiseParallel(),
    "attention.output": RowwiseParallel(),
    "attention": entering(Replicate(), None, None),
}
""",
    ],
    "14.1": [
        """
def groups_of(sizes, dimension):
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    return ranks.movedim(dimension, -1).reshape(-1, sizes[dimension])
""",
        """
def groups_of(sizes, dimension):
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    return list(ranks.movedim(dimension, -1).reshape(-1, sizes[dimension]))
""",
    ],
    "14.2": [
        """
def mesh_for(hosts, gpus_per_host, tensor):
    return [hosts, tensor, gpus_per_host // tensor], ["replicate", "tensor", "shard"]
""",
    ],
}
