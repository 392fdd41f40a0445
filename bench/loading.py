"""Peak host memory of loading a model, beside the model itself: what streaming tensor by tensor costs.

    python -m bench.loading [--hidden 1024] [--layers 16] [--output FILE]

Writes a random target of the family in BF16, in shards, loads it in a fresh process, and samples that process's
anonymous memory (pages of mapped files are the kernel's to drop). Limit: the model, plus its largest tensor, plus 10 %
of the model. The same for a mixture with one tensor an expert, which are the ones that are fused while loading.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 32_000


def config_of(hidden: int, layers: int, moe: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    if moe:
        experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 4}
        return config | experts | {"shared_expert_intermediate_size": hidden // 4}
    return config | {"intermediate_size": 3 * hidden}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, experts one by one."""
    h, q, kv = config["hidden_size"], 8 * 128, 2 * 128
    channels, values = 2 * 8 * 64 + 16 * 64, 16 * 64
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (VOCABULARY, h),
    }
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}."
        shapes |= {f"{name}input_layernorm.weight": (h,), f"{name}post_attention_layernorm.weight": (h,)}
        if (i + 1) % 4 == 0:
            a = f"{name}self_attn."
            shapes |= {f"{a}q_proj.weight": (2 * q, h), f"{a}k_proj.weight": (kv, h), f"{a}v_proj.weight": (kv, h)}
            shapes |= {f"{a}o_proj.weight": (h, q), f"{a}q_norm.weight": (128,), f"{a}k_norm.weight": (128,)}
        else:
            a = f"{name}linear_attn."
            shapes |= {f"{a}in_proj_qkv.weight": (channels, h), f"{a}in_proj_z.weight": (values, h)}
            shapes |= {f"{a}in_proj_b.weight": (16, h), f"{a}in_proj_a.weight": (16, h), f"{a}A_log": (16,)}
            shapes |= {f"{a}dt_bias": (16,), f"{a}norm.weight": (64,), f"{a}out_proj.weight": (h, values)}
            shapes[f"{a}conv1d.weight"] = (channels, 1, 4)
        inner = config.get("intermediate_size") or config["moe_intermediate_size"]
        parts = [""]
        if "num_experts" in config:
            shapes |= {f"{name}mlp.gate.weight": (16, h), f"{name}mlp.shared_expert_gate.weight": (1, h)}
            parts = ["shared_expert.", *(f"experts.{e}." for e in range(16))]
        for part in parts:
            mlp = f"{name}mlp.{part}"
            shapes |= {f"{mlp}gate_proj.weight": (inner, h), f"{mlp}up_proj.weight": (inner, h)}
            shapes[f"{mlp}down_proj.weight"] = (h, inner)
    return shapes


def write(directory: Path, config: dict[str, Any], shards: int = 4) -> tuple[int, int]:
    """Random weights; returns the bytes of all tensors and of the largest one."""
    shapes = shapes_of(config)
    names = sorted(shapes)
    weight_map: dict[str, str] = {}
    total = largest = 0
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        tensors = {name: torch.randn(shapes[name]).bfloat16() for name in names[index::shards]}
        sizes = [tensor.nbytes for tensor in tensors.values()]
        total, largest = total + sum(sizes), max(largest, *sizes)
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total, largest


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def load_and_sample(directory: Path) -> dict[str, float]:
    """Loads in this process; the highest growth of anonymous memory over its value before."""
    from model.config import load_target_config
    from model.target import Target
    from model.weights import WeightFiles

    torch.set_num_threads(1)
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    config = load_target_config(directory)
    target = Target.load(WeightFiles.open(directory), config, VOCABULARY, torch.device("cpu"), torch.bfloat16)
    seconds = time.perf_counter() - started
    done.set()
    sampler.join()
    assert target.config.num_layers
    return {"peak": max(peak, anonymous_bytes()) - before, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_and_sample(args.load)))
        return
    rows: list[dict[str, Any]] = []
    for kind in ("dense", "mixture"):
        with tempfile.TemporaryDirectory() as name:
            model, largest = write(Path(name), config_of(args.hidden, args.layers, kind == "mixture"))
            command = [sys.executable, __file__, "--load", name]
            measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        limit = model + largest + model // 10
        row = {"model": kind, "bytes": model, "largest_tensor": largest, **measured, "limit": limit}
        rows.append(row)
        print(
            f"{kind:8} model {model / 2**20:7.1f} MiB, largest tensor {largest / 2**20:6.1f} MiB, peak "
            f"{row['peak'] / 2**20:7.1f} MiB, limit {limit / 2**20:7.1f} MiB, {row['seconds']:.2f} s"
        )
    if args.output:
        facts = {"machine": platform.machine(), "torch": torch.__version__, "page_bytes": resource.getpagesize()}
        args.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    if any(row["peak"] > row["limit"] for row in rows):
        raise SystemExit("peak memory is over the limit")


if __name__ == "__main__":
    main()
