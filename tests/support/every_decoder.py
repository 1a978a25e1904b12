"""Every causal model type of transformers in small: is it exported, is its text transformers', are its rows exact?

    python -m tests.support.every_decoder FOLDER [--only KIND ...] [--again]

writes ``FOLDER/decoders.jsonl``, a line a type as soon as it was tried, and then docs/reference/decoders.csv and what
docs/models.md says of it.  A run continues where the last one stopped.  Models have random weights.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import multiprocessing
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from edgespec.export.architectures import ARCHITECTURES
from edgespec.runtimes.files.operators import LINEAR, NATIVE
from tests.support import hf

SAMPLE = ("gpt_neo", "mixtral", "deepseek_v3", "mamba", "bamba", "flint", "helium")
"""Types of several kinds, for the nightly tests: dense, experts, latent attention, states, positions that are given,
sinks, a tiny epsilon."""
SINGLE = {"mamba", "bamba"}
"""Those of them whose graphs run row by row."""
NOT_DECODERS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "gemma4_assistant", "gemma4_unified_assistant", "git", "marian", "mbart",
    "megatron-bert", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "pegasus",
    "plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr",
    "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
    # wrappers of a text model, which has its own type, with images or sound
    "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "dots3_note", "qwen4_exp",
}  # fmt: skip
"""Types in transformers' mapping of causal models that are no decoders of text alone."""
VOCAB, CONTEXT, TOKENS = 160, 256, 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "sep_token_id": None,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "d_ff": 96, "ffn_hidden_size": 96, "dff": 96,
    "dim_ff": 96, "dense_ff_hidden_size": 96, "intermediate_size_mlp": 96,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_head_kv": 2, "head_dim": 16, "kv_channels": 16,
    "max_position_embeddings": CONTEXT, "n_positions": CONTEXT, "n_ctx": CONTEXT, "seq_length": CONTEXT,
    "max_seq_len": CONTEXT, "sliding_window": 8, "attention_window_size": 8, "window_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "experts_per_token": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 512,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8, "num_kv_shared_layers": 0,
    "state_size": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_n_groups": 1,
    "mamba_d_ssm": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
    "mamba_headdim": 16, "n_mamba_heads": 2, "lru_width": 64, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "attention_hidden_size": 64, "chunk_size": 16, "mamba_chunk_size": 16, "initializer_range": 0.2, "init_std": 0.2,
    "pad_vocab_size_multiple": 1, "dim_model_base": 64, "scale_depth": 1.4, "lm_head_multiplier": 1.0,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 8,
    "unpadded_vocab_size": VOCAB, "rel_extent": 16, "linear_num_heads": 4, "linear_head_dim": 16,
    "moe_shared_expert_intermediate_size": 32,
    "rotary_dim": 8, "num_nextn_predict_layers": 0, "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
"""Sizes by their names in configurations; each type takes those that it has."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "inkling2_loop_text": {
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "layer_types": None,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "xlstm": {"hidden_size": 128, "num_heads": 4},
    "ctrl": {"n_embd": 64, "dff": 96},
    "rwkv": {"attention_hidden_size": 64},
    "modernbert-decoder": {"sep_token_id": 1},
    "opt": {"word_embed_proj_dim": 64},
    "persimmon": {"num_key_value_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single types."""


@dataclass(frozen=True)
class Row:
    """The results of a type; every field but ``kind`` is a column of the table."""

    kind: str
    exported: bool = False
    equal: bool = False  # plain decoding in fp32 writes transformers' greedy text
    rows: bool = False  # a pass verifies several rows at once
    exact: bool = False  # in int4, every method gives plain decoding's text, and the probe found no differing bit
    operators: str = ""  # that run it in int4: native, linear (only its linear layers are), or stock
    methods: Sequence[str] = field(default_factory=tuple)  # those that ran
    why: str = ""  # of what failed
    seconds: float = 0.0  # of processor time

    @property
    def cells(self) -> list[str]:
        """Return the row of the table."""
        said = ["yes" if one else "no" for one in (self.exported, self.equal, self.rows, self.exact)]
        return [self.kind, *said, self.operators, " ".join(self.methods), self.why]


def missing_types() -> list[str]:
    """List the decoders of transformers that edgespec does not emit itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - NOT_DECODERS - {*ARCHITECTURES})


def small_model(kind: str) -> Any:
    """Make a small model of a type with random weights, in float32."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[kind]
    usual = made()
    known = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    given = {name: value for name, value in SMALL.items() if name in known}
    heads = [usual.to_dict().get(name) for name in ("num_key_value_heads", "num_attention_heads")]
    if "num_key_value_heads" in given and heads[0] == heads[1]:
        given["num_key_value_heads"] = 4
    if {"head_dim", "qk_rope_head_dim"} <= {*given}:  # the head's part that is rotated
        given["head_dim"] = given["qk_rope_head_dim"]
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        fixed = getattr(made, getattr(made, "attribute_map", {}).get(name, name), None)
        if isinstance(fixed, property) and fixed.fset is None:
            continue
        if len(kinds := list(dict.fromkeys(getattr(usual, name, None) or ()))) > 1:
            given |= {name: kinds, "num_hidden_layers": len(kinds)}
    if (layers := given.get("num_hidden_layers")) and layers > 2:
        given |= {name: (getattr(usual, name) * layers)[:layers] for name in ("layer_types", "mlp_layer_types")
                  if name not in given and isinstance(getattr(usual, name, None), list)}  # fmt: skip
    torch.manual_seed(5)
    config = made(**given | OWN.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and float(weight.std()) < 0.1:  # texts would be ties
                weight.normal_(0, 0.2)
            assert bool(torch.isfinite(weight).all()), name
    return model


def try_type(kind: str, folder: Path) -> Row:
    """Make a model of a type in a folder, export it and decode with it."""
    found, begun = [Row(kind)], time.process_time()
    try:
        found.extend(_steps(Row(kind), folder))
    except Exception as error:  # of any model's code
        found.append(replace(found[-1], why=_line(error).replace(f"{folder}/", "")))
    return replace(found[-1], seconds=round(time.process_time() - begun, 1))


def _steps(row: Row, folder: Path) -> Iterator[Row]:
    """Yield what is known of a type after every step."""
    import torch

    from edgespec.engine.loading import load
    from edgespec.export.foreign.capture import capture
    from edgespec.export.options import ExportOptions
    from edgespec.export.pipeline import export_model

    model = small_model(row.kind)
    source, draft = folder / "model", folder / "draft"
    source.mkdir(parents=True)
    model.config.save_pretrained(source)
    hf.write_tokenizer(source, CONFIG)
    prompts = [[5, 9, 33, 7, 5, 9, 33, 7, 41, 5, 9], [60, 11, 99, 60, 11, 99, 60], [int(x) for x in range(20, 60)]]
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            text = list(prompt)
            for _ in range(TOKENS):  # without a cache: nothing of it can hide a fault
                text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            expected.append(text[len(prompt) :])
    capture(model, source)
    hf.write_checkpoint(draft, CONFIG | {"num_hidden_layers": 1}, 3)
    row = replace(row, exported=True)
    yield row

    options: dict[str, Any] = {"threads": 1, "context": 128}
    export_model(ExportOptions(str(source), folder / "fp32", format="fp32", **options), golden=False)
    with load(folder / "fp32", threads=1) as engine:
        texts = [_write(engine, prompt, "ar") for prompt in prompts]
        single = engine.bundle.manifest.target.graphs["plain"] == engine.bundle.manifest.target.graphs["strict"]
    row = replace(row, equal=texts == expected, rows=not single)
    row = row if row.equal else replace(row, why="another text than transformers'")
    yield row

    wanted = ExportOptions(
        str(source), folder / "int4", format="int4", methods=["ngram", "speculative"], draft=str(draft), **options
    )
    export_model(wanted, golden=False)
    with load(folder / "int4", threads=1) as engine:
        plain, ran = [_write(engine, prompt, "ar") for prompt in prompts], ["ar"]
        exact, graph = engine.exact_rows, engine.model.graph_name
        for method in ("ngram", "speculative"):
            same = [_write(engine, prompt, method) for prompt in prompts] == plain
            exact = exact and same
            ran.append(method)
    operators = graph if graph in (NATIVE, LINEAR) else "stock"
    why = row.why or ("" if exact else "rows differ")
    yield replace(row, exact=exact, operators=operators, methods=tuple(ran), why=why)


CONFIG: hf.Config = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""The draft's configuration, and that of every model's tokenizer."""


def _write(engine: Any, prompt: list[int], method: str) -> list[int]:
    found: list[int] = engine.generate(
        prompt, method=method, max_new_tokens=TOKENS, ignore_eos=True, fallback=False, temperature=0.0
    ).tokens
    return found


def _line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:160]}"


HEAD = ["type", "exported", "same text", "several rows per pass", "exact", "operators", "methods", "why not"]
TABLE, PAGE = Path("docs/reference/decoders.csv"), Path("docs/models.md")
BEGIN, END = "<!-- decoders:begin -->\n", "<!-- decoders:end -->\n"


def write_table(rows: Sequence[Row], file: Path) -> None:
    """Write the table of all types."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([HEAD, *(row.cells for row in rows)])


def summary(table: Path) -> str:
    """Say in Markdown how many types of a table work."""
    with table.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    equal = [row for row in rows if row["same text"] == "yes"]
    fast = [row for row in equal if (row["several rows per pass"], row["exact"]) == ("yes", "yes")]
    where = TABLE.relative_to("docs")
    whole = sum(row["operators"] == NATIVE for row in rows)
    return (
        f"Of {len(rows)} types tried in small (transformers 5.24, random weights), {len(equal)} write transformers' "
        f"text in float32. {len(fast)} of those verify several rows per pass exactly, and {whole} have their attention "
        f"on native operators ([table]({where})).\n"
    )


def write_page(page: Path, table: Path) -> None:
    """Put the summary of a table into a page."""
    text = page.read_text("utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}{summary(table)}{END}{rest.split(END)[1]}", "utf-8")


def main() -> None:
    """Try the types that were not tried yet, each in a separate process, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--again", action="store_true", help="also types that failed before")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time, for a type")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    file = given.folder / "decoders.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    found = {line["kind"]: Row(**line) for line in lines}
    import onnxscript  # noqa: F401 - once for all types
    import torch  # noqa: F401
    import transformers.exporters.exporter_onnx  # noqa: F401

    import edgespec.export.pipeline  # noqa: F401

    for kind in given.only or missing_types():
        if kind in found and not (given.again and not (found[kind].exact and found[kind].equal)):
            continue
        shutil.rmtree(given.folder / kind, ignore_errors=True)
        found[kind] = _apart(kind, given.folder / kind, given.seconds)
        shutil.rmtree(given.folder / kind, ignore_errors=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(found[kind])) + "\n")
        print(json.dumps(asdict(found[kind])), flush=True)  # noqa: T201 - a script
    write_table([found[kind] for kind in missing_types() if kind in found], TABLE)
    write_page(PAGE, TABLE)


MOST_BYTES, LONGEST = 16 << 30, 20  # of memory for a type; of time, for one of processor time


def _apart(kind: str, folder: Path, seconds: int) -> Row:
    """Try a type in a separate process, which has torch from this one: it may crash, or take too much."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, kind, folder, seconds))
    child.start()
    sender.close()
    found: Row | None = None
    with suppress(EOFError):
        found = receiver.recv() if receiver.poll(LONGEST * seconds) else None
    child.join(1)
    died = f"the process died ({child.exitcode})" if child.exitcode not in (None, 0, -signal.SIGXCPU) else ""
    child.kill()
    child.join()
    return found or Row(kind, why=died or f"took more than {seconds} s of processor time")


def _send(sender: Connection, kind: str, folder: Path, seconds: int) -> None:
    import resource  # where a fork is

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sender.send(try_type(kind, folder))


if __name__ == "__main__":
    main()
