"""Parts of the writers of DeepSpeed's checkpoints.

What is to be written (``model``), how it is spread over ranks and files (``partitions``,
``pipeline``, ``universal_info``), what each file holds (``trees``), its bytes as streams
(``streams``), and how files come into a store (``output``).
"""
