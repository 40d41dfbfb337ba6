"""What the readers of formats with a file per rank share: DeepSpeed and both of Megatron.

``shards`` makes whole tensors of ranks' pieces, ``values`` small values of pickles, ``evidence``
and ``optimizer_order`` find out which parameter a master or a numbered slot is of.
"""
