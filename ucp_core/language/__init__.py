"""Parts of the language for how shards make up tensors, which ``RULES.md`` describes.

Its patterns are values of ``ucp_core.language.patterns``, its rules of
``ucp_core.language.rules``; here are the
arithmetic of strided pieces (``affine``), the text form (``syntax``) and its printing (``plain``).
Families that ship are in ``ucp_core/language/families``.
"""
