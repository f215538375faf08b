"""What doesn't agree with the CPU, and why. A row that starts to agree fails the tests.

At most one operator in a hundred may be listed here; a test counts them. All modules and optimizers agree.
"""

# Entry, "operator-dtype": the true reason.
OPERATORS: dict[str, str] = {
    "native_batch_norm-float32": "in evaluation CUDA hands the running statistics on, the CPU nothing",
}
VARIANTS: dict[str, str] = {
    name: "torch's C++ does not write to out= there when an operand is of a tensor subclass"
    for name in ("linalg_matrix_rank", "linalg_matrix_rank_hermitian")
}

# Operators that return uninitialized memory: everything but the values is compared.
UNINITIALIZED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# Operators whose tensor arguments must be on the CPU, also on CUDA.
CPU_ARGUMENTS = {"tensor_split"}

# Where torch picks a kernel by device type, so that the last digits differ: relative and absolute
# tolerance. On the CPU, attention runs fused; on a virtual GPU, as separate matrix products.
TOLERANCES = {
    "nn.functional.scaled_dot_product_attention": 1e-4,
    "nn.Transformer": 1e-4,
    "nn.TransformerDecoderLayer": 1e-4,
}

# torch.zeros(3, out=t, device=...): a real GPU allows naming the same device twice.
DEVICE_BESIDE_OUT = "torch's C++ compares device= with the device under which it knows the tensor"
