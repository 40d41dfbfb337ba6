"""Checkpoints of torch's distributed checkpoint (DCP): ``reader`` and ``writer``.

A directory (``directory``) has metadata (``metadata``) and data files, together a container
(``container``), which Megatron-core uses too; in some, tensors lie as safetensors
(``safetensors``). ``key_names`` says what its keys mean, ``state`` makes training state of it.
"""
