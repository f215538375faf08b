"""The steps of random programs: one line of Python each, chosen so that most of them work.

A line uses names that both worlds define (worlds.py): ``d[0]`` and ``d[1]`` are two GPUs and
``d[2]`` is the host; without GPUs, all three are the CPU.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from random_programs.worlds import World

DTYPES = ("float64", "float64", "float64", "float32", "complex128", "int64")
SHAPES = ("(2, 3)", "(3, 3)", "(3,)", "(1, 3)", "(2, 1, 3)", "(4, 2)", "()", "(0, 3)", "(1,)")
CONTEXTS = ("torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()")


class Draft:
    """A growing program: each line runs on the CPU at once, so that the next can fit the values."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.world = World(gpus=False)
        self.lines: list[str] = []
        self.places: dict[str, int] = {}  # the device of each variable still in use
        self.modules: dict[str, int] = {}
        self.current = 0
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def value(self, name: str) -> Any:
        return self.world.names.get(name)

    def any(self, accept: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """Return an acceptable variable; raise StopIteration if there is none."""
        return self.any_of(lambda name: accept(self.value(name)))

    def beside(self, name: str, accept: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """Return an acceptable variable on the same device, possibly the same one."""
        return self.any_of(lambda n: self.places[n] == self.places[name] and accept(self.value(n)))

    def any_of(self, accept: Callable[[str], bool]) -> str:
        names = []
        for name in self.places:
            try:
                if accept(name):
                    names.append(name)
            except RuntimeError:  # a view that autograd rejects
                continue
        if not names:
            raise StopIteration
        return self.rng.choice(names[-8:])

    def add(self, line: str, place: int | None = None, in_contexts: bool = True) -> None:
        """Run a line on the CPU and keep it; ``place``: the device of the variable it assigns."""
        made, assigned, _ = line.partition(" = ")
        if place is not None and in_contexts and self.rng.random() < 0.15:
            line = f"with {self.rng.choice(CONTEXTS)}: {line}"
        self.lines.append(line)
        self.world.run(line)
        if assigned and place is not None and isinstance(self.value(made), torch.Tensor):
            self.places[made] = place

    def step(self) -> None:
        """Add one random step."""
        kinds = list(STEPS)
        weights = [STEPS[kind] for kind in kinds]
        for _ in range(20):
            kind = self.rng.choices(kinds, weights)[0]
            try:
                kind(self, self.rng)
            except (StopIteration, RuntimeError):  # no variable fits, or autograd rejects a view
                continue
            return


def floating(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and (t.is_floating_point() or t.is_complex())


def dense(t: torch.Tensor) -> bool:
    return t.layout is torch.strided


def matrix(t: torch.Tensor) -> bool:
    return dense(t) and t.dim() == 2


def leaf(t: torch.Tensor) -> bool:
    return dense(t) and t.is_leaf and t.requires_grad


def make(p: Draft, r: Random) -> None:
    place, dtype = r.choice((0, 0, 1)), r.choice(DTYPES)
    grad = dtype != "int64" and r.random() < 0.6
    name = p.name()
    p.lines.append(
        f"{name} = leaf({r.choice(SHAPES)}, {r.randrange(9)}, {dtype!r}, {place}, {grad})"
    )
    p.world.run(p.lines[-1])
    p.places[name] = place


def make_by_device(p: Draft, r: Random) -> None:
    """Create a tensor under a default device or on the current device."""
    name, k = p.name(), r.choice((0, 1))
    if r.random() < 0.5:
        make = r.choice(("torch.ones(2, 3)", "torch.as_tensor([1.0, 2.0, 3.0])", "torch.eye(3)"))
        p.lines.append(f"with torch.device(d[{k}]): {name} = {make}.double()")
        p.world.run(p.lines[-1])
        p.places[name] = k
        return
    if r.random() < 0.4:
        p.current = k
        p.add(f"use({k})")
    make = r.choice(
        (
            "zeros(2, 3, device=current)",
            "tensor([1.5, 2.5, 3.5], device=current)",
            "ones(3).to(current)",
        )
    )
    p.add(f"{name} = torch.{make}.double()", p.current)


UNARY = (
    "{x}.sin()", "{x}.tanh()", "{x}.abs()", "-{x}", "{x} * 2", "{x} ** 2", "{x}.sigmoid()", "{x}.clone()",
    "{x}.cumsum(-1)", "{x}.sum()", "{x}.mean(0)", "{x}.sum(-1, keepdim=True)", "{x}.softmax(-1)",
    "{x}.amax()", "{x} + 1", "{x} / 3", "{x}.flip(0)", "{x}.contiguous()", "{x}.double()", "{x}.float()",
    "{x}.relu()", "{x}.clamp(-0.5, 0.5)", "torch.zeros_like({x})", "{x}.new_ones(3)", "{x}.to({x}.device)",
    "{x}.sort(-1)[0]", "{x}.triu()", "{x}.roll(1)", "{x}.logsumexp(-1)", "{x}.norm()", "{x}.repeat(2, 1)",
    "F.dropout({x}, 0.0)", "F.layer_norm({x}, {x}.shape[-1:])", "F.gelu({x})", "torch.cat([{x}, {x}])",
    "torch.stack([{x}, {x}])", "{x}.index_select(0, {x}.new_tensor([0], dtype=torch.int64))", "{x}.max(0)[0]",
)  # fmt: skip
VIEWS = (
    "{x}.t()", "{x}.mT", "{x}[0]", "{x}[-1:]", "{x}[..., :2]", "{x}.unsqueeze(0)", "{x}.unsqueeze(-1)",
    "{x}.squeeze()", "{x}.view(-1)", "{x}.reshape(-1)", "{x}.flatten()", "{x}.transpose(0, -1)",
    "{x}.expand(2, *{x}.shape)", "{x}.narrow(0, 0, 1)", "{x}.diagonal()", "{x}.unbind()[0]", "{x}.split(1)[-1]",
    "{x}.chunk(2)[0]", "{x}.movedim(0, -1)", "{x}.detach()", "{x}.view_as({x})", "{x}.real", "{x}.imag",
    "{x}.conj()", "torch.view_as_real({x})", "{x}.as_strided((2,), (1,))", "{x}.data", "{x}.select(-1, 0)",
    "{x}.unfold(0, 1, 1)", "{x}.view(torch.int64)", "{x}.swapaxes(0, 1)", "{x}.T",
)  # fmt: skip
# Not detach_ or requires_grad_(False): remaining views then have no history. On the CPU, gradients
# stop there; on a virtual GPU, using such a view raises an error.
IN_PLACE = (
    "{x}.add_(1)", "{x}.mul_(0.5)", "{x}.zero_()", "{x}.fill_(0.25)", "{x}.sin_()", "{x}.neg_()", "{x}.t_()",
    "{x}.transpose_(0, -1)", "{x}.squeeze_()", "{x}.unsqueeze_(0)", "{x}.clamp_(-1, 1)", "{x}[0] = 0.5",
    "{x}[..., 0] *= 2", "{x}.data.mul_(2)", "{x}.detach().add_(1)", "{x}.requires_grad_()",
    "{x}.masked_fill_({x}.abs() > 0.5, 0.1)", "{x}.swapaxes_(0, 1)", "{x}.as_strided_((2,), (1,))", "{x}.relu_()",
    "{x}[{x}.abs() < 0.3] = 0.7", "{x}.index_fill_(0, torch.tensor(0, device={x}.device), 2)",
    "{x}.resize_(0)", "{x}.abs_()", "{x}.exponential_() if False else {x}.pow_(2)",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "torch.where({x}.abs() > 0.3, {x}, {y})", "{x} @ {y}", "{x} @ {y}.mT",
    "torch.cat([{x}, {y}])", "torch.maximum({x}, {y})", "torch.outer({x}.flatten(), {y}.flatten())",
    "torch.complex({x}, {y})", "torch.stack([{x}, {y}])", "{x}.expand_as({y})", "{x}.to({y})", "torch.lerp({x}, {y}, 0.3)",
    "F.linear({x}, {y})", "{x}.type_as({y})", "torch.addmm({x}, {x}, {y})", "{x} / ({y}.abs() + 1)",
)  # fmt: skip
BINARY_IN_PLACE = (
    "{x}.add_({y})", "{x}.mul_({y})", "{x}.copy_({y} * 1)", "{x}[0] = {y} * 1", "{x}.data = {y}", "{x}.data = {y}.data",
    "{x}.grad = {y}", "{x}.sub_({y}, alpha=0.5)", "torch.add({x}, {y}, out={x}.detach())",
    "{x}.addcmul_({x}, {y})", "torch.mul({x}, 2, out={y})", "{x}.lerp_({y}, 0.5)", "torch.neg({x}, out={y})",
)  # fmt: skip


def unary(p: Draft, r: Random) -> None:
    x = p.any(dense)
    p.add(f"{p.name()} = " + r.choice(UNARY).format(x=x), p.places[x])


def view(p: Draft, r: Random) -> None:
    x = p.any(dense)
    p.add(f"{p.name()} = " + r.choice(VIEWS).format(x=x), p.places[x])


def in_place(p: Draft, r: Random) -> None:
    # Outside inference mode, inference tensors can be changed through .data only on the CPU.
    x = p.any(lambda t: dense(t) and not t.is_inference())
    line = r.choice(IN_PLACE).format(x=x)
    if "requires_grad_" in line and p.value(x)._is_view():
        raise StopIteration  # its views lose their history: only virtual GPUs then raise
    if ("squeeze_" in line or "strided_" in line) and leaf(p.value(x)):
        raise StopIteration  # autograd would compare a gradient's strides past their end
    if p.value(x)._is_view() and p.value(x)._backward_hooks:
        raise StopIteration  # virtual GPUs raise if a view with a hook changes its shape
    if p.value(
        x
    )._is_view():  # unless it's read, the CPU may mistake the view for a leaf, and raise
        line = f"{x}.grad_fn; {line}"
    p.add(f"with torch.no_grad(): {line}" if r.random() < 0.3 else line)


def binary(p: Draft, r: Random) -> None:
    x = p.any(dense)
    y = p.beside(x, dense)
    p.add(f"{p.name()} = " + r.choice(BINARY).format(x=x, y=y), p.places[x])


def binary_in_place(p: Draft, r: Random) -> None:
    x = p.any(lambda t: dense(t) and not t.is_inference())
    y = p.beside(x, lambda t: dense(t) and not t.is_inference())
    line = r.choice(BINARY_IN_PLACE).format(x=x, y=y)
    to, of = p.value(x), p.value(y)
    if ("data" in line or "out" in line) and (to.shape, to.dtype) != (of.shape, of.dtype):
        raise StopIteration  # views of a tensor that changes size like this fail on use, but not on the CPU
    if "grad" in line and to.untyped_storage().data_ptr() == of.untyped_storage().data_ptr():
        raise StopIteration  # a tensor whose gradient is a view of itself keeps itself alive forever
    p.add(f"with torch.no_grad(): {line}" if r.random() < 0.3 else line)


def move(p: Draft, r: Random) -> None:
    x = p.any()
    target = r.choice([k for k in (0, 1, 2) if k != p.places[x]])
    p.add(f"{p.name()} = to({x}, {target})", target)


def copy_over(p: Draft, r: Random) -> None:
    """Copy between devices, with broadcasting and casting."""
    x = p.any(lambda t: dense(t) and not t.is_inference())
    y = p.any_of(lambda n: dense(p.value(n)))
    if p.value(x).data_ptr() == p.value(y).data_ptr():
        raise StopIteration  # onto itself: on the CPU, irrelevant strides decide whether that raises
    p.add(f"with torch.no_grad(): {x}.copy_({y})")


def backward(p: Draft, r: Random) -> None:
    x = p.any(lambda t: floating(t) and t.requires_grad)
    keep = r.random() < 0.4
    p.add(f"({x} * {x}.conj()).real.sum().backward(retain_graph={keep})")


def gradient(p: Draft, r: Random) -> None:
    x = p.any(leaf)
    y = p.beside(x, lambda t: floating(t) and t.requires_grad and not t.is_leaf)
    create = r.random() < 0.4
    made = f"torch.autograd.grad(({y} * {y}.conj()).real.sum(), {x}, create_graph={create})[0]"
    # autograd doesn't guarantee strides
    made += ".clone(memory_format=torch.contiguous_format)"
    p.add(f"{p.name()} = {made}", p.places[x])


def hook(p: Draft, r: Random) -> None:
    # torch itself crashes on a view of a leaf that has since been changed through detach().
    x = p.any(
        lambda t: (
            floating(t)
            and t.requires_grad
            and not (t._is_view() and t._base.is_leaf and t._version)
        )
    )
    if r.random() < 0.3 and not p.value(x)._is_view():
        p.add(f"{x}.retain_grad()")
        return
    if leaf(p.value(x)) and r.random() < 0.4:
        p.add(f"{x}.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))")
    else:
        p.add(f"{x}.register_hook(lambda g: g * 3)")


def use_gradient(p: Draft, r: Random) -> None:
    x = p.any(lambda t: t.is_leaf and t.grad is not None)
    line = r.choice(("{v} = {x}.grad", "{x}.grad = None", "{x}.grad.zero_()", "{x}.grad.mul_(2)"))
    p.add(line.format(v=p.name(), x=x), p.places[x] if line.startswith("{v}") else None)


def flat_gradient(p: Draft, r: Random) -> None:
    """Make a gradient a view of a flat buffer, as in DDP's buckets."""
    x = p.any(lambda t: leaf(t) and t.dtype is torch.float64 and t.numel() > 0)
    flat = p.name()
    p.add(f"{flat} = torch.zeros_like({x}).reshape(-1).detach()", p.places[x])
    p.add(f"{x}.grad = {flat}.view({x}.shape)")


def copying(p: Draft, r: Random) -> None:
    x = p.any(lambda t: not t.is_conj())  # copy.copy of a lazy conjugate copies the values
    y = p.beside(x)
    name = p.name()
    made = r.choice(
        ("copy.deepcopy({x})", "copy.copy({x})", "copy.deepcopy([{x}, {y}])[1]", "reload({x})",
         "nn.Parameter({x})", "copy.deepcopy(nn.Parameter({x}))", "torch.tensor({x})", "torch.as_tensor({x})")
    )  # fmt: skip
    line = f"{name} = " + made.format(x=x, y=y)
    # torch itself can't use a parameter or copy created in inference mode.
    p.add(line, p.places[x], in_contexts=False)


def foreach(p: Draft, r: Random) -> None:
    x = p.any(lambda t: dense(t) and not t.is_inference())
    y = p.beside(x, lambda t: dense(t) and not t.is_inference())
    name = r.choice(("add_", "mul_", "sub_", "div_"))
    call = r.choice((f"_foreach_{name}([{{x}}, {{y}}], 0.5)", "_foreach_neg_([{x}, {y}])",
                     "_foreach_copy_([{x}], [{y}])", "_foreach_add_([{x}], [{y}])"))  # fmt: skip
    p.add(f"with torch.no_grad(): torch.{call.format(x=x, y=y)}")


def draw(p: Draft, r: Random) -> None:
    x = p.any(lambda t: dense(t) and t.is_floating_point())
    made = r.choice(("torch.rand_like({x})", "F.dropout({x}, 0.5)", "{x}.bernoulli(0.5)", "torch.randn({x}.shape, device={x}.device)",
                     "F.alpha_dropout({x}, 0.3, True)", "torch.normal({x}, 1.0)"))  # fmt: skip
    p.add(f"torch.manual_seed({r.randrange(99)})")
    p.add(f"{p.name()} = " + made.format(x=x), p.places[x])


def sparse(p: Draft, r: Random) -> None:
    if r.random() < 0.5:
        x = p.any(lambda t: floating(t) and 0 < t.dim() < 3)
        p.add(f"{p.name()} = {x}.to_sparse()", p.places[x])
        return
    x = p.any(lambda t: t.layout is torch.sparse_coo)
    made = r.choice(("{x}.to_dense()", "{x} * 2", "{x}.coalesce()", "{x} + {x}", "{x}.t()", "{x}.coalesce().values()",
                     "torch.sparse.sum({x})", "{x}.clone()"))  # fmt: skip
    p.add(f"{p.name()} = " + made.format(x=x), p.places[x])
    # If the base of a view changes, the CPU computes the view's gradient from the wrong strides.
    base = p.value(x)
    if r.random() < 0.3 and not any(p.value(name)._base is base for name in p.places):
        p.add(r.choice(("{x}.add_({x})", "{x}.mul_(2)", "{x}.zero_()")).format(x=x))


def module(p: Draft, r: Random) -> None:
    name, place = p.name(), r.choice((0, 1))
    p.add(f"{name} = linear({place})")
    p.modules[name] = place


def run_module(p: Draft, r: Random) -> None:
    if not p.modules:
        raise StopIteration
    m = r.choice(list(p.modules))
    choice = r.random()
    if choice < 0.5:
        fits = lambda t: dense(t) and t.dim() > 0 and t.shape[-1] == 3 and t.dtype is torch.float64  # noqa: E731
        x = p.any_of(lambda n: p.places[n] == p.modules[m] and fits(p.value(n)))
        p.add(f"{p.name()} = {m}({x})", p.modules[m])
    elif choice < 0.7:
        name = p.name()
        p.add(f"{name} = {m}.{r.choice(('weight', 'bias'))}", p.modules[m])
    elif choice < 0.85:
        p.add(f"step({m}, foreach={r.random() < 0.5})")
    else:
        p.modules[m] = r.choice((0, 1))
        # Graphs from before the move raise errors; references to the module's tensors move, too.
        p.places = {n: k for n, k in p.places.items() if not p.value(n).requires_grad}
        p.add(f"move({m}, {p.modules[m]})")


STEPS: dict[Callable[[Draft, Random], None], float] = {
    make: 2, make_by_device: 0.7, unary: 3, view: 5, in_place: 5, binary: 2.5, binary_in_place: 2,
    move: 1, copy_over: 0.5, backward: 2, gradient: 0.7, hook: 0.7, use_gradient: 0.7, flat_gradient: 0.4,
    copying: 1.2, foreach: 0.8, draw: 0.7, sparse: 0.7, module: 0.4, run_module: 1.5,
}  # fmt: skip


def programs(seed: int, steps: int = 18) -> Iterator[tuple[int, list[str]]]:
    """Yield programs endlessly, each with its seed."""
    while True:
        draft = Draft(seed)
        make(draft, draft.rng)
        while len(draft.lines) < steps:
            draft.step()
        yield seed, draft.lines
        seed += 1
