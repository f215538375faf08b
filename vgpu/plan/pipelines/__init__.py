"""Plans with stages: a rank of each kind of stage is recorded, and the schedule played over all."""

from vgpu.plan.pipelines.simulation import predict_pipeline

__all__ = ["predict_pipeline"]
