"""What doesn't match the CPU, and why. The tests fail if a listed exception starts to match.

A test allows exceptions for at most 1% of operators. All modules and optimizers match.
"""

# "operator-dtype": why it differs.
OPERATORS: dict[str, str] = {
    "native_batch_norm-float32": "in evaluation mode, only CUDA returns the running statistics",
    "sparse_mm_reduce-float32": "torch has it only on the CPU, even with real GPUs",
}
VARIANTS: dict[str, str] = {
    name: "with an operand of a tensor subclass, torch's C++ code doesn't write to out= here"
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

# Operators whose results have the layout of CUDA's kernels if queries and keys differ in number.
CUDA_LAYOUT = {"nn.functional.scaled_dot_product_attention"}

# Operators whose tensor arguments must be on the CPU, even for CUDA tensors.
CPU_ARGUMENTS = {"tensor_split"}

# Relative and absolute tolerances where torch picks kernels by device type, so that the last digits
# differ: on the CPU, attention is fused; on a virtual GPU, it consists of separate matmuls.
TOLERANCES = {
    "nn.functional.scaled_dot_product_attention": 1e-4,
    "nn.Transformer": 1e-4,
    "nn.TransformerDecoderLayer": 1e-4,
}

# torch.zeros(3, out=t, device=...): a real GPU allows naming the same device twice.
DEVICE_BESIDE_OUT = (
    "torch's C++ code compares device= with the device that it has stored for the tensor"
)
