"""Numbers of every dtype in numpy: ``casts`` from one to another, ``floats`` to fp64 and back."""
