"""ONNX graphs of stock operators, for the CPU and for devices."""
