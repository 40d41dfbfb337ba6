"""Files of other frameworks, whatever checkpoint they are part of; nothing in them is executed.

A torch file (``torch_reader``, ``torch_writer``) is a zip (``zip_reader``, ``zip_writer``) with a
pickle (``pickle_reader``, ``pickle_writer``), which names classes (``pickle_classes``), tensors
(``pickle_tensors``) and small values (``pickle_values``); ``pickle_machine`` runs its opcodes.
``safetensors`` is the header of such a file; ``inline`` serves values that are in no file.
"""
