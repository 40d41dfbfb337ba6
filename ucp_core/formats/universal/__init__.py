"""The universal checkpoint: whole tensors in safetensors files."""
