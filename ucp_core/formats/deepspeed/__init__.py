"""DeepSpeed's checkpoints, read and written without DeepSpeed and without torch.

``reader`` opens both forms; the folder that ``ds_to_universal`` makes is read by
``universal_reader``. ``writer`` writes the native form, ``universal_writer`` the folder.
``reading`` and ``writing`` hold their parts, and share only the names in ``keys``.
"""
