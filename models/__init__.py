"""Models as pure stage functions in the streaming form; each module has a config, `model(config)` and `init`."""

from rpfunc.models import decoder, mlp
from rpfunc.models.decoder import DecoderConfig
from rpfunc.models.mlp import MlpConfig

__all__ = ["DecoderConfig", "MlpConfig", "decoder", "mlp"]
