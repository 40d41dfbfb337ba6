"""Looks at checkpoints of any format and changes nothing.

``diff`` compares two (``elements``: their numbers beside each other), ``extract`` looks at one
tensor, ``verification`` reads every byte of one (``foreign``: of a format that is not ours).
"""
