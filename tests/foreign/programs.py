"""Training programs that come as a folder, with the data and arguments for each.

Each is copied, gets tiny data in its own format, and is run as its authors run it. The edits that it
needs for current packages, or for a comparison with the CPU, are here.
"""

import importlib.util
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from results import ROOT, Done, Result, compare, judge, printed, ranks, run

TEXT = "".join(f"{a} times {b} is {a * b}.\n" for a in range(60) for b in range(60))


def edit(path: Path, *replacements: tuple[str, str]) -> None:
    """Replace strings in a file; raise ValueError if one is missing: the program has changed."""
    text = path.read_text("utf-8")
    for old, new in replacements:
        if old not in text:
            raise ValueError(f"{path} has no {old!r}: this edit was made for a different version")
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def nanogpt(folder: Path) -> Result:
    """Run train.py with its default ``--compile=True``; compare with the CPU, without it."""
    result = Result()
    data = folder / "data" / "tiny"
    data.mkdir()
    letters = {letter: i for i, letter in enumerate(sorted(set(TEXT)))}
    ids = np.array([letters[letter] for letter in TEXT], np.uint16)
    split = len(ids) * 9 // 10
    ids[:split].tofile(data / "train.bin")
    ids[split:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))
    settings = [
        "--dataset=tiny", "--batch_size=4", "--block_size=32", "--n_layer=2", "--n_head=2",
        "--n_embd=32", "--max_iters=5", "--eval_interval=5", "--eval_iters=2",
        "--gradient_accumulation_steps=2", "--warmup_iters=1", "--learning_rate=1e-2",
    ]  # fmt: skip
    alike = [*settings, "--dtype=float32"]
    losses = printed(r"loss")
    on_cpu = folder / "on_cpu.py"  # its script supports DDP only on CUDA
    shutil.copy(folder / "train.py", on_cpu)
    edit(
        on_cpu,
        ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        ("torch.cuda.set_device(device)", "pass"),
        ("device_ids=[ddp_local_rank]", "device_ids=None"),
    )
    cpu = ["--device=cpu", "--compile=False", "--backend=gloo"]
    compare(
        result, "1 GPU", run("train.py", *alike, gpus=1, folder=folder),
        run("train.py", *alike, *cpu, folder=folder), losses,
    )  # fmt: skip
    compare(
        result, "2 GPUs", run(*ranks(2), "train.py", *alike, gpus=2, folder=folder),
        run(*ranks(2), on_cpu, *alike, *cpu, folder=folder), losses,
    )  # fmt: skip
    judge(result, "bfloat16", run(*ranks(2), "train.py", *settings, gpus=2, folder=folder))
    half = run(*ranks(2), "train.py", *settings, "--dtype=float16", gpus=2, folder=folder)
    judge(result, "float16", half)
    return result


def picotron(folder: Path) -> Result:
    """Run train.py in five layouts, each compared with the CPU; run two with flash_attn."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    result = Result()
    (folder / "wandb.py").touch()  # nothing is logged
    edit(folder / "picotron" / "data.py", ("tokenizer.batch_encode_plus(", "tokenizer("))
    edit(folder / "picotron" / "model.py", ("config.rope_theta", "10000.0"))
    words = [*sorted(set(TEXT.split())), "?"]
    vocabulary = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = folder / "tiny"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(model)
    config = LlamaConfig(
        vocab_size=-(-len(words) // 4) * 4, hidden_size=32, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    for target in (model, folder / "hf_model_safetensors"):
        LlamaForCausalLM(config).save_pretrained(target)
    data = folder / "texts"
    data.mkdir()
    Dataset.from_dict({"text": TEXT.splitlines()}).to_json(data / "train.jsonl")
    on_cpu = folder.with_name("on_cpu")
    shutil.copytree(folder, on_cpu)
    edit(on_cpu / "picotron" / "utils.py", ("device='cuda'", "device='cpu'"))
    edit(  # not used without FLASH_ATTEN
        on_cpu / "picotron" / "model.py",
        ("from flash_attn.flash_attn_interface import flash_attn_func\n", ""),
        ("from flash_attn.layers.rotary import apply_rotary_emb\n", ""),
        ("from flash_attn.ops.triton.layer_norm import layer_norm_fn\n", ""),
    )
    communications = on_cpu / "picotron" / "context_parallel" / "cp_communications.py"
    edit(communications, ("torch.cuda.synchronize()", "pass"))
    communications = on_cpu / "picotron" / "pipeline_parallel" / "pp_communications.py"
    edit(communications, ("torch.cuda.synchronize()", "pass"))
    kind = "torch.cuda.is_available() and torch.cuda.is_bf16_supported() and not "
    edit(on_cpu / "train.py", (kind + 'config["distributed"]["use_cpu"]', "True"))
    variables = {"HF_HOME": str(folder / "cache"), "HF_DATASETS_OFFLINE": "1"}

    def train(place: Path, flash: bool, engine: str = "1f1b", **sizes: int):
        settings = json.loads((place / "template" / "base_config.json").read_text("utf-8"))
        count = int(np.prod(list(sizes.values())))
        settings["distributed"] |= {f"{name}_size": size for name, size in sizes.items()}
        settings["distributed"] |= {"pp_engine": engine, "use_cpu": place == on_cpu}
        settings["model"] |= {
            "name": str(place / "tiny"), "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }  # fmt: skip
        settings["training"] |= {
            "total_train_steps": 3, "seq_length": 32, "micro_batch_size": 2, "num_samples": 3000,
            "gradient_accumulation_steps": 4, "learning_rate": 1e-2,
        }  # fmt: skip
        settings["dataset"] |= {"name": str(place / "texts"), "num_proc": None}
        settings["environment"] |= {"FLASH_ATTEN": str(int(flash)), "HF_TOKEN": "none"}
        (place / "config.json").write_text(json.dumps(settings), "utf-8")
        program = [*ranks(count), "train.py", "--config", "config.json"]
        gpus = 0 if place == on_cpu else count
        return run(*program, gpus=gpus, folder=place, variables=variables)

    losses = printed(r"Loss:")
    layouts = [
        ("DP 2", {"dp": 2}), ("TP 2", {"tp": 2}), ("CP 2", {"cp": 2}), ("PP 2", {"pp": 2}),
        ("TP 2 and PP 2", {"tp": 2, "pp": 2}),
    ]  # fmt: skip
    for name, sizes in layouts:
        compare(result, name, train(folder, False, **sizes), train(on_cpu, False, **sizes), losses)
    judge(result, "flash_attn, DP 2", train(folder, True, dp=2))
    judge(result, "flash_attn, PP 2, afab", train(folder, True, "afab", pp=2))
    return result


def nanochat(folder: Path) -> Result:
    """Run scripts.base_train at depth 2: in float32, compared with the CPU, and in bfloat16.

    All documents are identical, so that two ranks see the same data as one.
    """
    import pyarrow
    import tiktoken
    from pyarrow import parquet

    result = Result()
    (folder / "wandb.py").touch()
    base = folder / "base"
    (base / "tokenizer").mkdir(parents=True)
    special = [
        "bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start",
        "python_end", "output_start", "output_end",
    ]  # fmt: skip
    encoding = tiktoken.Encoding(
        name="bytes",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={f"<|{name}|>": 256 + i for i, name in enumerate(special)},
    )
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    token_bytes = torch.tensor([1] * 256 + [0] * len(special), dtype=torch.int32)
    torch.save(token_bytes, base / "tokenizer" / "token_bytes.pt")
    (base / "base_data_climbmix").mkdir()
    for shard in range(2):
        texts = pyarrow.table({"text": [TEXT[:500]] * 2000})
        path = base / "base_data_climbmix" / f"shard_{shard:05d}.parquet"
        parquet.write_table(texts, path, row_group_size=500)
    settings = [
        "--depth=2", "--aspect-ratio=32", "--head-dim=32", "--max-seq-len=64",
        "--device-batch-size=2", "--total-batch-size=256", "--num-iterations=3",
        "--eval-every=3", "--eval-tokens=256", "--core-metric-every=-1", "--warmup-steps=1",
    ]  # fmt: skip
    program = ["-m", "scripts.base_train", *settings]
    wide = {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": "float32"}
    narrow = {"NANOCHAT_BASE_DIR": str(base)}
    cpu = run(*program, folder=folder, variables=wide | {"TORCHDYNAMO_DISABLE": "1"})
    losses = printed(r"(?:loss|Validation bpb):")
    one = run(*program, gpus=1, folder=folder, variables=wide)
    compare(result, "1 GPU", one, cpu, losses)
    two = run(*ranks(2), *program, gpus=2, folder=folder, variables=wide)
    compare(result, "2 GPUs", two, cpu, losses)
    judge(result, "bfloat16", run(*ranks(2), *program, gpus=2, folder=folder, variables=narrow))
    return result


def torchtitan(folder: Path) -> Result:
    """Run torchtitan.train with the debug models of Llama 3 and DeepSeek-V3 in multiple layouts.

    Each is compared with one GPU, and one GPU with the CPU; all start from the same checkpoint.
    Each step takes the same four documents, which data-parallel ranks divide among themselves.
    """
    data = folder / "tests" / "assets" / "c4_test" / "data.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]  # each is a token
    texts = ["".join(letters[(37 * k + (k + 1) * i) % 94] for i in range(255)) for k in range(4)]
    # Ranks read contiguous parts: with 4 * 129 documents, each part begins with a different text.
    lines = [json.dumps({"text": texts[i % 4]}) + "\n" for i in range(4 * 129)]
    data.write_text("".join(lines), "utf-8")
    loader = folder / "torchtitan" / "components" / "data" / "loader.py"
    shuffle = "shuffle: Annotated[bool, tyro.conf.Suppress] = "
    edit(loader, (f"{shuffle}True", f"{shuffle}False"))  # each rank would shuffle its own part
    on_cpu = folder.with_name("on_cpu")
    shutil.copytree(folder, on_cpu)
    code = on_cpu / "torchtitan"
    edit(code / "tools" / "utils.py", ('_get_available_device_type() or "cuda"', '"cpu"'))
    edit(code / "distributed" / "utils.py", ("[device_module.current_device()]", "None"))
    flex = "torch.nn.attention.flex_attention"
    edit(
        code / "models" / "common" / "attention.py",
        (f"from {flex} import (", f"import {flex}\n{flex}._validate_device = lambda *_: None\n"
         f"from {flex} import ("),
    )  # fmt: skip
    monitor = "__import__('unittest.mock').mock.Mock(device_name='CPU', device_capacity_gib=0)"
    edit(
        code / "components" / "metrics.py",
        ("= DeviceMemoryMonitor(device_type)", f"= {monitor}"),
        ("return device_memory_monitor", "device_memory_monitor.get_peak_stats = (\n"
         "        lambda: DeviceMemStats(*[0.0] * 6))\n    return device_memory_monitor"),
    )  # fmt: skip
    names = {
        "fsdp": "data_parallel_shard", "ddp": "data_parallel_replicate", "tp": "tensor_parallel",
        "cp": "context_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel",
    }  # fmt: skip

    def job(model: str, sizes: Mapping[str, int], *arguments: str) -> list[object]:
        """Return the number of ranks, the rank that prints the loss, and torchtitan's arguments."""
        sizes = dict.fromkeys(names, 1) | sizes
        gpus = prod(size for name, size in sizes.items() if name != "ep")  # EP splits FSDP's ranks
        data_parallel, pp = sizes["fsdp"] * sizes["ddp"], sizes["pp"]
        tokens = 512 if sizes["cp"] > 1 else 512 // data_parallel if pp > 1 else 256
        start = folder / model / "checkpoint" / "step-0"
        return [gpus, gpus - gpus // pp, [
            f"--module={model}", f"--config={model}_debugmodel", f"--dump_folder={folder / 'out'}",
            "--training.steps=3", "--training.num_tokens_per_train_step=1024",
            f"--training.num_tokens_per_microbatch_per_dp_rank={tokens}",
            "--training.max_context_length=256", "--training.mixed_precision_param=float32",
            "--training.disable_cuda_graphs", "--lr_scheduler.total_steps=10",
            "--checkpoint.enable", f"--checkpoint.initial_load_path={start}",
            "--checkpoint.load_only", "--comm.train_timeout_seconds=600",
            "--parallelism.num_pp_microbatches=2",
            *(f"--parallelism.{names[of]}_degree={size}" for of, size in sizes.items()), *arguments,
        ]]  # fmt: skip

    def train(jobs: Mapping[str, list[object]], gpus: int) -> dict[str, Done]:
        """Run these one after the other. gpus: 0 for the CPU."""
        place = folder if gpus else on_cpu
        (place / "jobs.json").write_text(json.dumps([*jobs.values()]), "utf-8")
        done = run(
            Path(__file__).with_name("forked_training.py"), "jobs.json", gpus=gpus,
            folder=place, time_limit_s=7200, variables={"PYTHONPATH": f"{ROOT}:{place}"}
            | ({} if gpus else {"TORCHDYNAMO_DISABLE": "1"}),
        )  # fmt: skip
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        ended = [Done([], job["code"], job["output"], done.stderr) for job in found]
        return dict(zip(jobs, [*ended, *[done] * (len(jobs) - len(ended))], strict=True))

    layouts = {
        "llama3": [
            {"fsdp": 2}, {"ddp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2},
            {"fsdp": 2, "cp": 2}, {"fsdp": 2, "pp": 2}, {"tp": 2, "pp": 2},
        ],
        "deepseek_v3": [{"fsdp": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 2}, {"pp": 2}],
    }  # fmt: skip
    jobs: dict[str, list[object]] = {}
    for model, tried in layouts.items():
        jobs[f"{model}, seed checkpoint"] = job(
            model, {}, "--checkpoint.create_seed_checkpoint", "--debug.seed=42",
            "--checkpoint.no-load_only", f"--dump_folder={folder / model}",
        )  # fmt: skip
        jobs[f"{model}, 1 GPU"] = job(model, {})
        for sizes in tried:
            jobs[f"{model}, " + " ".join(f"{of}{n}" for of, n in sizes.items())] = job(model, sizes)
    saving = ["--checkpoint.no-load_only", f"--dump_folder={folder / 'saved'}"]
    schedule = "--parallelism.pipeline_parallel_schedule=1F1B"  # Llama 3's default: interleaved
    other = {
        "1F1B": job("llama3", {"pp": 2}, schedule),
        "saved": job("llama3", {"fsdp": 2}, *saving, "--training.steps=1"),
        "resumed": job("llama3", {"fsdp": 2}, *saving),
        "compiled": job("llama3", {"tp": 2}, "--compile.enable"),
        "CUDA graphs": job("llama3", {}, "--training.no-disable_cuda_graphs"),
    }
    done = train(jobs | {f"llama3, {name}": run for name, run in other.items()}, 4)
    done["llama3, resumed"].stdout = (
        done.pop("llama3, saved").stdout + done["llama3, resumed"].stdout
    )
    cpu = train({f"{model}, 1 GPU": job(model, {}) for model in layouts}, 0)
    result, losses = Result(), printed(r"loss:")
    for name, ended in done.items():
        if name.endswith(("seed checkpoint", "CUDA graphs")):
            judge(result, name, ended)
        else:
            one = f"{name.partition(',')[0]}, 1 GPU"
            compare(result, name, ended, cpu[one] if name == one else done[one], losses)
    return result


PROGRAMS: dict[str, Callable[[Path], Result]] = {
    "nanogpt": nanogpt,
    "picotron": picotron,
    "nanochat": nanochat,
    "torchtitan": torchtitan,
}
NEEDS = {
    "nanogpt": [],
    "picotron": ["transformers", "datasets", "tokenizers"],
    "nanochat": ["tiktoken", "rustbpe", "pyarrow", "filelock", "yaml"],
    "torchtitan": ["datasets", "tokenizers", "grain", "tyro", "spmd_types", "torch_checkpointing"],
}


def run_program(name: str, path: Path) -> Result | str:
    """Run a program in a copy of its folder; return a sentence if it lacks packages."""
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        return f"{name} skipped: it needs {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "program"
        shutil.copytree(path, folder, ignore=shutil.ignore_patterns(".git"))
        return PROGRAMS[name](folder)
