"""Training state as a map: boxes, layouts, plans and checkpoints, without Ray or a GPU.

- arithmetic: ``boxes``, ``statemap``, ``layout``, ``plan``, ``targets``
- checkpoints of our own: ``checkpoint`` (save, find, load), ``manifest``, ``transfer`` (executes
  plans), ``exchange`` (replicas load together), ``checksums``, ``storage/``
- how shards make up tensors: ``patterns``, ``rules``, ``operators``, ``language/``, ``families/``
- other frameworks' checkpoints: ``converters/``
- any checkpoint into a universal one: ``conversion/``
- comparing, verifying, one tensor: ``inspection/``; numbers of every dtype: ``dtypes/``
- the command ``ucp``: ``cli`` and ``commands/``
"""
