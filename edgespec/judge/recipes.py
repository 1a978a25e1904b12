"""How to start each engine, with and without speculation, so that it can be judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Commands for one engine.

    Attributes:
        server: command that starts it with speculation; ``{port}`` is the port.
        plain: command that starts it without; empty = ``switch`` does it.
        switch: fields of a request that make it decode plainly, as JSON.
        fields: fields that every request needs, as JSON.
        exact: its own settings for exactness.
        adapter: it has no server: edgespec's repository has a small one for it.
        tried: version that was run; empty = written from its documents, and not run.
    """

    server: str
    plain: str = ""
    switch: str = ""
    fields: str = ""
    exact: str = ""
    adapter: bool = False
    tried: str = ""

    def show(self, name: str) -> str:
        """Write the command that judges it, and notes about it."""
        words = [f'edgespec judge --command "{self.server}"']
        if self.plain:
            words.append(f'--against-command "{self.plain}"')
        words += [f"--{key} '{value}'" for key, value in (("fields", self.fields), ("plain", self.switch)) if value]
        lines = [" \\\n    ".join(words)]
        if self.exact:
            lines.append(f"its own settings for exactness: {self.exact}")
        if self.adapter:
            lines.append("it has no server: benchmarks/adapters.py of the repository is a small one")
        lines.append(
            f"{name}: {'run with version ' + self.tried if self.tried else 'untried: written from its documents'}"
        )
        return "\n".join(lines)


RECIPES = {
    "llama-server": Recipe(
        "llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple --port {port}",
        "llama-server -m TARGET.gguf --port {port}",
        exact="--no-repack",
        tried="0.5.0-dev (0c1e570)",
    ),
    "llama-cpp-python": Recipe(
        "python -m llama_cpp.server --model TARGET.gguf --draft_model prompt-lookup-decoding --logits_all true "
        "--port {port}",
        "python -m llama_cpp.server --model TARGET.gguf --logits_all true --port {port}",
        tried="0.3.36",
    ),
    "vllm": Recipe(
        'vllm serve TARGET --speculative-config {\\"model\\":\\"DRAFT\\",\\"num_speculative_tokens\\":3} --port {port}',
        "vllm serve TARGET --port {port}",
        exact="VLLM_BATCH_INVARIANT=1",
    ),
    "sglang": Recipe(
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path DRAFT --port {port}",
        "python -m sglang.launch_server --model-path TARGET --port {port}",
        exact="--enable-deterministic-inference",
    ),
    "ollama": Recipe("env OLLAMA_HOST=127.0.0.1:{port} ollama serve"),
    "mlx-lm": Recipe(
        "mlx_lm.server --model TARGET --draft-model DRAFT --port {port}", "mlx_lm.server --model TARGET --port {port}"
    ),
    "litert-lm": Recipe("litert-lm serve --host 127.0.0.1 --port {port}"),
    "openvino": Recipe(
        "python benchmarks/adapters.py openvino TARGET.gguf --lookup 3 --port {port}",
        "python benchmarks/adapters.py openvino TARGET.gguf --port {port}",
        exact="--settings with INFERENCE_PRECISION_HINT and KV_CACHE_PRECISION f32",
        adapter=True,
        tried="2026.4.1",
    ),
    "onnxruntime-genai": Recipe(
        "python benchmarks/adapters.py genai TARGET --port {port}", adapter=True, tried="0.18.0"
    ),
    "transformers": Recipe(
        "python benchmarks/adapters.py transformers TARGET --draft DRAFT --port {port}",
        "python benchmarks/adapters.py transformers TARGET --port {port}",
        exact="--dtype float32",
        adapter=True,
        tried="5.24.0",
    ),
    "edgespec": Recipe(
        "edgespec serve BUNDLE --port {port}",
        switch='{"edgespec": {"method": "ar"}}',
        fields='{"edgespec": {"method": "speculative"}}',
        tried="0.1.0",
    ),
}
