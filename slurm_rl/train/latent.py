"""What lets Megatron-core 0.16.1 build latent attention (MLA) without TransformerEngine.

Owns one correction of its module, made once, before such a model is built: the module believes
that TransformerEngine is there whenever its own wrappers can be imported, which then are no
classes.
"""

from __future__ import annotations

from megatron.core.transformer import multi_latent_attention


def install() -> None:
    """Make the correction; more than once is no harm."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
