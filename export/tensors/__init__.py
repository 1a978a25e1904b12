"""Where the tensors of a source model come from: plain safetensors, quantized checkpoints, GGUF files, adapters.

Every kind gives a dict of ``Stored`` tensors under their Hugging Face names, each of which reads a part of itself as
float32; nothing is converted before it is asked for.
"""
