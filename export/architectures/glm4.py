"""GLM 4 of 2025: as GLM, with norms after the sub-layers, too."""

from edgespec.export.architectures.glm import Glm


class Glm4(Glm):
    model_type = "glm4"
    example = "GLM-4-9B-0414"
    features = "as glm; norms before and after sub-layers"
    after_attention = "post_self_attn_layernorm"
    after_mlp = "post_mlp_layernorm"
