"""A real GPU: batch latency, ONNX files on CUDA, a sidecar before a torch server. `python benchmarks/gpu`."""
