"""GPU kernels' Python side: which kernel serves a problem, its arguments, its launch."""
