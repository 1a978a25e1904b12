"""Measurements of speed, memory and quality."""

import os

# benchmarks import ONNX Runtime, and other runtimes that hold it, before edgespec; the first variable is read at import
os.environ.update({"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})
