"""Scale-steerable convolutions for PyTorch."""
