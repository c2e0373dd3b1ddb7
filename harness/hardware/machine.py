"""Models of a machine's description, and of its GPU's state at one moment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """An immutable model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Snapshot(Frozen):
    """The state of one GPU at one moment, read from NVML; None where unknown."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    slowdowns: tuple[str, ...] = Field(default=(), description="reasons active at this moment")
    thermal_throttle_ns: int | None = Field(default=None, description="grows while throttled")
    ecc_uncorrected: int | None = None
    memory_used_mb: float | None = None
    processes: int | None = Field(default=None, description="that compute on this GPU")
    driver: str | None = None


class Telemetry(Frozen):
    """The state of the GPU right before, during and right after the calls of a sample.

    `during` is empty if the timed calls ended before the first reading.
    """

    before: Snapshot
    during: tuple[Snapshot, ...] = ()
    after: Snapshot


class Environment(Frozen):
    """The machine and the software that a measurement ran on; None where unknown.

    Measurements are compared only if all fields are equal, so an unchanged machine must keep them.
    """

    device: Literal["cuda", "cpu"]
    platform: str
    python: str
    torch: str
    triton: str | None
    cuda: str | None = Field(description="the CUDA release that torch was built with")
    gpu: str | None
    gpu_memory_mb: NotNegative | None
    compute_capability: str | None
    driver: str | None
    cpu_count: int
    cpu: str | None = Field(default=None, description="model of the processor")
    usable_cpus: int | None = Field(default=None, description="that this process may run on")
    memory_mb: NotNegative | None = Field(default=None, description="of the host or its cgroup")
    packages: dict[str, str] = Field(
        default_factory=dict, description="versions of the packages that a fork imports"
    )
    variables: dict[str, str] = Field(
        default_factory=dict, description="environment variables that change how kernels run"
    )
    gpu_uuid: str | None = None
    vbios: str | None = None
    power_limit_w: NotNegative | None = None
    ecc: bool | None = Field(default=None, description="whether memory errors are corrected")
    multiprocessors: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    memory_bus_bits: int | None = None
    l2_bytes: int | None = None


class EqualGpus(Frozen):
    """The visible GPUs of the first one's model."""

    uuids: tuple[str, ...] = Field(description="as in CUDA_VISIBLE_DEVICES")
