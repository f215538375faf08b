"""Typical mistakes in lesson 03's exercises, and the message that each must get."""

from wrong_answers import template

evaluation = template(
    """
def evaluate(model, loader, device):
    was_training = model.training
    {mode}
    loss_sum, right, count = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with {guard}:
            logits = model(images)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
        count += {counted}
    {back}
    return {result}
""",
    mode="model.eval()",
    guard="torch.no_grad()",
    counted="len(labels)",
    back="model.train(was_training)",
    result="loss_sum / count, right / count",
)


_NO_ORDER = """
def remaining_batches(loader, order, done):
    random_state = torch.get_rng_state()
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    torch.set_rng_state(random_state)
    yield from batches
"""

_NO_RANDOM_STATE = """
def remaining_batches(loader, order, done):
    loader.generator.set_state(order)
    for index, batch in enumerate(loader):
        if index >= done:
            yield batch
"""

_ONE_TOO_FEW = """
def remaining_batches(loader, order, done):
    loader.generator.set_state(order)
    random_state = torch.get_rng_state()
    batches = iter(loader)
    for _ in range(done + 1):
        next(batches, None)
    torch.set_rng_state(random_state)
    yield from batches
"""


_A_LIST = """
def remaining_batches(loader, order, done):
    loader.generator.set_state(order)
    return list(loader)[done:]
"""

_AHEAD = """
def remaining_batches(loader, order, done):
    loader.generator.set_state(order)
    random_state = torch.get_rng_state()
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    torch.set_rng_state(random_state)
    return iter(list(batches))
"""

epoch = template(
    """
def train_epoch_quietly(model, loader, optimizer, device):
    {mode}
    loss_sum, count = torch.zeros((), device=device), 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        {zero}
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss_sum = loss_sum + {added}
        count += {counted}
    return {result}
""",
    mode="model.train()",
    zero="optimizer.zero_grad()",
    added="loss.detach() * len(labels)",
    counted="len(labels)",
    result="loss_sum.item() / count",
)

checkpoint = template(
    """
def state(run):
    return {{
        "model": run.model.state_dict(),
        "optimizer": {optimizer},
        "scheduler": run.scheduler.state_dict(),
        "order": {order},
        "cpu_random": torch.get_rng_state(),
        {gpu_random}
        "losses": run.losses,
        "epochs_done": run.epochs_done,
    }}
""",
    optimizer="run.optimizer.state_dict()",
    order="run.loader.generator.get_state()",
    gpu_random='"gpu_random": gpu_api.get_rng_state(device),',
)


WRONG = {
    "3.1": [
        (evaluation(result="right / count, loss_sum / count"), "You return the fraction first"),
        (evaluation(result="loss_sum / count, right"), "Divide the sum"),
        ("evaluate = evaluate_with_bugs", "Dropout is still on"),
        (evaluation(guard="torch.enable_grad()"), "no_grad() saves"),
        (evaluation(back="pass"), "Save model.training"),
        (evaluation(counted="loader.batch_size"), "Each image counts once"),
        (evaluation(result="torch.tensor(loss_sum / count), right / count"), ".item() turns"),
        (evaluation(mode="model.eval().requires_grad_(False)"), "no longer require gradients"),
        ("def evaluate(model, loader, device):\n    return 0.05, 0.98", "The loss is wrong"),
        ("def evaluate(model, loader, device):\n    return 0.98", "(mean loss, fraction correct)"),
    ],
    "3.2": [
        (epoch(added="loss.item() * len(labels)"), "values read back"),
        (epoch(added="loss * len(labels)"), "still holds its graph"),
        (epoch(zero="pass"), "zero_grad, backward, and step"),
        (epoch(mode="pass"), "Call model.train() first"),
        (epoch(added="loss.detach()", counted="1"), "Each image counts once"),
        (epoch(result="loss_sum / count"), ".item() turns"),
    ],
    "3.4": [
        (_NO_ORDER, "a different shuffle"),
        (_NO_RANDOM_STATE, "drew from torch's CPU random state"),
        (_ONE_TOO_FEW, "no more and no fewer"),
        (_A_LIST, "yield from"),
        (_AHEAD, "load each batch only when"),
        (
            "def remaining_batches(loader, order, done):\n    return loader",
            "a generator of batches",
        ),
    ],
    "3.3": [
        (checkpoint(gpu_random=""), "Dropout drops different activations"),
        (checkpoint(order="torch.get_rng_state()"), "come in a different order"),
        (checkpoint(order="run.loader.generator"), "not the object itself"),
        (checkpoint(optimizer="run.optimizer"), "not the object itself"),
        (
            checkpoint(optimizer="type(run.optimizer)(run.model.parameters()).state_dict()"),
            "moments start at zero",
        ),
        ("def state(run):\n    return run.model.state_dict()", "without model, optimizer"),
        ("def state(run):\n    return run", "one entry per part"),
    ],
}
