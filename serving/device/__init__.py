"""The engine's device side: a loaded model as something that runs plans.

device = ModelDevice(loaded, config, num_blocks_for(loaded, config))
device.warm_up(progress)
engine = BatchingEngine(info, config, device, tokenizer=loaded.tokenizer)
"""

from serving.device.model_device import ModelDevice
from serving.device.num_blocks import num_blocks_for

__all__ = ["ModelDevice", "num_blocks_for"]
