"""Models as pure stage functions in the streaming form; each module has a config, `model(config)` and `init`.

`rpfunc.models.hf` (transformers' folders) and `rpfunc.models.lora_peft` (PEFT's) are imported by themselves.
"""

from rpfunc.models import decoder, lora, mlp, recurrence, resnet
from rpfunc.models.decoder import DecoderConfig
from rpfunc.models.lora import LoraConfig
from rpfunc.models.mlp import MlpConfig
from rpfunc.models.recurrence import RecurrenceConfig
from rpfunc.models.resnet import ResnetConfig

__all__ = [
    "DecoderConfig",
    "LoraConfig",
    "MlpConfig",
    "RecurrenceConfig",
    "ResnetConfig",
    "decoder",
    "lora",
    "mlp",
    "recurrence",
    "resnet",
]
