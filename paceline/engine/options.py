"""What an engine may be asked for, apart from its model and drafter; a wrong value gets one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.budget import BUDGETS
from paceline.errors import OptionError
from paceline.params import check_count, check_flag, check_seed

WORDS = {"model_impl": ("auto", "paceline", "transformers"), "load_format": ("auto", "dummy"), "budget": BUDGETS}
COUNTS = (
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_prompt_len",
    "default_max_tokens",
    "max_batched_tokens",
    "num_pages",
)
FLAGS = (
    "exact_kernels",
    "enforce_eager",
    "mla_use_matrix_absorption",
    "trust_remote_code",
    "skip_tokenizer_init",
    "accept_licence",
)


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine but its model and drafter.

    dtype: one of float32, bfloat16, float16, auto.
    device: one of cpu, cuda, cuda:N, auto.
    block_size: tokens in a page of the cache.
    gpu_memory_utilization: the share of the accelerator's memory to use, above 0 up to 1. On a CPU: of the memory that
      is available, and at most 4 GiB of cache unless it is given.
    max_num_seqs: the most sequences computed at the same time.
    max_model_len: the most tokens of prompt and answer together; by default the model's own.
    max_prompt_len: the most tokens of a prompt; a longer one is refused.
    default_max_tokens: of requests without sampling parameters.
    max_batched_tokens: the most rows of one forward; by default 256 on a CPU, else 8192, and 2048 where texts are
      streamed to whoever waits for them (AsyncLLM, the server).
    num_pages: pages of the cache, instead of counting what fits into memory.
    prefix_caching: share the pages of prompts that begin alike.
    budget: how much is drafted: fixed, all that the drafter may; measured, what brings most tokens a second while so
      many sequences run, from what rounds cost; auto, measured on an accelerator if
      acceptance is exact, else fixed.
    acceptance: the rule: exact keeps every token; rejection and block keep the distribution; typical keeps neither.
    kernels: one of auto, native (CPU), triton (GPU), torch, reference.
    exact_kernels: whether a row is computed to the same bits whatever is computed with it, so that no drafter changes a
      token; fast kernels (GPU) are faster with many rows, and a tie in the last bits may flip a token.
    enforce_eager: launch every round kernel by kernel, instead of replaying what was captured (GPU).
    quantization: pack float weights at load, as int8 or int4 (native kernels).
    mla_use_matrix_absorption: cache the row that keys and values are made of, not these (models like DeepSeek's).
    model_impl: whose code runs the model: paceline, transformers (the fallback), or auto, ours where there is some.
    trust_remote_code: run the code that comes with a checkpoint, if neither paceline nor transformers has its own.
    load_format: auto reads the weights there are; dummy makes random ones from a folder's config.json, for measuring.
    skip_tokenizer_init: do without a tokenizer: token ids in and out, and no text.
    prompt_template: llama, vicuna, a Jinja file, or a text with {input_text} in it.
    tensor_parallel_size: devices to spread the model over; 1 for now.
    seed: of the run: a request without its own gets one made of this and of its number in the run.
    accept_licence: agree to the licence of a model known by name, where it asks for that before it is fetched.
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
    budget: str = "auto"
    acceptance: str = "exact"
    kernels: str = "auto"
    exact_kernels: bool = field(default=True, metadata={"flag": "--exact-kernels/--fast-kernels"})
    enforce_eager: bool = False
    quantization: str | None = None
    mla_use_matrix_absorption: bool = True
    model_impl: str = "auto"
    trust_remote_code: bool = False
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    prompt_template: str | None = None
    tensor_parallel_size: int = 1
    seed: int | None = None
    accept_licence: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise OptionError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported yet; allowed: 1 (one device)"
            )
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, 1)
                object.__setattr__(self, name, int(value))
        for name, words in WORDS.items():
            if getattr(self, name) not in words:
                raise OptionError(f"{name}={getattr(self, name)!r} is not known; allowed: {', '.join(words)}")
        for flag in FLAGS:
            check_flag(flag, getattr(self, flag))
        if not self.exact_kernels and self.kernels not in ("auto", "triton"):
            raise OptionError(
                f"fast kernels (exact_kernels=False) are Triton's, not {self.kernels!r}; allowed kernels: auto, triton"
            )
        if self.seed is not None:
            check_seed(self.seed)
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise OptionError(f"gpu_memory_utilization={share!r} is not allowed; allowed: above 0 up to 1")
