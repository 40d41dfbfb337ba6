"""Language models: the reference decoder and those of Hugging Face. ``shape`` imports no torch."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.models.attention import (
        HUB_NAME,
        Context,
        bidirectional_attention,
        causal_attention,
        hub_attention,
        use_context,
    )
    from workers.models.decoder import Decoder, initial_value, mean_loss, tensor_plan
    from workers.models.hub_layout import as_in_module, pretrained
    from workers.models.huggingface import (
        adapter_documents,
        causal_lm,
        causal_lm_loss,
        documents,
        initial_parameter,
        saved_by,
    )
    from workers.models.shape import (
        BYTE_VOCAB_SIZE,
        PRESETS,
        ModelShape,
        block_parameters,
        chunks_of,
        num_parameters,
        resolve,
        shape_problems,
        stage_layers,
    )


__getattr__ = lazy_door(__name__)
