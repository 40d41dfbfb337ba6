"""Parts of the language for how shards make up tensors, which ``RULES.md`` describes.

Its patterns are values of ``ucp_core.patterns``, its rules of ``ucp_core.rules``; here are the
arithmetic of strided pieces (``affine``) and the text form (``syntax``). Families that ship
are in ``ucp_core/families``.
"""
