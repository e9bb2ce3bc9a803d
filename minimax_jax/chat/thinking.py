"""How much to think, by the several names that clients give it (specification model 4.2)."""

from collections.abc import Mapping
from typing import Any

MODES = ("enabled", "disabled", "adaptive")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
NO_EFFORT = ("none", "minimal")


def thinking_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with `thinking_mode` and `reasoning_effort` (low to max) for the template.

    The mode is the first given of `thinking_mode`, Anthropic's `thinking: {"type": mode}`, the bool
    `enable_thinking`, and "disabled" for the effort none or minimal. Without thought there is no
    effort. `enable_thinking` is set too where the mode is a yes or a no, for templates that know no
    modes. Options that are None count as not given. Raises ValueError for a value that is none of
    these.
    """
    levelled = {key: value for key, value in options.items() if value is not None}
    effort = levelled.pop("reasoning_effort", None)
    if effort is not None and effort not in EFFORTS + NO_EFFORT:
        raise ValueError(
            f"reasoning_effort must be one of {', '.join(NO_EFFORT + EFFORTS)}, got {effort!r}"
        )
    mode = _mode(levelled.pop("thinking_mode", None), levelled)
    if mode is None and effort in NO_EFFORT:
        mode = "disabled"
    if mode is not None:
        levelled["thinking_mode"] = mode
    if mode in ("enabled", "disabled"):
        levelled["enable_thinking"] = mode == "enabled"
    if effort in EFFORTS and mode != "disabled":
        levelled["reasoning_effort"] = effort
    return levelled


def _mode(mode: Any, options: dict[str, Any]) -> Any:
    """The mode asked for, or None; its aliases are taken out of the options."""
    thinking = options.pop("thinking", None)
    enable = options.pop("enable_thinking", None)
    if not isinstance(enable, (bool, type(None))):
        raise ValueError(f"enable_thinking must be true or false, got {enable!r}")
    if thinking is not None and not (isinstance(thinking, Mapping) and set(thinking) == {"type"}):
        raise ValueError(f'thinking must be {{"type": mode}}, got {thinking!r}')
    if mode is None and thinking is not None:
        mode = thinking["type"]
    if mode is None and enable is not None:
        mode = "enabled" if enable else "disabled"
    if mode is not None and mode not in MODES:
        raise ValueError(f"thinking_mode must be enabled, disabled or adaptive, got {mode!r}")
    return mode
