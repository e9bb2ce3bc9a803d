"""The engine's device side: a loaded model as something that runs plans."""

from serving.device.model_device import ModelDevice

__all__ = ["ModelDevice"]
