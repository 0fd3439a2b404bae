"""Plan, predict and explain a mixture-of-experts machine before owning one (docs/planner.md)."""

from __future__ import annotations

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
