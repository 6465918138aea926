"""A real GPU: batch latency, ONNX files on CUDA, a sidecar in front of a torch server. `python benchmarks/gpu`."""
