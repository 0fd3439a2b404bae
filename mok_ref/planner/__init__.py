"""Plan, predict and explain a mixture-of-experts machine before owning one (docs/planner.md).

Names are loaded when they are asked for, so that the layer's look-up of measured sizes
(`mok_ref.planner.tune`) does not bring the simulators along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok_ref.planner.choice import Choice
    from mok_ref.planner.hardware import Hardware, known_hardware, load_hardware
    from mok_ref.planner.models import ModelDescription, known_models, load_model
    from mok_ref.planner.placement import Placement, place_experts
    from mok_ref.planner.plan import Plan, make_plan, parse_plan, plan_text

__all__ = [
    "Choice",
    "Hardware",
    "ModelDescription",
    "Placement",
    "Plan",
    "known_hardware",
    "known_models",
    "load_hardware",
    "load_model",
    "make_plan",
    "parse_plan",
    "place_experts",
    "plan_text",
]

_MODULES = ("choice", "hardware", "models", "placement", "plan")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"mok_ref.planner.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module 'mok_ref.planner' has no attribute {name!r}")
