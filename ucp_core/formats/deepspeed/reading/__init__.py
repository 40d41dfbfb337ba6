"""Parts of the readers of DeepSpeed's checkpoints.

Which files there are (``file_names``, ``topology``), what ZeRO's hold (``partitions``, ``zero``;
without ZeRO ``plain_optimizer``), what the model's hold (``weights``, ``extras``), and how tensors
are cut over tensor parallel ranks (``tensor_parallel``).
"""
