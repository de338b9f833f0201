"""Tensor models: ONNX files in Triton's repository layout. The packages that this needs are the extra `tensor`."""
