"""What an engine may be asked for, apart from its model and drafter; a wrong value gets one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import OptionError

COUNTS = (
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_prompt_len",
    "default_max_tokens",
    "max_batched_tokens",
    "num_pages",
)


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine but its model and drafter.

    gpu_memory_utilization: the share of the accelerator's memory to use. On a CPU: of the memory that is free, and at
    most 4 GiB of cache unless it is given. max_model_len: by default the model's own. num_pages overrides both.
    max_prompt_len: a longer prompt is refused. default_max_tokens: of requests without sampling parameters.
    kernels: auto, native (CPU), torch or reference. quantization: int8 or int4 packs float weights at load (native).
    acceptance: exact (default), rejection, block, or typical, which is lossy.
    """

    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_prompt_len: int | None = None
    default_max_tokens: int | None = None
    max_batched_tokens: int | None = None
    num_pages: int | None = None
    prefix_caching: bool = True
    acceptance: str = "exact"
    kernels: str = "auto"
    quantization: str | None = None
    prompt_template: str | None = None
    tensor_parallel_size: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise OptionError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported yet; allowed: 1 (one device)"
            )
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(f"{name}={value!r} is not allowed; allowed: a whole number of 1 or more")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise OptionError(f"seed={self.seed!r} is not allowed; allowed: a whole number")
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise OptionError(f"gpu_memory_utilization={share!r} is not allowed; allowed: above 0 up to 1")
