"""What the readers of formats with a file per rank share: DeepSpeed and both of Megatron.

``torch_files`` opens the files of all ranks, ``shards`` makes whole tensors of their pieces,
``groups`` one list of the optimizer's groups, ``values`` small values of pickles; ``evidence`` and
``optimizer_order`` find out which parameter a master or a numbered slot is of; ``grouped_experts``
knows the order of Megatron's experts that are one parameter, ``copies`` a file that was copied over
another rank's.
"""
