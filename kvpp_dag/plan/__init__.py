"""What is stored where: cache specs, ownership, layout and budget of a worker.

Pure data: nothing here imports torch. `plan_stage` turns the cache specs of one pipeline stage into a
`StagePlan`, the single source for budget, allocation, prefetch and verification. Public: the names
below, and `kvpp_dag.plan.budget` for conversions between bytes and blocks.
"""

from kvpp_dag.plan.budget import Capacity, capacity, capacity_multiplier
from kvpp_dag.plan.ownership import Ownership
from kvpp_dag.plan.presets import Preset, load_preset, preset_names, preset_stages
from kvpp_dag.plan.specs import Bundle, CacheSpec, Component
from kvpp_dag.plan.stage import ModelPlan, StagePlan, plan_model, plan_stage

__all__ = [
    "Bundle",
    "CacheSpec",
    "Capacity",
    "Component",
    "ModelPlan",
    "Ownership",
    "Preset",
    "StagePlan",
    "capacity",
    "capacity_multiplier",
    "load_preset",
    "plan_model",
    "plan_stage",
    "preset_names",
    "preset_stages",
]
